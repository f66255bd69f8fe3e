"""Reward functions for TRL, over what the rollout function gave beside the tokens.

None says that a sample can't be scored. TRL leaves it out of its group's baseline, if every reward function says so: a
function of the user's own that gave a number for it would put it back. `scored` keeps it from that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from statistics import fmean
from typing import Any

Fields = Sequence[Mapping[str, Any]]
LogMetric = Callable[[str, float], None]


def trajectory_reward(*, toolroll: Fields, log_metric: LogMetric | None = None, **_: Any) -> list[float | None]:
    """The total of each trajectory; None for one that is left out. The rollouts' metrics are logged by the way."""
    if log_metric is not None:
        log_metrics(toolroll, log_metric)
    return [fields["reward"] for fields in toolroll]


def scored(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of the user's own, for TRL: None for samples that are left out, whatever it says of them."""

    def but_for_those(rewards: Sequence[float | None], toolroll: Fields) -> list[float | None]:
        pairs = zip(rewards, toolroll, strict=True)
        return [reward if fields["left_out"] is None else None for reward, fields in pairs]

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def when_awaited(*, toolroll: Fields, **more: Any) -> list[float | None]:
            _log(toolroll, more)
            return but_for_those(await function(toolroll=toolroll, **more), toolroll)

        return when_awaited

    @wraps(function)
    def at_once(*, toolroll: Fields, **more: Any) -> list[float | None]:
        _log(toolroll, more)
        return but_for_those(function(toolroll=toolroll, **more), toolroll)

    return at_once


def log_metrics(fields: Fields, log_metric: LogMetric) -> None:
    """Hand the metrics of a batch to TRL, which averages them over processes."""
    for name, value in metrics_of(fields).items():
        log_metric(f"toolroll/{name}", value)


def metrics_of(fields: Fields) -> dict[str, float]:
    """What a batch's rollouts came to. Shares are of its samples, but for faults (of calls) and weights (of tokens)."""
    calls = sum(one["calls"] for one in fields)
    found = {
        "left_out": fmean(one["left_out"] is not None for one in fields),
        "rerendered": fmean(one["rerendered"] for one in fields),
        "turns": fmean(one["turns"] for one in fields),
        "calls": calls / len(fields),
        "seconds/max": max(one["seconds"] for one in fields),
    }
    if calls:
        found["policy_faults"] = sum(one["policy_faults"] for one in fields) / calls
        found["infra_faults"] = sum(one["infra_faults"] for one in fields) / calls
        found["call_seconds/max"] = max(seconds for one in fields for seconds in one["call_seconds"])
    if waits := [wait for one in fields for wait in one["queue_waits"]]:
        found["queue_wait/max"] = max(waits)
    tokens = sum(sum(one["weights"].values()) for one in fields)
    if tokens and fields[0]["stale_tokens"] is not None:
        found["stale_tokens"] = sum(one["stale_tokens"] for one in fields) / tokens
        found["unknown_weights"] = sum(one["weights"].get(None, 0) for one in fields) / tokens
    return found


def _log(fields: Fields, more: Mapping[str, Any]) -> None:
    if (log_metric := more.get("log_metric")) is not None:
        log_metrics(fields, log_metric)
