"""Aggregate the outcomes of trajectories in bounded memory.

Each trajectory is reduced to a `SampleOutcome`, which is small enough to be sent between processes. Aggregates of parts
of a run can be merged, and stored as JSON: a few kilobytes, plus a few bytes per prompt with missing samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from toolroll._internal.text import shorten
from toolroll.errors import Fault
from toolroll.records.record import Record, number, program_outcome
from toolroll.records.stats.alarms import AlarmCounts, is_malformed
from toolroll.records.stats.histogram import Histogram
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.pass_at_k import PassAtK

MAX_AGGREGATED_ERROR_CHARS = 160
"""Maximum length of an error message."""
MAX_DISTINCT_ERRORS = 16
"""Maximum number of error messages that are counted separately."""
OTHER_ERRORS_LABEL = "others"
"""Key under which all further error messages are counted."""
COUNTER_NAMES = ("finish_reasons", "outcomes", "fidelity", "faults", "programs", "errors")
HISTOGRAM_NAMES = ("seconds", "tool_seconds", "queue_wait")


class SampleOutcome(NamedTuple):
    """Outcome of one trajectory."""

    row: int
    sample: int
    reward: float | None
    outcome: str
    finish_reason: str
    turns: int
    sampled: int
    """Number of tokens that the engine sampled."""
    tokens: int
    """Number of all tokens; 0 for an engine that returns text."""
    calls: int
    policy_faults: int
    infra_faults: int
    seconds: float
    tool_seconds: float
    """Duration of all tool calls."""
    queue_wait: float
    """Time that all tool calls waited for a slot."""
    fidelity: str
    programs: Mapping[str, int] = {}
    """Number of programs that the tools ran, by outcome."""
    error: str | None = None
    """First line of the error that ended the trajectory, if its outcome is "infra"."""
    retryable: bool = True
    """False if another attempt would fail in the same way."""
    malformed: bool = False
    """Whether a call was not executed because of the way in which the model wrote it."""

    @property
    def alarm_counts(self) -> AlarmCounts:
        """Counts for the alarms of a run."""
        return AlarmCounts.of_sample(
            malformed=self.malformed,
            outcome=self.outcome,
            finish_reason=self.finish_reason,
            fidelity=self.fidelity,
        )

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, row: int) -> SampleOutcome:
        """Return the outcome of a trajectory of the given row."""
        calls = trajectory.calls
        return cls(
            row=row,
            sample=trajectory.sample,
            reward=trajectory.rewards.total,
            outcome=trajectory.outcome,
            finish_reason=str(trajectory.finish_reason),
            turns=len({turn.turn for turn in trajectory.turns}),
            sampled=sum(turn.tokens for turn in trajectory.turns),
            tokens=len(trajectory.tokens),
            calls=len(calls),
            policy_faults=sum(call.fault is Fault.POLICY for call in calls),
            infra_faults=sum(call.fault is Fault.INFRA for call in calls),
            seconds=trajectory.seconds,
            tool_seconds=sum(call.seconds for call in calls),
            queue_wait=sum(_queue_wait(call.metrics) for call in calls),
            fidelity=str(trajectory.fidelity),
            programs=_count_programs({"metrics": call.metrics} for call in calls),
            error=_short_error(trajectory.error) if trajectory.outcome == "infra" else None,
            retryable=trajectory.retryable,
            malformed=any(is_malformed(call.metrics, call.fault) for call in calls),
        )

    @classmethod
    def from_record(cls, record: Record, row: int) -> SampleOutcome:
        """Return the outcome of a recorded trajectory. Its tokens are 0 if they were not recorded."""
        summary = record.summary()
        return cls(
            row=row,
            sample=record.sample or 0,
            reward=record.score,
            outcome=record.outcome or "ok",
            finish_reason=record.finish_reason or "",
            turns=summary.turns,
            sampled=int(sum(number(turn.get("tokens")) or 0 for turn in record.turns)),
            tokens=summary.tokens or 0,
            calls=summary.calls,
            policy_faults=summary.policy_faults,
            infra_faults=summary.infra_faults,
            seconds=record.seconds or 0.0,
            tool_seconds=sum(number(call.get("seconds")) or 0.0 for call in record.calls),
            queue_wait=sum(_queue_wait(call.get("metrics")) for call in record.calls),
            fidelity=record.fidelity or "",
            programs=_count_programs(record.calls),
            error=_short_error(record.error) if record.outcome == "infra" else None,
            malformed=any(is_malformed(call.get("metrics"), call.get("fault")) for call in record.calls),
        )


class BudgetRefusal(NamedTuple):
    """Result of a sample that ended because a budget is spent. It has no record."""

    resource: str
    unit: str


class RunAggregates:
    """Aggregated outcomes of a run.

    Args:
        n: Number of samples per prompt.
        solved_at: Reward from which a trajectory counts as solved.
    """

    def __init__(self, n: int = 1, solved_at: float = 1.0) -> None:
        self._n = n
        self._solved_at = solved_at
        self._sums: Counter[str] = Counter()
        """Sums of trajectories, scored, solved, turns, sampled_tokens, tokens, calls."""
        self._reward_sum = 0.0
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in COUNTER_NAMES}
        self._histograms: dict[str, Histogram] = {name: Histogram() for name in HISTOGRAM_NAMES}
        self._pass_at_k = PassAtK(n)

    def add(self, outcome: SampleOutcome) -> None:
        """Add the outcome of one trajectory."""
        reward = outcome.reward if outcome.reward is not None and isfinite(outcome.reward) else None
        solved = reward is not None and reward >= self._solved_at
        self._reward_sum += reward or 0.0
        self._sums.update(trajectories=1, scored=int(reward is not None), solved=int(solved), turns=outcome.turns)
        self._sums.update(sampled_tokens=outcome.sampled, tokens=outcome.tokens, calls=outcome.calls)
        self._counters["faults"].update(policy=outcome.policy_faults, infra=outcome.infra_faults)
        self._counters["finish_reasons"][outcome.finish_reason] += 1
        self._counters["outcomes"][outcome.outcome] += 1
        self._counters["fidelity"][outcome.fidelity] += 1
        self._counters["programs"].update(outcome.programs)
        if outcome.error is not None:
            self._add_error(outcome.error, 1)
        self._histograms["seconds"].add(outcome.seconds)
        if outcome.calls:
            self._histograms["tool_seconds"].add(outcome.tool_seconds)
            self._histograms["queue_wait"].add(outcome.queue_wait)
        self._pass_at_k.add(outcome.row, scored=reward is not None, solved=solved)

    def merge(self, other: RunAggregates) -> None:
        """Add all outcomes of another instance."""
        self._reward_sum += other._reward_sum
        self._sums.update(other._sums)
        for name, counter in other._counters.items():
            if name == "errors":
                for error, count in counter.items():
                    self._add_error(error, count)
            else:
                self._counters[name].update(counter)
        for name, histogram in other._histograms.items():
            self._histograms[name].merge(histogram)
        self._pass_at_k.merge(other._pass_at_k)

    def summary(self) -> dict[str, Any]:
        """Return all figures as a JSON object. Prompts with missing samples contribute those that are known."""
        scored = self._sums["scored"]
        return {
            "trajectories": self._sums["trajectories"],
            **self._pass_at_k.summary(),
            "scored": scored,
            "solved": self._sums["solved"],
            "mean_reward": round(self._reward_sum / scored, 6) if scored else None,
            **{name: dict(counter.most_common()) for name, counter in self._counters.items()},
            **{name: self._sums[name] for name in ("turns", "sampled_tokens", "tokens", "calls")},
            **{name: _summarize(histogram) for name, histogram in self._histograms.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return the complete state as a JSON object."""
        return {
            "n": self._n,
            "solved_at": self._solved_at,
            "sums": dict(self._sums),
            "reward": self._reward_sum,
            "counts": {name: dict(counter) for name, counter in self._counters.items()},
            "spread": {name: histogram.state() for name, histogram in self._histograms.items()},
            "pass_at_k": self._pass_at_k.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RunAggregates:
        """Restore an instance from the result of `state()`. Raises LookupError, TypeError or ValueError."""
        restored = cls(state["n"], state["solved_at"])
        restored._sums.update(state["sums"])
        restored._reward_sum = state["reward"]
        for name in COUNTER_NAMES:
            restored._counters[name].update(state["counts"].get(name, {}))
        restored._histograms = {name: Histogram.from_state(state["spread"][name]) for name in HISTOGRAM_NAMES}
        restored._pass_at_k = PassAtK.from_state(restored._n, state["pass_at_k"])
        return restored

    def _add_error(self, error: str, count: int) -> None:
        errors = self._counters["errors"]
        errors[error if error in errors or len(errors) < MAX_DISTINCT_ERRORS else OTHER_ERRORS_LABEL] += count


def _count_programs(calls: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(filter(None, map(program_outcome, calls))))


def _queue_wait(metrics: Any) -> float:
    value = metrics.get("queue_wait") if isinstance(metrics, Mapping) else None
    return number(value) or 0.0


def _short_error(error: str | None) -> str:
    first_line = next(iter((error or "").splitlines()), "") or "unknown"
    return shorten(first_line, MAX_AGGREGATED_ERROR_CHARS)


def _summarize(histogram: Histogram) -> dict[str, float]:
    quantiles = {f"p{percent}": histogram.quantile(percent / 100) for percent in (50, 90, 99)}
    values = {"mean": histogram.mean, **quantiles, "max": histogram.max}
    return {name: float(f"{value or 0.0:.4g}") for name, value in values.items()}
