"""The ledger: one limit, divided among holders by leases. Pure: no clock, no I/O; time is passed in, in seconds.

What keeps the slots in use within the limit, together with the rules of the holder's side (lease.py):

1. **Reserved before offered.** A holder may use what it last said that it has, or what it was offered since, and may be
   using more than either while its lease shrinks. The largest of these is reserved for it; only what is reserved for
   nobody is offered.
2. **Expiry.** The ledger takes a lease back after its whole life, counted from the arrival of the report that it
   answered. The holder stopped earlier: at a part of that life, counted from the sending.
3. **Quarantine.** The work of a holder that died or fell silent may still run, for as long as its report said. All that
   was reserved for it stays reserved so long.
4. **Learning.** A restarted ledger knows nothing. For one lease length it confirms what holders say that they have and
   gives out nothing new. The limit comes back with their reports.

Slots are divided in proportion to what each holder wants, and only by `divide`: once per tick, whatever the number of
reports. A holder loses slots only to one that wants them, or to a lower limit. Where there are fewer slots than holders
they go round, so that nobody starves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from toolroll.limiter.lease import Lease, Report

LEASE_TTL = 10.0
"""Seconds that a lease lasts, at the least: so long it takes until the slots of a silent holder come back."""

RENEWALS_PER_LEASE = 4
"""How often a lease is renewed in its life, so that one lost message doesn't end it."""

RENEWALS_PER_SECOND = 500.0
"""How many renewals a second one ledger asks for. With more holders than that allows, leases last longer."""

PROMPT = 0.05
"""Seconds between a holder's reports of changes while slots are short, at the least."""

PROMPT_PER_SECOND = 1000.0
"""How many such reports a second one ledger asks for. With more holders than that allows, they report less often."""

ROUND = 0.2
"""Seconds for which a holder keeps an odd slot that others have as good a claim to, at the least."""


@dataclass(slots=True)
class Holder:
    """What the ledger knows of a holder."""

    seq: int = 0
    heard: float = 0.0
    """When its latest report arrived."""
    has: int = 0
    offered: int = 0
    """By the answer to its latest report; 0 while there is none."""
    in_use: int = 0
    wants: int = 0
    hold: float = 0.0
    hold_grew: bool = False
    """It waits to hear that a longer one than before is known here."""
    target: int = 0
    """What it should have, by the latest division."""
    credit: float = 0.0
    """By how much it has been short of its exact share, or over it: decides who gets the odd slots."""

    @property
    def reserved(self) -> int:
        """The most that it may be using until it is heard from again."""
        return max(self.has, self.offered, self.in_use)


class Quarantine(NamedTuple):
    """Slots whose work may still run though their holder is gone."""

    slots: int
    until: float


class Standing(NamedTuple):
    """The ledger at a glance. Sent as a plain tuple."""

    limit: int
    version: int
    in_use: int
    waiting: int
    holders: int
    quarantined: int
    reserved: int
    """Slots that may be in use: held, offered, or in quarantine."""
    learning: bool


