"""Status of a run at one moment, and rates between two moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """Status of a run at one moment."""

    done: int
    """Number of recorded trajectories, including those of earlier runs."""
    running: int
    """Number of trajectories that workers hold."""
    queued: int | None
    """Number of trajectories that are neither done nor running; None if the total is unknown."""
    total: int | None
    """Number of trajectories of the whole run, or None if it is unknown."""
    tokens: int
    """Number of tokens sampled by this run, including those of running trajectories."""
    calls: int
    """Number of tool calls of this run, including those of running trajectories."""
    unreachable: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a service has not answered, by its name: "engine" or the name of a tool."""
    in_flight: int | None = None
    """Number of slots in use, summed over all limited resources; None if there are none, or it is unknown."""
    limit: int | None = None
    """Limit of the slots in use; None if there is none, or it is unknown."""
    slots: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Slots of each limited resource by state: limit, in use and waiting. Empty on a cluster, whose limiters export
    them through Ray."""
    workers: int
    """Number of registered workers."""
    lost_workers: int = 0
    """Number of workers that were lost."""
    seconds: float
    """Time since this run assigned its first work item."""
    resumed: int = 0
    """Number of trajectories that earlier runs had recorded."""
    bad_rows: int = 0
    """Number of rows that cannot be used."""
    failure: str | None = None
    """Why the run should stop: all trajectories so far have failed in the same way."""
    exhausted: str | None = None
    """Why the run has stopped starting trajectories: the budget of a resource is spent."""
    refused: int = 0
    """Number of trajectories that ended because a budget is spent. They are not recorded."""
    spent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What has been spent of the budgets, by resource and unit."""
    alarms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Shares that are watched, by name: `share` of the last samples, `baseline`, and whether there is an `alarm`."""
    aggregates: dict[str, Any] = field(default_factory=dict)
    """Aggregated outcomes of all recorded trajectories, see `RunAggregates.summary()`."""


@dataclass(frozen=True)
class RunRates:
    """Rates of a run, per second."""

    trajectories: float = 0.0
    tokens: float = 0.0
    calls: float = 0.0

    @classmethod
    def between(cls, before: RunSnapshot, after: RunSnapshot) -> RunRates:
        """Return the average rates between two snapshots."""
        seconds = after.seconds - before.seconds
        if seconds <= 0:
            return cls()
        done, tokens, calls = after.done - before.done, after.tokens - before.tokens, after.calls - before.calls
        return cls(done / seconds, tokens / seconds, calls / seconds)


def seconds_left(snapshot: RunSnapshot) -> float | None:
    """Return the estimated remaining time at the average rate so far, or None if it cannot be estimated."""
    done = snapshot.done - snapshot.resumed
    is_stalled = bool(snapshot.unreachable) or snapshot.exhausted is not None
    if snapshot.total is None or done <= 0 or snapshot.seconds <= 0 or is_stalled:
        return None
    return max(0, snapshot.total - snapshot.done) * snapshot.seconds / done
