"""Division of one limit among holders by leases. No clock and no I/O: the caller passes the time, in seconds.

Invariant: slots in use never exceed the limit. Four rules ensure it, together with the rules of the holders (lease.py):

1. **Reservation before offer.** A holder may use the slots that it last reported, or those that it was offered since,
   and may be using more than either while its lease shrinks. The maximum of the three is reserved for it. Only
   unreserved slots are offered.
2. **Expiry.** The ledger reclaims a lease at the end of its lifetime, counted from the arrival of the report that it
   answered. The holder has stopped starting work earlier: it counts from the sending and uses only a part.
3. **Quarantine.** Work of a dead or silent holder may still run, up to the duration in its last report. Its reserved
   slots stay reserved until then, or until the resource confirms that it has fenced the holder's leases (rejects work
   that was granted by them) and how much of that work still runs.
4. **Learning.** The caller saves a `Checkpoint` before a holder gets its first lease or has a longer duration
   confirmed. A ledger that is restored from it confirms the slots that holders report and grants no others, until each
   holder of the checkpoint has reported, is fenced, or has had the time to end its lease and its work.

The same reports and leases carry what `adaptive.py` needs to change a limit that adapts, and the credit of rates and
budgets that `credit.py` hands out.

`divide` computes the shares, in proportion to the slots that each holder wants, once per tick and independently of the
number of reports. A holder loses slots only to a holder that wants them, or to a lower limit. If there are fewer slots
than holders, the slots rotate so that no holder starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from toolroll.limiter.ledger.adaptive import MAX_PAUSE_S, AdaptiveLimit
from toolroll.limiter.ledger.credit import NO_AMOUNTS, RATE, Amounts, CreditLease, unit_of
from toolroll.limiter.ledger.credit_ledger import CreditLedger
from toolroll.limiter.ledger.feedback import Feedback
from toolroll.limiter.ledger.lease import HolderReport, Lease
from toolroll.limiter.ledger.policy import LimitPolicy

LEASE_TTL_S = 10.0
"""Minimum lifetime of a lease. The slots of a silent holder become available after it."""

RENEWALS_PER_LEASE = 4
"""Renewals during the lifetime of a lease. More than one, so that a lost message does not end it."""

MAX_RENEWALS_PER_S = 500.0
"""Maximum rate of renewals for one ledger. With many holders, leases last longer."""

MIN_CHANGE_REPORT_INTERVAL_S = 0.05
"""Minimum interval between a holder's reports of changes while slots are contended."""

MAX_CHANGE_REPORTS_PER_S = 1000.0
"""Maximum rate of such reports for one ledger. With many holders, the interval grows."""

CONTENDED_TICK_INTERVAL_S = 0.05
"""Maximum interval between two divisions while a holder waits for slots."""

MIN_ROTATION_PERIOD_S = 0.2
"""Minimum time for which a holder keeps a remainder slot that other holders are equally entitled to."""

SATURATED_FRACTION = 0.8
"""Fraction of an adaptive limit that must be in use before it is raised. Below, something else limits the work."""

EPOCHS_PER_RESTART = 2**20
"""Number that is added to the epoch of an adaptive limit after a restart, as the checkpoint may have an earlier one."""

ALL_LEASES = 2**53
"""Number that no lease reaches. A dead holder is fenced up to it."""