@dataclass
class Ledger:
    """Divides `limit` slots among holders."""

    limit: int
    ttl: float = LEASE_TTL
    """Grows with the number of holders and never shrinks, as older leases go on for what they were made for."""
    version: int = 0
    restarted: float | None = None
    """When this ledger began in the place of one that was lost; None for the first."""
    holders: dict[str, Holder] = field(default_factory=dict)
    quarantine: dict[str, Quarantine] = field(default_factory=dict)
    contended: bool = False
    """More is wanted than there is, by the latest division."""
    reserved: int = 0
    """Slots that may be in use: held, offered, or in quarantine."""
    _learn_for: float = 0.0
    _buried: dict[str, float] = field(default_factory=dict)
    """Holders known to be dead, until no message of theirs can be under way."""
    _divided: float | None = None

    def __post_init__(self) -> None:
        self._learn_for = self.ttl

    def report(self, report: Report, now: float) -> bool:
        """Take a report in. False: it is void (late, doubled, or a dead holder's), and gets no answer."""
        if report.holder in self._buried:
            return False
        holder = self.holders.get(report.holder)
        if holder is None:
            self._end_quarantine(report.holder)  # it is back, and says itself what it still runs
            holder = self.holders[report.holder] = Holder()
        elif report.seq <= holder.seq:
            return False
        if report.version > self.version:
            self.limit, self.version = report.limit, report.version
        self._learn_for = max(self._learn_for, report.ttl, report.hold)
        self.ttl = max(self.ttl, len(self.holders) / RENEWALS_PER_SECOND * RENEWALS_PER_LEASE)
        holder.hold_grew = report.hold > holder.hold
        holder.seq, holder.heard, holder.hold = report.seq, now, report.hold
        holder.wants = max(report.wants, report.in_use)
        self._book(holder, has=report.has, offered=0, in_use=report.in_use)
        return True

    def gone(self, name: str, now: float) -> None:
        """A holder is dead for certain: it begins nothing more. What it ran stays in quarantine."""
        self._buried[name] = now + 2 * self.ttl
        if name in self.holders:
            self._set_aside(name, now)

    def leave(self, name: str, now: float) -> None:
        """A holder says goodbye: it uses nothing, and will use nothing."""
        self._buried[name] = now + 2 * self.ttl
        if holder := self.holders.pop(name, None):
            self.reserved -= holder.reserved

    def set_limit(self, limit: int) -> int:
        """Change the limit. Returns its version, which every lease carries from now on."""
        self.limit, self.version = limit, self.version + 1
        return self.version

    def divide(self, now: float) -> None:
        """Take back what has run out, and work out anew what each holder should have (its `target`)."""
        self._expire(now)
        elapsed = 0.0 if self._divided is None else now - self._divided
        self._divided = now
        available = max(0, self.limit - self.quarantined)
        wanted = sum(holder.wants for holder in self.holders.values())
        self.contended = wanted > available
        if self.contended:
            self._share(available, wanted, elapsed)
        else:
            self._satisfy(available, wanted)

    def answer(self, name: str, now: float, *, due: bool) -> Lease | None:
        """The answer to a holder's latest report, or None where there is nothing new to say and none is due yet."""
        holder = self.holders[name]
        capacity = holder.has
        if not self.learning(now):
            free = max(0, self.limit - self.reserved)
            capacity = min(holder.target, holder.reserved + free)
        if capacity == holder.has and not due and not holder.hold_grew:
            return None
        self._book(holder, has=holder.has, offered=capacity, in_use=holder.in_use)
        return Lease(holder.seq, capacity, self.ttl, self.contended, self.interval, self.limit, self.version)

    def learning(self, now: float) -> bool:
        """Whether this ledger is still finding out who has what."""
        return self.restarted is not None and now < self.restarted + self._learn_for

    @property
    def renewal(self) -> float:
        """Seconds after which a report is answered even if there is nothing new to say."""
        return self.ttl / RENEWALS_PER_LEASE

    @property
    def interval(self) -> float:
        """Seconds between a holder's reports of changes, while slots are short."""
        return max(PROMPT, len(self.holders) / PROMPT_PER_SECOND)

    @property
    def quarantined(self) -> int:
        """Slots that may be in use though nobody holds them."""
        return sum(kept.slots for kept in self.quarantine.values())

    def standing(self, now: float) -> Standing:
        """The ledger at a glance."""
        in_use = sum(holder.in_use for holder in self.holders.values())
        waiting = sum(holder.wants for holder in self.holders.values()) - in_use
        counts = len(self.holders), self.quarantined, self.reserved
        return Standing(self.limit, self.version, in_use, waiting, *counts, self.learning(now))

    def _book(self, holder: Holder, *, has: int, offered: int, in_use: int) -> None:
        """The one place where a holder's reservation changes, so that the sum is kept without adding it all up."""
        self.reserved -= holder.reserved
        holder.has, holder.offered, holder.in_use = has, offered, in_use
        self.reserved += holder.reserved

    def _expire(self, now: float) -> None:
        for name in [name for name, holder in self.holders.items() if now >= holder.heard + self.ttl]:
            self._set_aside(name, now)
        for name in [name for name, kept in self.quarantine.items() if now >= kept.until]:
            self._end_quarantine(name)
        for name in [name for name, until in self._buried.items() if now >= until]:
            del self._buried[name]

    def _set_aside(self, name: str, now: float) -> None:
        """From holder to quarantine: the reservation stays, for as long as what it runs may last."""
        holder = self.holders.pop(name)
        if holder.reserved:
            self.quarantine[name] = Quarantine(holder.reserved, now + holder.hold)

    def _end_quarantine(self, name: str) -> None:
        if kept := self.quarantine.pop(name, None):
            self.reserved -= kept.slots

    def _satisfy(self, available: int, wanted: int) -> None:
        """There is enough: each gets what it wants, and keeps what it has beyond that unless it is needed elsewhere.

        A holder whose wants have grown gets as much again, so that it needn't ask at every step.
        """
        spare = available - wanted
        slack = sum(max(0, holder.has - holder.wants) for holder in self.holders.values())
        for holder in self.holders.values():
            beyond = max(0, holder.has - holder.wants)
            if slack > spare:
                beyond = beyond * spare // slack
            elif holder.wants > holder.has:
                beyond = min(holder.wants, (spare - slack) // len(self.holders))
            holder.target = holder.wants + beyond

    def _share(self, available: int, wanted: int, elapsed: float) -> None:
        """There is too little: each gets its proportion, rounded down; the odd slots go to those who are owed most.

        Who has an odd slot keeps it until another is owed a whole one more: slots that jump about are of use to nobody.
        """
        round_length = max(ROUND, 4 * self.interval)
        claims: list[tuple[float, Holder]] = []
        left = available
        for holder in self.holders.values():
            exact = available * holder.wants / wanted
            # In parts of its share: to have none is hard, to have seven of eight is not worth the moving about.
            owed = (exact - holder.target) / max(1.0, exact) * elapsed / round_length
            holder.credit = min(2.0, max(-2.0, holder.credit + owed))
            holder.target = int(exact)
            left -= holder.target
            if holder.wants > holder.target:
                claims.append((holder.credit + (holder.has > holder.target), holder))
        claims.sort(key=lambda claim: claim[0], reverse=True)
        for _, holder in claims[:left]:
            holder.target += 1
