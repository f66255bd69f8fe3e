"""Fencing of the limiter's leases: which requests run for each process, and which are no longer accepted.

A process that is dead, or that was suspended for longer than its lease, has lost its slots. The limiter fences its
leases here before it grants the slots to other processes.

Invariant: after `fence` returned 0 for a holder, no request of its leases up to that number runs or starts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple, Self

from toolroll.sandbox.server.hub.rejections import LeaseLost

MAX_FENCES = 100_000
"""Maximum number of fenced holders. The oldest are forgotten first, long after the deadlines of their requests."""


class LeaseToken(NamedTuple):
    """One lease of a holder."""

    holder: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "holder/number". Raises ValueError if the text has another form."""
        holder, _, number = text.rpartition("/")
        if not text.isascii():
            raise ValueError(f"not ASCII: {text!r}")
        return cls(holder, int(number))


class LeaseFences:
    """Fenced leases, and the number of running requests of each lease.

    Args:
        started_at: Time at which the server started. It does not know which leases were fenced before.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._fences: OrderedDict[str, int] = OrderedDict()
        """Number of the last lease of each holder whose requests are rejected."""
        self._running: Counter[LeaseToken] = Counter()

    def fence(self, holder: str, number: int) -> int:
        """Reject further requests of a holder's leases up to a number.

        Returns:
            The number of requests of these leases that still run.
        """
        self._fences[holder] = max(number, self._fences.pop(holder, number))
        if len(self._fences) > MAX_FENCES:
            self._fences.popitem(last=False)
        leases = (lease for lease in self._running if lease.holder == holder and lease.number <= number)
        return sum(self._running[lease] for lease in leases)

    def start(self, lease: LeaseToken, granted_at: float | None) -> None:
        """Count a request as running.

        Args:
            lease: Lease of the request.
            granted_at: Time at which the slot of the request was granted, if it is known.

        Raises:
            LeaseLost: If the lease was fenced, or may have been fenced before the server started.
        """
        if lease.number <= self._fences.get(lease.holder, -1):
            raise LeaseLost(
                f"The lease {lease.holder}/{lease.number} has ended and was fenced. The program was not run. "
                "Acquire another slot."
            )
        if granted_at is not None and granted_at < self._started_at:
            raise LeaseLost(
                "The server was restarted after the slot was granted. The program was not run. Acquire another slot."
            )
        self._running[lease] += 1

    def end(self, lease: LeaseToken) -> None:
        """Count a request as ended."""
        self._running[lease] -= 1
        if not self._running[lease]:
            del self._running[lease]
