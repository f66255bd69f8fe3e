"""FIFO queue for the slots that this process has leased.

Invariants:

- Slots are granted in the order of the requests, across all event loops and threads of the process.
- Slots in use never exceed the leased slots. If the lease shrinks, slots in use are kept until they are released.
- A waiter that is cancelled or times out holds no slot afterwards, even if one was granted at the same moment.
- A slot is granted only if the leased credit of each rate and budget covers the cost of the work.

The queue does no I/O. The owner sends `report()` to the ledger and passes the answer to `apply()`. The queue calls
`on_waiting` when a waiter is queued.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from toolroll.limiter.ledger.credit import NO_AMOUNTS, Amounts
from toolroll.limiter.ledger.feedback import MAX_RESPECTED_RETRY_AFTER_S, Rejection
from toolroll.limiter.ledger.lease import HolderReport, Lease, LeasedSlots

HOLD_WINDOW_S = 60.0
"""Time for which the longest `hold` is remembered, so that similar work need not be announced again."""

HOLD_MARGIN = 1.05
"""Factor by which announced holds exceed the requested ones, so that slightly longer work needs no announcement."""


@dataclass(frozen=True)
class Success:
    """Work that the resource accepted."""


SUCCESS = Success()

Outcome = Success | Rejection
"""How the resource responded to the work."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request for a slot. `wake` is called once, after `key` was set."""

    hold: float
    wake: Callable[[], None]
    cost: Amounts = field(default_factory=dict)
    """Cost of the work, by unit. Estimated, until it is corrected."""
    queued_at: float = -inf
    key: int | None = None
    """Number of the granted slot; None while waiting."""
    granted_at: float = -inf
    expires_at: float = -inf
    """Time by which the work in the slot must have ended."""
    lease: str | None = None
    """Token of the lease by which the slot was granted."""
    epoch: int = 0
    """Number of the change of the limit by which the slot was granted."""
    exhausted: tuple[str, float] | None = None
    """Unit whose budget does not suffice, and what is left of it."""


