"""A lease: so many slots, for so long. The two messages about it, and the holder's side of it. Pure: time is passed in.

A holder (a process) sends a `Report`; the `Lease` that answers it says how many slots the holder may use. `Allowance`
is what the holder makes of it, and keeps these rules, on which the ledger's arithmetic rests:

- Only the answer to the latest report counts: a lease names the report that it answers. Once a new report is sent, no
  earlier answer is ever heeded, however late it comes.
- A lease's life is counted from the sending of its report, and nothing is begun after `STOP_AT` of it.
- Nothing is begun that may last longer than the latest report said and the lease confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

STOP_AT = 0.9
"""The part of a lease's life after which nothing more is begun: the rest is for clocks that don't run alike."""


class Report(NamedTuple):
    """What a holder says. Sent as a plain tuple."""

    holder: str
    seq: int
    """Counts up."""
    has: int
    """Slots that it may use now, by the lease that it has; 0 once that has run out."""
    in_use: int
    """Slots that it uses now; more than `has` while a lease shrinks."""
    wants: int
    """Slots that it would use if it had them: those in use, and one for each that waits."""
    hold: float
    """Seconds that anything it runs, or may begin before its next report, can last from now on."""
    ttl: float
    """The life of the lease that it has, so that a restarted ledger knows how long to listen."""
    limit: int
    """The limit as it last heard it, so that a restarted ledger learns it."""
    version: int
    """The version of that limit; 0 is the one that the ledger was made with."""


class Lease(NamedTuple):
    """The answer to a report. Sent as a plain tuple."""

    seq: int
    """Of the report that it answers."""
    capacity: int
    """Slots that the holder may use."""
    ttl: float
    """For how long, counted from the sending of the report."""
    contended: bool
    """Slots are short: say promptly when fewer are wanted."""
    interval: float
    """Seconds between reports of changes, while slots are short."""
    limit: int
    version: int


@dataclass
class Allowance:
    """What a holder may use, by its lease."""

    holder: str
    limit: int = 0
    version: int = 0
    capacity: int = 0
    ends: float = float("-inf")
    """When the lease may no longer be used."""
    contended: bool = False
    interval: float = 0.0
    ttl: float = 0.0
    """The life of the lease, from the sending of its report; 0 before there was any."""
    _seq: int = 0
    _sent: float = 0.0
    _hold_said: float = 0.0
    """In the latest report."""
    _hold_confirmed: float = 0.0
    """By the lease: the report that it answered had arrived."""

    @classmethod
    def fixed(cls, limit: int) -> Allowance:
        """One that never runs out and that nobody else has a share of."""
        for_ever = float("inf")
        return cls("local", limit, 0, limit, for_ever, _hold_said=for_ever, _hold_confirmed=for_ever)

    def usable(self, now: float) -> int:
        """Slots that may be used now."""
        return self.capacity if now < self.ends else 0

    def allows(self, hold: float) -> bool:
        """Whether something may be begun that lasts `hold` seconds."""
        return hold <= self._hold_said and hold <= self._hold_confirmed

    def report(self, now: float, *, in_use: int, wants: int, hold: float) -> Report:
        """The next report. Sending it makes every earlier answer void."""
        self._seq += 1
        self._sent, self._hold_said = now, hold
        has = self.usable(now)
        return Report(self.holder, self._seq, has, in_use, wants, hold, self.ttl, self.limit, self.version)

    def end(self) -> None:
        """Use nothing more, and heed no answer that is still under way."""
        self._seq += 1
        self.capacity, self.ends = 0, float("-inf")

    def apply(self, lease: Lease) -> bool:
        """Heed an answer. False: it answers an earlier report, and is void."""
        if lease.seq != self._seq:
            return False
        self.capacity, self.ends = lease.capacity, self._sent + STOP_AT * lease.ttl
        self.contended, self.interval = lease.contended, lease.interval
        self.ttl, self._hold_confirmed = lease.ttl, self._hold_said
        self.limit, self.version = lease.limit, lease.version
        return True
