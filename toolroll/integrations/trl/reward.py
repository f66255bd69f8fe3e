"""Reward functions for TRL, which use the fields that the rollout function returned.

A reward of None means that a sample is not scored. TRL excludes the sample from the baseline of its group if every
reward function returns None for it. A user's reward function that returned a number would include it; `scored` prevents
that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from statistics import fmean
from typing import Any

from toolroll.rollout.trajectory import FinishReason

Fields = Sequence[Mapping[str, Any]]
LogMetric = Callable[[str, float], None]


def trajectory_reward(*, toolroll: Fields, log_metric: LogMetric | None = None, **_: Any) -> list[float | None]:
    """Return the total reward of each trajectory. A reward function for GRPOTrainer.

    It also logs the metrics of the batch, see `batch_metrics`.

    Args:
        toolroll: Fields of each sample, which `rollout_func` returned.
        log_metric: TRL's function that logs a metric.
        **_: Other columns, which are ignored.

    Returns:
        The rewards, with None for each excluded sample.

    Example:
        >>> trajectory_reward(toolroll=[{"reward": 1.5}, {"reward": None}])
        [1.5, None]
    """
    _log_metrics(toolroll, log_metric)
    return [fields["reward"] for fields in toolroll]


def scored(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a reward function return None for excluded samples. A decorator.

    Args:
        function: Reward function for TRL, sync or async, that returns a list of rewards.

    Returns:
        The wrapped function, of the same name and kind. It also logs the metrics of the batch.

    Example:
        >>> @scored
        ... def length_penalty(completion_ids, **kwargs):
        ...     return [-len(ids) / 1000 for ids in completion_ids]
        >>> length_penalty(completion_ids=[[1], [2]], toolroll=[{"left_out": None}, {"left_out": "sandbox down"}])
        [-0.001, None]
    """
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def async_wrapper(*, toolroll: Fields, **columns: Any) -> list[float | None]:
            _log_metrics(toolroll, columns.get("log_metric"))
            return _without_excluded(await function(toolroll=toolroll, **columns), toolroll)

        return async_wrapper

    @wraps(function)
    def wrapper(*, toolroll: Fields, **columns: Any) -> list[float | None]:
        _log_metrics(toolroll, columns.get("log_metric"))
        return _without_excluded(function(toolroll=toolroll, **columns), toolroll)

    return wrapper


def _without_excluded(rewards: Sequence[float | None], samples: Fields) -> list[float | None]:
    pairs = zip(rewards, samples, strict=True)
    return [reward if fields["left_out"] is None else None for reward, fields in pairs]


def _log_metrics(samples: Fields, log_metric: LogMetric | None) -> None:
    """Log the metrics of a batch with TRL, which averages them over processes."""
    if log_metric is not None:
        for name, value in batch_metrics(samples).items():
            log_metric(f"toolroll/{name}", value)


def batch_metrics(samples: Fields) -> dict[str, float]:
    """Return the metrics of a batch.

    Fractions are relative to the number of samples, except faults (calls) and stale or unknown weights (tokens).
    """
    calls = sum(one["calls"] for one in samples)
    metrics = {name: fmean(one[name] for one in samples) for name in ("rerendered", "lost_tokens", "turns", "calls")}
    metrics["malformed"] = fmean(one["malformed_calls"] > 0 for one in samples)
    metrics["truncated"] = fmean(one["finish_reason"] == FinishReason.LENGTH for one in samples)
    metrics["left_out"] = fmean(one["left_out"] is not None for one in samples)
    metrics["seconds/max"] = max(one["seconds"] for one in samples)
    if calls:
        metrics["policy_faults"] = sum(one["policy_faults"] for one in samples) / calls
        metrics["infra_faults"] = sum(one["infra_faults"] for one in samples) / calls
        metrics["call_seconds/max"] = max(seconds for one in samples for seconds in one["call_seconds"])
    if waits := [wait for one in samples for wait in one["queue_waits"]]:
        metrics["queue_wait/max"] = max(waits)
    tokens = sum(sum(one["weights"].values()) for one in samples)
    if tokens and samples[0]["stale_tokens"] is not None:
        metrics["stale_tokens"] = sum(one["stale_tokens"] for one in samples) / tokens
        metrics["unknown_weights"] = sum(one["weights"].get(None, 0) for one in samples) / tokens
    return metrics
