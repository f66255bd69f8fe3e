"""Estimate of a server's clock, so that deadlines do not depend on equal clocks. No clock and no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass
class ServerClock:
    """Estimate of the clock of one server, from responses that contain its time.

    Invariant: the server's clock reaches `at(moment)` at that moment or up to one round-trip time earlier, never later.
    """

    measured_at: float = -inf
    """Time of the last measurement, on the local clock."""
    _offset: float = -inf
    """Lower bound of the server's time minus the local time; -inf if the server does not report its time."""

    @property
    def is_known(self) -> bool:
        """Whether the server has reported its time."""
        return self._offset > -inf

    def measure(self, server_time: float, sent_at: float, received_at: float) -> None:
        """Record a response that contains the server's time.

        Args:
            server_time: Time by the server's clock, between the sending and the receipt.
            sent_at: Time at which the request was sent, on the local clock.
            received_at: Time at which the response was received, on the local clock.
        """
        lowest, highest = server_time - received_at, server_time - sent_at
        # The highest lower bound is the most precise one. Below it, the server's clock was set back, or runs slower.
        self._offset = lowest if highest < self._offset else max(self._offset, lowest)
        self.measured_at = received_at

    def at(self, moment: float) -> float:
        """Return the server's time at a moment of the local clock."""
        return self._offset + moment
