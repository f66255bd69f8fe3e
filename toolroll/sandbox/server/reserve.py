"""Memory that is kept back from a Python program, so that its end can be told when it has used up the rest.

It is what lies between the soft limits and the hard ones. While the program's own code runs it is kept, for all else it
may be used. A program that sets limits itself has those that it sets, and no reserve: its end may go untold.

Only the standard library is imported.
"""

from __future__ import annotations

from resource import RLIMIT_AS, RLIMIT_DATA, getrlimit, setrlimit

SIZE = 8 << 20
"""Bytes. A traceback needs some thousands, IPython some millions."""


class Limit:
    """One limit, with its reserve kept and with it used."""

    def __init__(self, what: int) -> None:
        self.what = what
        self.kept = getrlimit(what)
        self.used = self.kept[1], self.kept[1]

    def keep(self) -> bool:
        """Whether it was used until now."""
        if getrlimit(self.what) != self.used:
            return False
        setrlimit(self.what, self.kept)
        return True

    def use(self) -> None:
        """Use it, unless the program has set the limit."""
        try:
            if getrlimit(self.what) == self.kept:
                setrlimit(self.what, self.used)
        except MemoryError:  # for what it is now. What follows needs none.
            try:
                setrlimit(self.what, self.used)
            except ValueError:
                return


_data, _space = Limit(RLIMIT_DATA), Limit(RLIMIT_AS)


def prepare() -> None:
    """Take the limits of this process for those of its program."""
    global _data, _space
    _data, _space = Limit(RLIMIT_DATA), Limit(RLIMIT_AS)


def keep() -> bool:
    """The program's own code comes next. Whether it hadn't come already."""
    was_used = _data.keep()
    _space.keep()
    return was_used


def use() -> None:
    """The program's own code is over, for now or for good."""
    _data.use()
    _space.use()