@dataclass(slots=True)
class Holder:
    """The ledger's state of one holder."""

    seq: int = 0
    """Sequence number of the latest report."""
    reported_at: float = 0.0
    """Arrival time of the latest report."""
    has: int = 0
    """Slots of its lease, by the latest report."""
    offered: int = 0
    """Slots in the answer to the latest report; 0 before the answer."""
    in_use: int = 0
    wants: int = 0
    hold: float = 0.0
    longest_hold: float = 0.0
    """Longest `hold` of all reports."""
    revision: int = 0
    """Revision of the checkpoint that must be saved before this holder gets an answer."""
    needs_confirmation: bool = False
    """Whether the latest report announced a longer `hold` than the holder has had confirmed."""
    target: int = 0
    """Slots that the latest division assigned to it."""
    credit: float = 0.0
    """Accumulated difference between its exact share and its slots. Decides who gets the remainder slots."""
    waits_s: float = 0.0
    """Time for which it has had no slot while slots were contended. Decides between equal credits."""
    feedback: Feedback = field(default_factory=Feedback)
    """Outcomes of its work, by the latest report."""
    answered_failures: int = 0
    """Number of uses without success that it had reported when it got its latest answer."""

    @property
    def reserved(self) -> int:
        """Maximum number of slots that it may use until its next report."""
        return max(self.has, self.offered, self.in_use)


class Quarantine(NamedTuple):
    """Slots of a dead or silent holder, whose work may still run."""

    slots: int | None
    """Number of slots; None if unknown, because the ledger was restarted and the holder has not reported."""
    until: float
    """Time at which the work has certainly ended."""
    longest_hold: float
    fence: int | None
    """Number of the holder's last lease, up to which the resource may reject its work; None if it may have a valid
    lease."""


class Checkpoint(NamedTuple):
    """State from which a lost ledger is restored."""

    policy: LimitPolicy
    version: int
    ttl: float
    holders: Mapping[str, tuple[float, int | None]]
    """`longest_hold` and `fence` of each holder that may have slots."""
    limit: int
    """Current limit, which differs from those of the policy if it adapts."""
    epoch: int
    committed: Amounts = NO_AMOUNTS
    """Amounts of budgets that may be granted, by unit."""
    is_open: bool = False
    """Whether the circuit breaker of an adaptive limit is open."""


class LimiterStatus(NamedTuple):
    """Summary of a ledger. Sent as a plain tuple."""

    limit: int
    version: int
    in_use: int
    waiting: int
    holders: int
    quarantined: int
    reserved: int
    """Slots that may be in use: leased, offered, or in quarantine."""
    learning: bool
    min: int
    """Minimum of the limit. Less than `max` if the limit adapts."""
    max: int
    reason: str
    """Why an adaptive limit changed last; empty for a fixed limit."""
    changed_s: float
    """Time since then, in seconds."""
    succeeded: int
    """Uses that succeeded, by the reports that this ledger received."""
    rejected: int
    """Uses that the resource rejected, or that timed out."""
    rates: Amounts
    """Rate of each unit, per second."""
    credit: Amounts
    """Credit of each rate that can be granted now."""
    budgets: Amounts
    """Total of each budget, by unit."""
    spent: Amounts
    """Spent amount of each budget, by unit."""


