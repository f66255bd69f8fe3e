"""Status: how a run stands at one moment, as a display wants it. Rates come from two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run at one moment."""

    done: int
    """Trajectories that are in the records, those of earlier runs among them."""
    running: int
    queued: int | None
    """Neither done nor running; None where nobody knows how many there are."""
    total: int | None
    tokens: int
    """Sampled, by this run."""
    calls: int
    """Of tools, by this run."""
    in_flight: int | None
    """Of what is limited; None where nothing is, or it isn't known."""
    limit: int | None
    workers: int
    lost_workers: int = 0
    seconds: float
    """Since this run began."""
    resumed: int = 0
    """Trajectories that earlier runs had done."""
    bad_rows: int = 0
    """Rows of the data that can't be used."""
    tally: dict[str, Any] = field(default_factory=dict)
    """`Tally.figures()`."""


@dataclass(frozen=True)
class Rates:
    """How fast it goes, per second."""

    trajectories: float = 0.0
    tokens: float = 0.0
    calls: float = 0.0

    @classmethod
    def between(cls, before: Status, after: Status) -> Rates:
        """What was done from one moment to a later one, by the time it took."""
        seconds = after.seconds - before.seconds
        if seconds <= 0:
            return cls()
        return cls(
            (after.done - before.done) / seconds,
            (after.tokens - before.tokens) / seconds,
            (after.calls - before.calls) / seconds,
        )


def seconds_left(status: Status) -> float | None:
    """How long the rest will take, if it goes on as it went so far; None where nobody can say."""
    done = status.done - status.resumed
    if status.total is None or done <= 0 or status.seconds <= 0:
        return None
    return max(0, status.total - status.done) * status.seconds / done
