"""Messages between a holder and the ledger, and the holder's side of a lease.

A holder is a process that uses slots. It sends a `HolderReport`; the ledger answers with a `Lease` that grants a number
of slots for a limited time. `LeasedSlots` tracks the slots that the holder may use. The module has no clock and no I/O:
the caller passes the time, in seconds.

Invariants of the holder, on which the ledger relies:

- Only the answer to the latest report is applied. After a new report, answers to earlier reports are ignored.
- A lease's lifetime starts when its report is sent. No work starts after `USABLE_LEASE_FRACTION` of it.
- No work starts that may last longer than the latest report announced and the lease confirmed.
- After the resource has rejected work, no work starts before the ledger has answered a report of the rejection. So a
  resource that rejects everything receives no more requests than the ledger allows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from toolroll.limiter.ledger.credit import NO_AMOUNTS, Amounts, CreditLease, CreditReport, LeasedCredit
from toolroll.limiter.ledger.feedback import Feedback, OutcomeCounter
from toolroll.limiter.ledger.policy import LimitPolicy

USABLE_LEASE_FRACTION = 0.9
"""Fraction of a lease's lifetime in which work may start. The rest allows for clocks of different speed."""


HolderFence = Callable[[str, int], Awaitable[int | None]]
"""Function that makes a resource reject the work of a holder, given the holder's name and the number of its last lease.

It returns the number of slots whose work still runs, or None if that is unknown. The limiter's actor calls it, so it
must be serializable.
"""


class HolderReport(NamedTuple):
    """State of one holder. Sent as a plain tuple."""

    holder: str
    """Unique name of the holder."""
    seq: int
    """Sequence number, which increases with each report."""
    has: int
    """Slots that the holder may use by its current lease; 0 if the lease has expired."""
    in_use: int
    """Slots in use. Exceeds `has` while a lease shrinks."""
    wants: int
    """Slots in use plus the number of waiters."""
    hold: float
    """Maximum remaining duration of any work that runs, or may start before the next report, in seconds."""
    confirmed_hold: float
    """The `hold` that the current lease confirmed. If it is less than `hold`, work waits for an answer."""
    feedback: Feedback = Feedback()
    """Outcomes of the holder's work."""
    credit: CreditReport = CreditReport()
    """Credit of rates and budgets."""


class Lease(NamedTuple):
    """Answer to a report. Sent as a plain tuple. The defaults are the state before the first answer."""

    seq: int = 0
    """Sequence number of the answered report."""
    capacity: int = 0
    """Slots that the holder may use."""
    ttl: float = 0.0
    """Lifetime of the lease in seconds, starting when the report was sent."""
    contended: bool = False
    """Whether more slots are wanted than exist. If so, the holder reports promptly when it needs fewer."""
    interval: float = 0.0
    """Interval between reports of changes while slots are contended, in seconds."""
    limit: int = 0
    """Limit of the whole cluster."""
    version: int = 0
    """Version of the limit."""
    epoch: int = 0
    """Number of the latest change of an adaptive limit; 0 if the limit does not adapt."""
    is_probe: bool = False
    """Whether the circuit breaker is open. After each use that does not succeed, the holder waits for an answer."""
    policy: LimitPolicy | None = None
    """Limits of the whole cluster."""
    credit: CreditLease = CreditLease()
    """Credit of rates and budgets."""