class SlotQueue:
    """This process's slots of one resource, and the waiters for them. Used through `Slot`."""

    def __init__(self, resource: str, leased: LeasedSlots, on_waiting: Callable[[], None] = lambda: None) -> None:
        self.resource = resource
        self.on_waiting = on_waiting
        self._leased = leased
        self._lock = threading.Lock()
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()  # a queue from which any waiter is removed quickly
        self._held_until: dict[int, float] = {}
        """Latest end of the work in each slot in use, by the slot's key."""
        self._last_key = 0
        self._longest_hold = LongestHold()
        self._wanted_cost: dict[str, float] = {}
        """Cost of all waiters, by unit."""
        self._reported = (0, 0)
        """`in_use` and `wants` of the latest report."""
        self._reported_outcomes = 0
        """Number of outcomes in the latest report."""
        self._reported_first: Amounts = NO_AMOUNTS
        """Cost of the first waiter in the latest report; empty if there was none."""
        self._first_gave_up = False
        """Whether the first waiter in the latest report has left the queue, and the ledger saves up credit for it."""
        self._reported_free_slot = False
        """Whether the latest report has a free slot."""

    @property
    def in_use(self) -> int:
        """Number of slots in use in this process."""
        return len(self._held_until)

    @property
    def waiting(self) -> int:
        """Number of waiters in this process."""
        return len(self._waiters)

    @property
    def lease_expired(self) -> bool:
        """Whether no slot can be granted because the lease has expired."""
        return time.monotonic() >= self._leased.expires_at

    def acquire(self, waiter: Waiter) -> bool:
        """Grant the waiter a slot and return True, or append it to the queue and return False."""
        with self._lock:
            now = time.monotonic()
            self._longest_hold.add(waiter.hold, now)
            if not self._waiters and self._can_grant(waiter, now):
                self._grant(waiter, now)
                return True
            self._add(waiter, now)
            self._refuse_exhausted(now)
        self.on_waiting()
        return False

    def abandon(self, waiter: Waiter) -> None:
        """Remove a waiter from the queue, and release its slot if one was granted meanwhile."""
        with self._lock:
            if waiter in self._waiters:
                lacked_credit = waiter is next(iter(self._waiters)) and self._lacks_credit()
                self._remove(waiter)
                self._grant_slots()  # this waiter's `hold` or cost may have blocked those behind it
                if lacked_credit and self._costs()[0] != self._reported_first:
                    self._first_gave_up = True
        if self._first_gave_up:
            self.on_waiting()
        if waiter.key is not None:
            self.correct(waiter, dict.fromkeys(waiter.cost, 0.0))
            self.release(waiter, None)

    def release(self, waiter: Waiter, outcome: Outcome | None) -> None:
        """Release a slot, and count the outcome of its work. Does nothing if the slot is already released.

        Args:
            waiter: The request that got the slot.
            outcome: Whether the work succeeded or was rejected; None if it was neither.
        """
        with self._lock:
            if waiter.key is None or self._held_until.pop(waiter.key, None) is None:
                return
            now = time.monotonic()
            if isinstance(outcome, Rejection):
                self._leased.reject(waiter.epoch, now + min(outcome.retry_after, MAX_RESPECTED_RETRY_AFTER_S))
            elif outcome is not None:
                self._leased.outcomes.succeed(waiter.epoch, now - waiter.granted_at)
            else:
                self._leased.end()
            self._grant_slots()
        if outcome is not SUCCESS and self._leased.has_unreported_rejection:
            self.on_waiting()

    def correct(self, waiter: Waiter, cost: Amounts) -> None:
        """Change the cost of work that has a slot or had one."""
        with self._lock:
            self._leased.credit.spend({unit: amount - waiter.cost.get(unit, 0.0) for unit, amount in cost.items()})
            waiter.cost = {**waiter.cost, **cost}
            self._grant_slots()
        if self._leased.credit.has_unreported_refund:
            self.on_waiting()

    def report(self) -> HolderReport:
        """Return the report to send to the ledger now."""
        with self._lock:
            now = time.monotonic()
            in_use, wants = self._reported = self.in_use, self.in_use + self.waiting
            first, wanted = self._costs()
            self._reported_outcomes = self._leased.outcomes.outcomes
            self._reported_first, self._first_gave_up = first, False
            requested = max(self._longest_hold.get(now), self._first_hold())
            hold = max([HOLD_MARGIN * requested, *(end - now for end in self._held_until.values())])
            self._reported_free_slot = in_use < self._leased.usable(now)
            return self._leased.report(now, in_use=in_use, wants=wants, hold=hold, first_cost=first, wanted_cost=wanted)

    def apply(self, lease: Lease) -> bool:
        """Apply an answer of the ledger. Return False if it answers an earlier report and was ignored."""
        with self._lock:
            applied = self._leased.apply(lease)
            self._grant_slots()
            return applied

    def terminate(self) -> None:
        """Give up the lease: grant no more slots."""
        with self._lock:
            self._leased.terminate()

    def resize(self, limit: int) -> None:
        """Change the number of slots of a queue that is not leased from a cluster."""
        with self._lock:
            self._leased.lease = Lease(capacity=limit, limit=limit)
            self._grant_slots()

    @property
    def should_report(self) -> bool:
        """Whether the demand has changed so much that a report should be sent before the next renewal."""
        with self._lock:
            now = time.monotonic()
            has, (reported_in_use, reported_wants) = self._leased.usable(now), self._reported
            in_use, wants = self.in_use, self.in_use + self.waiting
            if not self._leased.has_announced(self._first_hold()) or self._leased.has_unreported_rejection:
                return True
            if self._has_outdated_credit and now >= self._leased.sent_at + self.lease.interval:
                return True
            has_slot = in_use < has and not self._reported_free_slot
            if self._lacks_credit() and (not self._reported_first or has_slot or self._must_ask_for_budget(now)):
                return True
            if self._waiters and self._leased.credit.is_low(now):
                return True
            if self.lease.epoch and self.lease.contended and self._leased.outcomes.outcomes > self._reported_outcomes:
                return True
            if not self.lease.contended:
                return wants > max(has, reported_wants)
            drained = reported_in_use > has and in_use < reported_in_use
            has_surplus = drained or (wants < has and wants < reported_wants)
            return has_surplus or abs(wants - reported_wants) > max(1.0, 0.1 * reported_wants)

    def describe_wait(self) -> str:
        """Return why the first waiter has no slot, and what to do about it."""
        with self._lock:
            counts = f"{self.in_use} in use and {self.waiting} waiting in this process."
            if self.lease.is_probe:
                return f"all requests are rejected, so at most one per second is sent; {counts} Check the service."
            limit = "limit"
            now, first = time.monotonic(), next(iter(self._waiters), None)
            if first is not None and self.in_use < self._leased.usable(now):
                for account, needed in self._leased.credit.missing(first.cost, now).items():
                    limit, unit = account.split(":", 1)
                    left = max(0.0, self._leased.credit.left(account, now))
                    counts = f"{left:.6g} {unit} left of its {limit}, {needed:.6g} needed; {counts}"
            return f"{counts} Raise the {limit} if the resource allows it, or allow more time."

    @property
    def has_unreported_rejection(self) -> bool:
        """Whether work waits until a rejection is reported."""
        return self._leased.has_unreported_rejection

    def spent(self) -> dict[str, float]:
        """Return what this process has spent, by unit."""
        with self._lock:
            return self._leased.credit.spent()

    def spent_by_all(self) -> dict[str, float]:
        """Return what all processes have spent of each budget, by unit, as last known."""
        with self._lock:
            return self._leased.credit.spent_by_all()

    @property
    def report_interval(self) -> float:
        """Interval between reports of changes while slots are contended, and of refunds, in seconds; 0 otherwise."""
        return self.lease.interval if self.lease.contended or self._has_outdated_credit else 0.0

    @property
    def lease(self) -> Lease:
        """The current lease, which may have expired."""
        return self._leased.lease

    def _first_hold(self) -> float:
        return next((waiter.hold for waiter in self._waiters), 0.0)

    def _can_grant(self, waiter: Waiter, now: float) -> bool:
        return (
            len(self._held_until) < self._leased.usable(now)
            and self._leased.allows(waiter.hold)
            and not self._leased.is_paused
            and (not self._leased.credit.has_accounts or self._leased.credit.suffices(waiter.cost, now))
        )

    def _add(self, waiter: Waiter, now: float) -> None:
        self._waiters[waiter] = None
        waiter.queued_at = now
        for unit, amount in waiter.cost.items():
            self._wanted_cost[unit] = self._wanted_cost.get(unit, 0.0) + amount

    def _remove(self, waiter: Waiter) -> None:
        del self._waiters[waiter]
        if not self._waiters:
            self._wanted_cost.clear()  # so that errors of sums do not accumulate
            return
        for unit, amount in waiter.cost.items():
            self._wanted_cost[unit] -= amount

    def _costs(self) -> tuple[Amounts, Amounts]:
        """Return the cost of the first waiter and of all waiters, by unit; nothing without rates and budgets."""
        first = next(iter(self._waiters), None)
        if first is None or not self._leased.credit.has_accounts:
            return NO_AMOUNTS, NO_AMOUNTS
        credit = self._leased.credit
        return credit.required(first.cost), credit.required(self._wanted_cost)

    def _lacks_credit(self) -> bool:
        first, credit = next(iter(self._waiters), None), self._leased.credit
        return first is not None and credit.has_accounts and not credit.suffices(first.cost, time.monotonic())

    @property
    def _has_outdated_credit(self) -> bool:
        """Whether other work may wait because the latest report has a cost that is too high."""
        return self._leased.credit.has_unreported_refund or self._first_gave_up

    def _must_ask_for_budget(self, now: float) -> bool:
        """Return True if the lease is too old to refuse the first waiter, and the latest report does not have it."""
        is_exhausted = self._leased.credit.exhausted(next(iter(self._waiters)).cost, now) is not None
        return is_exhausted and self._reported_first != self._costs()[0]

    def _refuse_exhausted(self, now: float) -> None:
        """Remove the first waiters while the budgets do not suffice for them. The caller holds the lock.

        What other processes returned since the lease was requested is unknown. So a lease refuses only waiters that
        were queued before it was requested, or at most one interval between reports later.
        """
        while waiter := next(iter(self._waiters), None):
            exhausted = self._leased.credit.exhausted(waiter.cost, now)
            if exhausted is None or self._leased.answered_at < waiter.queued_at - self.lease.interval:
                return
            waiter.exhausted = exhausted
            self._remove(waiter)
            self._wake(waiter)

    def _grant(self, waiter: Waiter, now: float) -> None:
        self._last_key += 1
        waiter.key, waiter.lease = self._last_key, self._leased.token
        waiter.granted_at, waiter.expires_at = now, now + waiter.hold
        waiter.epoch = self._leased.outcomes.epoch
        self._leased.credit.spend(waiter.cost)  # also without rates and budgets: they may be added while the work runs
        self._held_until[waiter.key] = waiter.expires_at

    def _grant_slots(self) -> None:
        """Grant all free slots to the first waiters. The caller holds the lock."""
        if not self._waiters:
            return
        now = time.monotonic()
        self._refuse_exhausted(now)
        while (waiter := next(iter(self._waiters), None)) and self._can_grant(waiter, now):
            self._remove(waiter)
            self._grant(waiter, now)
            self._wake(waiter)
            self._refuse_exhausted(now)

    def _wake(self, waiter: Waiter) -> None:
        try:
            waiter.wake()
        except RuntimeError:  # the waiter's event loop was closed, so no code can release the slot
            if waiter.key is not None:
                del self._held_until[waiter.key]
                self._leased.credit.spend({unit: -amount for unit, amount in waiter.cost.items()})
                self._leased.end()


class LongestHold:
    """The longest `hold` that was requested in the last one to two windows of `HOLD_WINDOW_S`."""

    def __init__(self) -> None:
        self._window_start = -inf
        self._current = self._previous = 0.0

    def add(self, hold: float, now: float) -> None:
        """Record a requested hold."""
        if now - self._window_start > HOLD_WINDOW_S:
            self._window_start, self._previous, self._current = now, self._current, 0.0
        self._current = max(self._current, hold)

    def get(self, now: float) -> float:
        """Return the longest recent hold, in seconds."""
        self.add(0.0, now)
        return max(self._current, self._previous)
