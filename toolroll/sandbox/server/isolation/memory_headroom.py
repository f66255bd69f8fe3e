"""Reserve memory so that an out-of-memory traceback can still be printed.

The reserve is the difference between the soft and the hard limits of the process. It is withheld while the program's
code runs and available to all other code. If a program sets its own limits, these apply without a reserve, and
its last traceback may be missing.

Imports only the standard library.
"""

from __future__ import annotations

from resource import RLIMIT_AS, RLIMIT_DATA, getrlimit, setrlimit

HEADROOM_BYTES = 8 << 20
"""Size of the reserve. A traceback needs some kilobytes, IPython some megabytes."""


class HeadroomLimit:
    """One resource limit, with and without the reserve."""

    def __init__(self, resource: int) -> None:
        self.resource = resource
        self.capture()

    def capture(self) -> None:
        """Take the current limit as the one with the reserve."""
        self.reserved = _, hard = getrlimit(self.resource)
        self.released = hard, hard

    def reserve(self) -> bool:
        """Withhold the reserve. Return False if it was withheld already or the program has set the limit."""
        if getrlimit(self.resource) != self.released:
            return False
        setrlimit(self.resource, self.reserved)
        return True

    def release(self) -> None:
        """Make the reserve available, unless the program has set the limit."""
        try:
            if getrlimit(self.resource) == self.reserved:
                setrlimit(self.resource, self.released)
        except MemoryError:  # no memory for the result of getrlimit(); the call below allocates none
            try:
                setrlimit(self.resource, self.released)
            except ValueError:
                return


_data, _address_space = HeadroomLimit(RLIMIT_DATA), HeadroomLimit(RLIMIT_AS)


def capture_limits() -> None:
    """Take the current limits of this process as those of its program. The reserve is withheld from now on."""
    _data.capture()
    _address_space.capture()


def reserve() -> bool:
    """Withhold the reserve, before code of the program runs. Return False if it was withheld already."""
    was_released = _data.reserve()
    _address_space.reserve()
    return was_released


def release() -> None:
    """Make the reserve available, after code of the program has run."""
    _data.release()
    _address_space.release()