@dataclass
class LeasedSlots:
    """Slots that a holder may use by its current lease."""

    holder: str
    """Unique name of the holder."""
    lease: Lease = field(default_factory=Lease)
    """The current lease. Before the first one, its `ttl` is 0."""
    expires_at: float = -inf
    """Time after which no work may start by the lease."""
    sent_at: float = 0.0
    """Time at which the latest report was sent."""
    answered_at: float = -inf
    """Time at which the report was sent that the lease answers."""
    credit: LeasedCredit = field(default_factory=LeasedCredit)
    outcomes: OutcomeCounter = field(default_factory=OutcomeCounter)
    _seq: int = 0
    _rejected_seq: int | None = None
    """Sequence number of the first report that includes the last rejection, before whose answer no work starts."""
    _hold_reported: float = 0.0
    _hold_confirmed: float = 0.0

    @classmethod
    def fixed(cls, limit: int) -> LeasedSlots:
        """Return slots of a single process, which never expire."""
        lease = Lease(capacity=limit, limit=limit)
        return cls("local", lease, expires_at=inf, _hold_reported=inf, _hold_confirmed=inf)

    def usable(self, now: float) -> int:
        """Return the number of slots that may be in use now."""
        return self.lease.capacity if now < self.expires_at else 0

    @property
    def is_paused(self) -> bool:
        """Whether work must wait until the ledger has answered a report of a rejection."""
        return self._rejected_seq is not None

    @property
    def has_unreported_rejection(self) -> bool:
        """Whether no report of the last rejection was sent."""
        return self._rejected_seq is not None and self._seq < self._rejected_seq

    def reject(self, epoch: int, retry_at: float) -> None:
        """Count a rejection of work that was granted in an epoch."""
        self.outcomes.reject(epoch, retry_at)
        if self.lease.is_probe or (self.lease.epoch and epoch == self.lease.epoch):
            self._rejected_seq = self._seq + 1

    def end(self) -> None:
        """Count work that ended without telling anything about the resource."""
        self.outcomes.end()
        if self.lease.is_probe:
            self._rejected_seq = self._seq + 1

    def allows(self, hold: float) -> bool:
        """Return True if work that lasts `hold` seconds may start."""
        return self.has_announced(hold) and hold <= self._hold_confirmed

    def has_announced(self, hold: float) -> bool:
        """Return True if the latest report announced work that lasts `hold` seconds, confirmed or not."""
        return hold <= self._hold_reported

    @property
    def token(self) -> str | None:
        """Name of the lease by which slots are granted now, which requests carry; None for slots of a single process.

        It has the form "holder/number", and the numbers of a holder's leases increase.
        """
        return f"{self.holder}/{self.lease.seq}" if self.lease.seq else None

    def report(
        self,
        now: float,
        *,
        in_use: int,
        wants: int,
        hold: float,
        first_cost: Amounts = NO_AMOUNTS,
        wanted_cost: Amounts = NO_AMOUNTS,
    ) -> HolderReport:
        """Return the next report. Answers to earlier reports are ignored from now on.

        Args:
            now: Current time.
            in_use: Slots in use.
            wants: Slots in use plus the number of waiters.
            hold: Maximum remaining duration of work, in seconds.
            first_cost: Cost of the first waiter.
            wanted_cost: Cost of all waiters.
        """
        self._seq += 1
        self.sent_at, self._hold_reported = now, hold
        credit = self.credit.report(first_cost, wanted_cost, now)
        slots = self.usable(now), in_use, wants
        return HolderReport(
            self.holder, self._seq, *slots, hold, self._hold_confirmed, self.outcomes.report(now), credit
        )

    def terminate(self) -> None:
        """Give up the lease and ignore any answer that is still in transit."""
        self._seq += 1
        self.expires_at = -inf

    def apply(self, lease: Lease) -> bool:
        """Apply an answer of the ledger. Return False if it answers an earlier report and was ignored."""
        if lease.seq != self._seq:
            return False
        self.lease, self._hold_confirmed, self.answered_at = lease, self._hold_reported, self.sent_at
        self.expires_at = self.sent_at + USABLE_LEASE_FRACTION * lease.ttl
        budgets = lease.policy.budgets if lease.policy else NO_AMOUNTS
        self.credit.apply(lease.credit, budgets, self.sent_at, USABLE_LEASE_FRACTION)
        self.outcomes.start_epoch(lease.epoch)
        if self._rejected_seq is not None and lease.seq >= self._rejected_seq:
            self._rejected_seq = None
        return True