@dataclass
class Ledger:
    """Divides the slots and the credit of a resource among holders."""

    policy: LimitPolicy
    ttl: float = LEASE_TTL_S
    """Lifetime of a lease. Grows with the number of holders and never shrinks, as earlier leases stay valid."""
    version: int = 0
    limit: int = 0
    """Current limit. Set by the policy, or adapted."""
    holders: dict[str, Holder] = field(default_factory=dict)
    quarantine: dict[str, Quarantine] = field(default_factory=dict)
    contended: bool = False
    """Whether more slots were wanted than available in the latest division."""
    reserved: int = 0
    """Slots that may be in use: leased, offered, or in quarantine."""
    learning: bool = False
    """Whether this ledger was restored and does not know all leases yet."""
    revision: int = 1
    """Number that increases when the checkpoint changes."""
    ttl_revision: int = 1
    """Revision of the checkpoint that must be saved before any lease is granted, as it has the lifetime of leases."""
    succeeded: int = 0
    """Number of uses that succeeded."""
    rejected: int = 0
    """Number of uses that the resource rejected."""
    adaptive: AdaptiveLimit | None = None
    credit: CreditLedger = field(init=False)
    _budget_revision: int = 0
    """Revision of the checkpoint with all amounts of budgets that were granted."""
    _dead_until: dict[str, float] = field(default_factory=dict)
    """Dead holders, with the time until which their messages may still arrive."""
    _silent_since: dict[str, int] = field(default_factory=dict)
    """Silent holders, with the sequence number of their latest report. Earlier reports may still arrive."""
    _divided_at: float | None = None

    def __post_init__(self) -> None:
        self.credit = CreditLedger(self.policy)
        if self.policy.adapts:
            self.adaptive = AdaptiveLimit(self.policy.min, self.policy.max, self.limit or self.policy.min)
        self.limit = self.adaptive.limit if self.adaptive else self.policy.max

    @classmethod
    def restore(cls, saved: Checkpoint, now: float) -> Self:
        """Return a ledger that replaces a lost one.

        Args:
            saved: The last checkpoint of the lost ledger.
            now: Current time.
        """
        ledger = cls(LimitPolicy(*saved.policy), saved.ttl, saved.version, saved.limit, learning=bool(saved.holders))
        ledger.credit = CreditLedger(ledger.policy, saved.committed)
        if ledger.adaptive:
            ledger.adaptive.epoch = saved.epoch + EPOCHS_PER_RESTART
            if saved.is_open:
                ledger.adaptive.open_breaker(now)
        for name, (hold, fence) in saved.holders.items():
            ledger.quarantine[name] = Quarantine(None, now + saved.ttl + hold, hold, fence)
        return ledger

    def checkpoint(self) -> Checkpoint:
        """Return the state that a replacement of this ledger needs."""
        holders = {name: (entry.longest_hold, entry.fence) for name, entry in self.quarantine.items()}
        holders |= {name: (holder.longest_hold, None) for name, holder in self.holders.items()}
        adaptive, slots = self.adaptive, (self.policy, self.version, self.ttl, holders)
        if adaptive is None:
            return Checkpoint(*slots, self.limit, epoch=0, committed=self.credit.committed())
        return Checkpoint(*slots, adaptive.limit, adaptive.epoch, self.credit.committed(), adaptive.is_open)

    def report(self, report: HolderReport, now: float) -> bool:
        """Record a report. Return False if it is late, duplicated or from a dead holder: it then gets no answer."""
        if report.holder in self._dead_until or report.seq <= self._silent_since.get(report.holder, 0):
            return False
        holder, has = self.holders.get(report.holder), report.has
        if holder is None:
            # The holder is back, and its report includes the work in quarantine. Slots beyond those in quarantine are
            # no longer reserved for it, so that a lease which the report still mentions has expired.
            self._silent_since.pop(report.holder, None)
            returned = self._end_quarantine(report.holder)
            if returned is None or returned.slots is not None:
                has = min(has, (returned and returned.slots) or 0)
            holder = self.holders[report.holder] = Holder(longest_hold=returned.longest_hold if returned else 0.0)
            holder.revision = self._next_revision()
            holder.feedback = report.feedback
            holder.answered_failures = report.feedback.failed - 1  # it may wait for an answer since a rejection
        elif report.seq <= holder.seq:
            return False
        if report.hold > holder.longest_hold:
            holder.longest_hold, holder.revision = report.hold, self._next_revision()
        ttl = len(self.holders) / MAX_RENEWALS_PER_S * RENEWALS_PER_LEASE
        if ttl > self.ttl:
            self.ttl, self.ttl_revision = ttl, self._next_revision()
        # Not compared with the previous report: the holder may have sent this one before it got the previous answer.
        holder.needs_confirmation = report.hold > report.confirmed_hold
        holder.seq, holder.reported_at, holder.hold = report.seq, now, report.hold
        holder.wants = max(report.wants, report.in_use)
        self._update_reservation(holder, has=has, offered=0, in_use=report.in_use)
        self._observe(holder, report.feedback, now)
        self.credit.report(report.holder, report.credit, now, has_slot=report.in_use < has)
        return True

    def mark_dead(self, name: str, now: float) -> None:
        """Remove a holder whose process is certainly dead. Its slots go into quarantine."""
        self._dead_until[name] = now + 2 * self.ttl
        if name in self.holders:
            self._quarantine_holder(name, now)
        self._silent_since.pop(name, None)
        if name in self.quarantine:
            self.quarantine[name] = self.quarantine[name]._replace(fence=ALL_LEASES)
            self._next_revision()

    def fences(self) -> dict[str, int]:
        """Return the holders whose work the resource may reject, each with the number of its last lease."""
        return {name: entry.fence for name, entry in self.quarantine.items() if entry.fence is not None}

    def confirm_fence(self, name: str, fence: int, running: int) -> None:
        """Record that the resource rejects a holder's work, and how much of it still runs.

        Args:
            name: Name of the holder.
            fence: Number of the lease up to which work is rejected, as returned by `fences`. Ignored if it is no
                longer valid, because the holder is back.
            running: Number of slots whose work still runs.
        """
        entry = self.quarantine.get(name)
        if entry is None or entry.fence != fence:
            return
        if not running:
            self._end_quarantine(name)
        elif entry.slots is None or running < entry.slots:
            self.reserved += running - (entry.slots or 0)
            self.quarantine[name] = entry._replace(slots=running)

    def deregister(self, name: str, now: float, spent: Amounts = NO_AMOUNTS) -> None:
        """Remove a holder that uses no slots any more. Its slots and its credit are available at once.

        Args:
            name: Name of the holder.
            now: Current time.
            spent: Total that it has spent, by unit.
        """
        self._dead_until[name] = now + 2 * self.ttl
        self._silent_since.pop(name, None)
        self._end_quarantine(name)
        self.credit.settle(name, spent)
        if holder := self.holders.pop(name, None):
            self.reserved -= holder.reserved
            self._next_revision()

    def set_policy(self, policy: LimitPolicy, now: float) -> int:
        """Change the limits. Return their version, which every later lease carries."""
        if not policy.adapts:
            self.adaptive, self.limit = None, policy.max
        elif self.adaptive:
            self.adaptive.set_range(policy.min, policy.max, now)
        else:
            self.adaptive = AdaptiveLimit(policy.min, policy.max, self.limit, changed_at=now)
        self.policy, self.version = policy, self.version + 1
        self.credit.set_policy(policy)
        self._next_revision()
        return self.version

    def restore_spent(self, spent: Amounts) -> None:
        """Make sure that at least these amounts of budgets count as spent, by unit."""
        self.credit.restore_spent(spent)
        self._next_revision()

    def divide(self, now: float) -> None:
        """Reclaim expired leases and compute the target of each holder."""
        self._expire(now)
        elapsed = 0.0 if self._divided_at is None else now - self._divided_at
        self._divided_at = now
        wanted = sum(holder.wants for holder in self.holders.values())
        if self.adaptive:
            self._adapt(self.adaptive, wanted, now)
        if self.credit.distribute(now):
            self._budget_revision = self._next_revision()
        available = max(0, self.limit - self.quarantined)
        self.contended = wanted > available
        if self.contended:
            self._divide_contended(available, wanted, elapsed)
        else:
            self._divide_uncontended(available, wanted)

    def answer(self, name: str, *, due: bool) -> Lease | None:
        """Return the answer to a holder's latest report, or None if nothing changed and no answer is due."""
        holder = self.holders[name]
        if self.adaptive and holder.feedback.failed > holder.answered_failures:
            if self._is_paused(holder, self.adaptive):
                return None
            due = True
        capacity = holder.has
        if not self.learning:
            unreserved = self.limit - (self.reserved - holder.reserved)  # by other holders
            capacity = min(holder.target, max(holder.has, unreserved))
        is_new_epoch = self.adaptive is not None and holder.feedback.epoch != self.adaptive.epoch
        has_news = holder.needs_confirmation or is_new_epoch or self.credit.has_news(name)
        if capacity == holder.has and not due and not has_news:
            return None
        self._update_reservation(holder, has=holder.has, offered=capacity, in_use=holder.in_use)
        holder.answered_failures = holder.feedback.failed
        epoch, is_probe = (self.adaptive.epoch, self.adaptive.is_open) if self.adaptive else (0, False)
        credit = self.credit.answer(name) if self.credit.has_accounts else CreditLease()
        slots = capacity, self.ttl, self.contended, self.report_interval
        return Lease(holder.seq, *slots, self.limit, self.version, epoch, is_probe, self.policy, credit)

    def _is_paused(self, holder: Holder, adaptive: AdaptiveLimit) -> bool:
        """Return True if a holder whose work was rejected has to wait."""
        now = self._divided_at or 0.0
        if now < adaptive.resume_at:
            return True
        return adaptive.is_draining(self._maybe_in_use() + 1) and now < holder.reported_at + MAX_PAUSE_S

    def required_revision(self, name: str) -> int:
        """Return the revision of the checkpoint that must be saved before a holder gets an answer."""
        return max(self.holders[name].revision, self.ttl_revision, self._budget_revision)

    @property
    def renewal_interval(self) -> float:
        """Time after which a report is answered even if nothing changed, in seconds."""
        return self.ttl / RENEWALS_PER_LEASE

    @property
    def max_tick_interval(self) -> float | None:
        """Time after which to divide again without a report, in seconds, or None if only a report changes anything."""
        is_open = self.adaptive is not None and self.adaptive.is_open
        if self.contended or self.quarantine or is_open or self.credit.has_demand:
            return CONTENDED_TICK_INTERVAL_S
        return self.renewal_interval / 5 if self.holders else None

    @property
    def report_interval(self) -> float:
        """Interval between a holder's reports of changes while slots are contended, in seconds."""
        return max(MIN_CHANGE_REPORT_INTERVAL_S, len(self.holders) / MAX_CHANGE_REPORTS_PER_S)

    @property
    def quarantined(self) -> int:
        """Number of slots in quarantine."""
        return sum(entry.slots or 0 for entry in self.quarantine.values())

    def status(self) -> LimiterStatus:
        """Return a summary of the ledger."""
        in_use = sum(holder.in_use for holder in self.holders.values())
        waiting = sum(holder.wants for holder in self.holders.values()) - in_use
        counts = len(self.holders), self.quarantined, self.reserved
        levels, adaptive = self.credit.levels(), self.adaptive
        return LimiterStatus(
            self.limit,
            self.version,
            in_use,
            waiting,
            *counts,
            self.learning,
            self.policy.min,
            self.policy.max,
            reason=adaptive.reason if adaptive else "",
            changed_s=(self._divided_at or 0.0) - adaptive.changed_at if adaptive else 0.0,
            succeeded=self.succeeded,
            rejected=self.rejected,
            rates=self.policy.rates,
            credit={unit_of(name): level for name, level in levels.items() if name.startswith(RATE)},
            budgets=self.policy.budgets,
            spent=self.credit.spent(),
        )

    def _observe(self, holder: Holder, feedback: Feedback, now: float) -> None:
        before, holder.feedback = holder.feedback, feedback
        self.succeeded += feedback.succeeded - before.succeeded
        self.rejected += feedback.rejected - before.rejected
        if self.adaptive:
            self.adaptive.observe(before, feedback, now)

    def _maybe_in_use(self) -> int:
        """Return the number of slots that are in use, or were offered since the last report and may be."""
        return sum(max(holder.in_use, holder.offered) for holder in self.holders.values())

    def _adapt(self, adaptive: AdaptiveLimit, wanted: int, now: float) -> None:
        """Change the limit by the outcomes that holders have reported."""
        in_use, epoch = self._maybe_in_use(), adaptive.epoch
        adaptive.changed_at = adaptive.changed_at or now
        is_saturated = wanted > adaptive.limit and in_use >= SATURATED_FRACTION * adaptive.limit
        adaptive.update(now, in_use=in_use, is_saturated=is_saturated, min_epoch_s=2 * self.report_interval)
        reported_in_use = sum(holder.in_use for holder in self.holders.values())
        self.limit = adaptive.effective(now, self.reserved, reported_in_use + self.quarantined)
        if adaptive.epoch != epoch:
            self._next_revision()

    def _update_reservation(self, holder: Holder, *, has: int, offered: int, in_use: int) -> None:
        """Change a holder's reservation and the total. No other method changes them."""
        self.reserved -= holder.reserved
        holder.has, holder.offered, holder.in_use = has, offered, in_use
        self.reserved += holder.reserved

    def _expire(self, now: float) -> None:
        for name in [name for name, holder in self.holders.items() if now >= holder.reported_at + self.ttl]:
            self._quarantine_holder(name, now)
        for name in [name for name, entry in self.quarantine.items() if now >= entry.until]:
            self._end_quarantine(name)
        for name in [name for name, until in self._dead_until.items() if now >= until]:
            del self._dead_until[name]
        self.learning = self.learning and any(entry.slots is None for entry in self.quarantine.values())

    def _quarantine_holder(self, name: str, now: float) -> None:
        holder = self.holders.pop(name)
        self._silent_since[name] = holder.seq
        self.credit.forget(name)
        if holder.reserved:
            self.quarantine[name] = Quarantine(holder.reserved, now + holder.hold, holder.longest_hold, holder.seq)
        self._next_revision()

    def _end_quarantine(self, name: str) -> Quarantine | None:
        if entry := self.quarantine.pop(name, None):
            self.reserved -= entry.slots or 0
            self._next_revision()
        return entry

    def _next_revision(self) -> int:
        self.revision += 1
        return self.revision

    def _divide_uncontended(self, available: int, wanted: int) -> None:
        """Give each holder the slots that it wants, and leave it more if no other holder needs them.

        A holder that wants more than it has gets up to twice that number, so that it need not ask at every step.
        """
        spare = available - wanted
        slack = sum(max(0, holder.has - holder.wants) for holder in self.holders.values())
        for holder in self.holders.values():
            extra = max(0, holder.has - holder.wants)
            if slack > spare:
                extra = extra * spare // slack
            elif holder.wants > holder.has:
                extra = min(holder.wants, (spare - slack) // len(self.holders))
            holder.target = holder.wants + extra

    def _divide_contended(self, available: int, wanted: int, elapsed: float) -> None:
        """Give each holder its proportion, rounded down, and the remainder to the holders with the highest credit.

        A holder keeps a remainder slot until another holder's credit exceeds its own by a whole slot. This keeps slots
        from moving all the time.
        """
        rotation_period = max(MIN_ROTATION_PERIOD_S, 4 * self.report_interval)
        candidates: list[tuple[float, float, Holder]] = []
        remainder = available
        for holder in self.holders.values():
            exact = available * holder.wants / wanted
            # Relative to its share: 0 instead of 1 slot starves a holder, 7 instead of 8 hardly matters.
            owed = (exact - holder.reserved) / max(1.0, exact) * elapsed / rotation_period
            holder.credit = min(2.0, max(-2.0, holder.credit + owed))
            holder.waits_s = 0.0 if holder.reserved else holder.waits_s + elapsed
            holder.target = int(exact)
            remainder -= holder.target
            if holder.wants > holder.target:
                candidates.append((holder.credit + (holder.has > holder.target), holder.waits_s, holder))
        candidates.sort(key=lambda candidate: candidate[:2], reverse=True)
        free = available - (self.reserved - self.quarantined)
        for *_, holder in candidates[:remainder]:
            if holder.reserved > holder.target:
                holder.target += 1
            elif free > 0:  # otherwise it gets the next slot that becomes free, before all later ones
                holder.target, free = holder.target + 1, free - 1
