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

`divide` computes the shares, in proportion to the slots that each holder wants, once per tick and independently of the
number of reports. A holder loses slots only to a holder that wants them, or to a lower limit. If there are fewer slots
than holders, the slots rotate so that no holder starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from toolroll.limiter.lease import HolderReport, Lease

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
    """Accumulated difference between its exact share and its target. Decides who gets the remainder slots."""

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

    limit: int
    version: int
    ttl: float
    holders: Mapping[str, tuple[float, int | None]]
    """`longest_hold` and `fence` of each holder that may have slots."""


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


@dataclass
class Ledger:
    """Divides `limit` slots among holders."""

    limit: int
    ttl: float = LEASE_TTL_S
    """Lifetime of a lease. Grows with the number of holders and never shrinks, as earlier leases stay valid."""
    version: int = 0
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
    _dead_until: dict[str, float] = field(default_factory=dict)
    """Dead holders, with the time until which their messages may still arrive."""
    _divided_at: float | None = None

    @classmethod
    def restore(cls, saved: Checkpoint, now: float) -> Self:
        """Return a ledger that replaces a lost one.

        Args:
            saved: The last checkpoint of the lost ledger.
            now: Current time.
        """
        ledger = cls(saved.limit, saved.ttl, saved.version, learning=bool(saved.holders))
        for name, (hold, fence) in saved.holders.items():
            ledger.quarantine[name] = Quarantine(None, now + saved.ttl + hold, hold, fence)
        return ledger

    def checkpoint(self) -> Checkpoint:
        """Return the state that a replacement of this ledger needs."""
        holders = {name: (entry.longest_hold, entry.fence) for name, entry in self.quarantine.items()}
        return Checkpoint(
            self.limit,
            self.version,
            self.ttl,
            holders | {name: (holder.longest_hold, None) for name, holder in self.holders.items()},
        )

    def report(self, report: HolderReport, now: float) -> bool:
        """Record a report. Return False if it is late, duplicated or from a dead holder: it then gets no answer."""
        if report.holder in self._dead_until:
            return False
        holder, has = self.holders.get(report.holder), report.has
        if holder is None:
            # The holder is back, and its report includes the work in quarantine. Slots beyond those in quarantine are
            # no longer reserved for it, so that a lease which the report still mentions has expired.
            returned = self._end_quarantine(report.holder)
            if returned is None or returned.slots is not None:
                has = min(has, (returned and returned.slots) or 0)
            holder = self.holders[report.holder] = Holder(longest_hold=returned.longest_hold if returned else 0.0)
            holder.revision = self._next_revision()
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
        return True

    def mark_dead(self, name: str, now: float) -> None:
        """Remove a holder whose process is certainly dead. Its slots go into quarantine."""
        self._dead_until[name] = now + 2 * self.ttl
        if name in self.holders:
            self._quarantine_holder(name, now)
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

    def deregister(self, name: str, now: float) -> None:
        """Remove a holder that uses no slots any more. Its slots are available at once."""
        self._dead_until[name] = now + 2 * self.ttl
        self._end_quarantine(name)
        if holder := self.holders.pop(name, None):
            self.reserved -= holder.reserved
            self._next_revision()

    def set_limit(self, limit: int) -> int:
        """Change the limit. Return its version, which every later lease carries."""
        self.limit, self.version = limit, self.version + 1
        self._next_revision()
        return self.version

    def divide(self, now: float) -> None:
        """Reclaim expired leases and compute the target of each holder."""
        self._expire(now)
        elapsed = 0.0 if self._divided_at is None else now - self._divided_at
        self._divided_at = now
        available = max(0, self.limit - self.quarantined)
        wanted = sum(holder.wants for holder in self.holders.values())
        self.contended = wanted > available
        if self.contended:
            self._divide_contended(available, wanted, elapsed)
        else:
            self._divide_uncontended(available, wanted)

    def answer(self, name: str, *, due: bool) -> Lease | None:
        """Return the answer to a holder's latest report, or None if nothing changed and no answer is due."""
        holder = self.holders[name]
        capacity = holder.has
        if not self.learning:
            unreserved = self.limit - (self.reserved - holder.reserved)  # by other holders
            capacity = min(holder.target, max(holder.has, unreserved))
        if capacity == holder.has and not due and not holder.needs_confirmation:
            return None
        self._update_reservation(holder, has=holder.has, offered=capacity, in_use=holder.in_use)
        return Lease(holder.seq, capacity, self.ttl, self.contended, self.report_interval, self.limit, self.version)

    @property
    def renewal_interval(self) -> float:
        """Time after which a report is answered even if nothing changed, in seconds."""
        return self.ttl / RENEWALS_PER_LEASE

    @property
    def max_tick_interval(self) -> float | None:
        """Time after which to divide again without a report, in seconds, or None if only a report changes anything."""
        if self.contended or self.quarantine:
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
        return LimiterStatus(self.limit, self.version, in_use, waiting, *counts, self.learning)

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
        candidates: list[tuple[float, Holder]] = []
        remainder = available
        for holder in self.holders.values():
            exact = available * holder.wants / wanted
            # Relative to its share: 0 instead of 1 slot starves a holder, 7 instead of 8 hardly matters.
            owed = (exact - holder.target) / max(1.0, exact) * elapsed / rotation_period
            holder.credit = min(2.0, max(-2.0, holder.credit + owed))
            holder.target = int(exact)
            remainder -= holder.target
            if holder.wants > holder.target:
                candidates.append((holder.credit + (holder.has > holder.target), holder))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        for _, holder in candidates[:remainder]:
            holder.target += 1
