"""Metrics of a run, computed from its status, for trackers and Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolroll.run.status import RunRates, RunSnapshot

QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}
"""Names of the quantiles in the aggregates, and their labels."""

Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class RunMetric:
    """A metric, and the function that computes its values."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    description: str
    read: Callable[[RunSnapshot], Values]
    """Returns the values by the values of the labels."""


def _scalar(value: float | None) -> Values:
    return {} if value is None else {(): value}


def _by_label(values: Mapping[str, float | None]) -> Values:
    return {(str(label),): value for label, value in values.items() if value is not None}


def _by_two_labels(values: Mapping[str, Mapping[str, float]]) -> Values:
    return {(outer, inner): value for outer, inner_values in values.items() for inner, value in inner_values.items()}


def _aggregate(name: str) -> Callable[[RunSnapshot], Values]:
    def read(status: RunSnapshot) -> Values:
        value: Any = status.aggregates.get(name)
        return _by_label(value) if isinstance(value, Mapping) else _scalar(value)

    return read


def _quantiles(name: str) -> Callable[[RunSnapshot], Values]:
    return lambda status: _by_label(
        {label: status.aggregates.get(name, {}).get(key) for key, label in QUANTILES.items()}
    )


def _alarms(field: str) -> Callable[[RunSnapshot], Values]:
    return lambda status: _by_label({share: figures[field] for share, figures in status.alarms.items()})


def _samples(status: RunSnapshot) -> Values:
    return _by_label({"done": status.done, "running": status.running, "queued": status.queued, "total": status.total})


RUN_METRICS = (
    RunMetric("run_samples", "gauge", ("state",), "Samples of the run, by state.", _samples),
    RunMetric(
        "run_trajectories",
        "counter",
        ("finish_reason",),
        "Recorded trajectories, including those of earlier runs.",
        _aggregate("finish_reasons"),
    ),
    RunMetric("run_outcomes", "counter", ("outcome",), "Recorded trajectories, by outcome.", _aggregate("outcomes")),
    RunMetric("run_fidelity", "counter", ("fidelity",), "Recorded trajectories, by fidelity.", _aggregate("fidelity")),
    RunMetric("run_faults", "counter", ("fault",), "Faults of recorded tool calls.", _aggregate("faults")),
    RunMetric(
        "run_watched_share", "gauge", ("share",), "Share of the last samples, by what is watched.", _alarms("share")
    ),
    RunMetric("run_alarm", "gauge", ("share",), "1 while a watched share is far above its baseline.", _alarms("alarm")),
    RunMetric("run_programs", "counter", ("outcome",), "Programs that tools ran, by outcome.", _aggregate("programs")),
    RunMetric(
        "run_sampled_tokens",
        "counter",
        (),
        "Tokens sampled by this run, including running trajectories.",
        lambda status: _scalar(status.tokens),
    ),
    RunMetric(
        "run_tool_calls",
        "counter",
        (),
        "Tool calls of this run, including running trajectories.",
        lambda status: _scalar(status.calls),
    ),
    RunMetric("run_mean_reward", "gauge", (), "Mean reward of all samples so far.", _aggregate("mean_reward")),
    RunMetric("run_pass_at_k", "gauge", ("k",), "pass@k of all samples so far.", _aggregate("pass_at_k")),
    RunMetric(
        "run_trajectory_seconds", "gauge", ("quantile",), "Duration of recorded trajectories.", _quantiles("seconds")
    ),
    RunMetric(
        "run_tool_seconds", "gauge", ("quantile",), "Duration of a trajectory's tool calls.", _quantiles("tool_seconds")
    ),
    RunMetric(
        "run_queue_seconds",
        "gauge",
        ("quantile",),
        "Time that a trajectory's tool calls waited for slots.",
        _quantiles("queue_wait"),
    ),
    RunMetric("run_workers", "gauge", (), "Registered workers.", lambda status: _scalar(status.workers)),
    RunMetric("run_lost_workers", "counter", (), "Lost workers.", lambda status: _scalar(status.lost_workers)),
    RunMetric(
        "run_unreachable_seconds",
        "gauge",
        ("service",),
        "Time for which a service has not answered.",
        lambda status: _by_label(status.unreachable),
    ),
    RunMetric(
        "run_spent",
        "gauge",
        ("resource", "unit"),
        "Spent amount of a budget.",
        lambda status: _by_two_labels(status.spent),
    ),
    RunMetric(
        "limiter_slots",
        "gauge",
        ("resource", "state"),
        "Slots of a resource, by state, of a run without a cluster.",
        lambda status: _by_two_labels(status.slots),
    ),
)
"""All metrics of a run. Their Prometheus names start with `toolroll_`."""


def tracked_values(status: RunSnapshot, rates: RunRates) -> dict[str, float]:
    """Return all metrics and the current rates, as a tracker takes them.

    Args:
        status: Status of the run.
        rates: Rates since the last call.

    Returns:
        Values by name, such as `run_samples/done`.
    """
    values = {
        "/".join([metric.name, *map(_name_part, labels)]): float(value)
        for metric in RUN_METRICS
        for labels, value in metric.read(status).items()
    }
    per_second = {"trajectories": rates.trajectories, "tokens": rates.tokens, "calls": rates.calls}
    return values | {f"run_per_second/{name}": float(value) for name, value in per_second.items()}


def _name_part(label: str) -> str:
    """Return a label as a part of a name that all trackers accept. The resource of an MCP server is a command line."""
    return re.sub(r"[^\w.-]+", "_", label).strip("._") or "_"
