"""Statistics of a run by step, computed from its records.

Records may come in any order and number; only counts are kept. The statistics of steps can be merged into those of a
range of steps and of the whole run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self

from toolroll.errors import Fault
from toolroll.records.record import Record, number, program_outcome
from toolroll.records.stats.alarms import AlarmCounts, RunAlarms
from toolroll.records.stats.histogram import Histogram

MAX_ERROR_KINDS = 1000
"""Maximum number of error kinds that are counted separately."""
OTHER_MESSAGES = "(others)"
CALL_TIMES = ("queue_wait", "execution_time", "seconds")
"""Histograms of `ToolCallStats`."""


@dataclass(slots=True)
class RunningMean:
    """Count, mean, standard deviation, minimum and maximum of numbers."""

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    _squared_deviations: float = 0.0

    def add(self, value: float | None) -> None:
        """Add a number. None is ignored."""
        if value is not None:
            self.merge(RunningMean(1, value, value, value))

    def merge(self, other: RunningMean) -> None:
        """Add the values of another object by Welford's method, which is numerically stable."""
        if other.count:
            self.min = min(self.min, other.min) if self.count else other.min
            self.max = max(self.max, other.max) if self.count else other.max
            total, difference = self.count + other.count, other.mean - self.mean
            between = difference * difference * self.count * other.count / total
            self._squared_deviations += other._squared_deviations + between
            self.mean += difference * other.count / total
            self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return float((self._squared_deviations / self.count) ** 0.5) if self.count else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the statistics as JSON."""
        values = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {"count": self.count, **(values if self.count else dict.fromkeys(values))}


@dataclass(slots=True)
class _MergeableStats:
    """Statistics whose fields are counts, other statistics, or mappings of names to means."""

    def merge(self, other: Self) -> None:
        """Add the values of another object."""
        for name in (one.name for one in fields(self)):
            own, added = getattr(self, name), getattr(other, name)
            if isinstance(own, int):
                setattr(self, name, own + added)
            elif isinstance(own, Counter):
                own.update(added)
            elif isinstance(own, dict):
                for key, mean in added.items():
                    own.setdefault(key, RunningMean()).merge(mean)
            else:
                own.merge(added)


@dataclass(slots=True)
class ToolCallStats(_MergeableStats):
    """Statistics of tool calls."""

    count: int = 0
    policy_faults: int = 0
    infra_faults: int = 0
    programs: Counter[str] = field(default_factory=Counter)
    """Number of programs by outcome: ok, failed, timeout, out_of_memory, …"""
    queue_wait: Histogram = field(default_factory=Histogram)
    """Time until a slot was acquired, in seconds."""
    execution_time: Histogram = field(default_factory=Histogram)
    """Run time in seconds, if the tool reports it."""
    seconds: Histogram = field(default_factory=Histogram)
    """Duration of the whole call, in seconds."""
    rewards: RunningMean = field(default_factory=RunningMean)

    def add(self, call: dict[str, Any]) -> None:
        """Add a call."""
        self.count += 1
        self.policy_faults += call.get("fault") == Fault.POLICY.value
        self.infra_faults += call.get("fault") == Fault.INFRA.value
        if outcome := program_outcome(call):
            self.programs[outcome] += 1
        metrics = metrics if isinstance(metrics := call.get("metrics"), dict) else {}
        times = {**metrics, "seconds": call.get("seconds")}
        for name in CALL_TIMES:
            if (seconds := number(times.get(name))) is not None and seconds >= 0:
                getattr(self, name).add(seconds)
        self.rewards.add(number(call.get("reward")))

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        counts: dict[str, Any] = {
            "calls": self.count,
            "policy_faults": self.policy_faults,
            "infra_faults": self.infra_faults,
        }
        times = {name: getattr(self, name).as_dict() for name in CALL_TIMES}
        counts["programs"] = dict(self.programs.most_common())
        return {**counts, **times, "reward": self.rewards.as_dict()}


@dataclass(slots=True)
class StepStats(_MergeableStats):
    """Statistics of samples, usually those of one step."""

    samples: int = 0
    infra: int = 0
    """Samples excluded from the loss because of infra faults."""
    turns: int = 0
    call_count: int = 0
    """Number of tool calls, including those in verl dumps, which are not in `calls`."""
    score: RunningMean = field(default_factory=RunningMean)
    components: dict[str, RunningMean] = field(default_factory=dict)
    """Components of the score, by reward function and tool."""
    tokens: RunningMean = field(default_factory=RunningMean)
    seconds: Histogram = field(default_factory=Histogram)
    calls: ToolCallStats = field(default_factory=ToolCallStats)
    alarm_counts: AlarmCounts = field(default_factory=AlarmCounts)
    """Counts for the alarms of a run."""
    finish_counts: Counter[str] = field(default_factory=Counter)
    """Number of samples by finish reason."""
    finish_scores: dict[str, RunningMean] = field(default_factory=dict)
    """Scores by finish reason."""

    def add(self, record: Record) -> None:
        """Add a sample."""
        summary = record.summary()
        self.samples += 1
        self.infra += summary.outcome == "infra"
        self.turns += summary.turns
        self.alarm_counts.merge(AlarmCounts.of_record(record))
        self.call_count += summary.calls
        reason = summary.finish_reason or "unknown"
        self.finish_counts[reason] += 1
        self.finish_scores.setdefault(reason, RunningMean()).add(summary.score)
        self.score.add(summary.score)
        self.tokens.add(summary.tokens)
        if summary.seconds is not None:
            self.seconds.add(summary.seconds)
        for kind in ("functions", "tools"):
            parts = record.rewards.get(kind)
            for name, value in parts.items() if isinstance(parts, dict) else ():
                if (known := number(value)) is not None:
                    self.components.setdefault(name, RunningMean()).add(known)
        for call in record.calls:
            self.calls.add(call)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        return {
            "samples": self.samples,
            "infra": self.infra,
            "score": self.score.as_dict(),
            "rewards": {name: mean.as_dict() for name, mean in self.components.items()},
            "turns": self.turns,
            "tokens": self.tokens.as_dict(),
            "seconds": self.seconds.as_dict(),
            "shares": self.alarm_counts.shares(),
            **self.calls.as_dict(),
            "calls": self.call_count,
            "finish_reasons": dict(self.finish_counts.most_common()),
        }


class RunStats:
    """Statistics of a run.

    Args:
        records: Records to add.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps: dict[int | None, StepStats] = defaultdict(StepStats)
        self.tools: dict[str, ToolCallStats] = defaultdict(ToolCallStats)
        self.error_kinds: Counter[tuple[str, str]] = Counter()
        """Number of failed calls, by fault attribution and kind of error."""
        self._samples_per_prompt = 1
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a sample."""
        self.steps[record.step].add(record)
        self._samples_per_prompt = max(self._samples_per_prompt, (record.sample or 0) + 1)
        for call in record.calls:
            name = call.get("tool")
            self.tools[name if isinstance(name, str) else "(none)"].add(call)
            if call.get("fault"):
                kind = str(call["fault"]), error_kind(str(call.get("error") or call.get("answer") or ""))
                if kind not in self.error_kinds and len(self.error_kinds) >= MAX_ERROR_KINDS:
                    kind = kind[0], OTHER_MESSAGES
                self.error_kinds[kind] += 1

    @property
    def total(self) -> StepStats:
        """Statistics of all samples."""
        return merge_stats(self.steps.values())

    def alarms(self) -> dict[int, list[str]]:
        """Return the messages of the alarms that start in a step, by step."""
        alarms, active, started = RunAlarms(self._samples_per_prompt), set[str](), {}
        for step in sorted(step for step in self.steps if step is not None):
            alarms.add(self.steps[step].alarm_counts)
            messages = alarms.messages()
            if new := [messages[name] for name in messages if name not in active]:
                started[step] = new
            active = {*messages}
        return started

    def ranges(self, max_ranges: int) -> list[tuple[list[int | None], StepStats]]:
        """Return the steps in order, merged into at most `max_ranges` ranges. Samples without a step come last."""
        steps = sorted(self.steps, key=lambda step: (step is None, step or 0))
        width = -(-len(steps) // max_ranges) if steps else 1
        parts = (steps[start : start + width] for start in range(0, len(steps), width))
        return [(part, merge_stats(self.steps[step] for step in part)) for part in parts]

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON."""
        kinds = self.error_kinds.most_common()
        return {
            "total": self.total.as_dict(),
            "steps": [{"step": part[0], **stats.as_dict()} for part, stats in self.ranges(len(self.steps) or 1)],
            "tools": {name: calls.as_dict() for name, calls in self.tools.items()},
            "alarms": [{"step": step, "messages": messages} for step, messages in self.alarms().items()],
            "faults": [{"fault": fault, "kind": kind, "count": count} for (fault, kind), count in kinds],
        }


def merge_stats(parts: Iterable[StepStats]) -> StepStats:
    """Return the statistics of all samples of the parts."""
    total = StepStats()
    for part in parts:
        total.merge(part)
    return total


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_STANDALONE_NUMBER = re.compile(r"(?<!\w)\d+(?:\.\d+)?")  # not the digits of a name


def error_kind(error: str) -> str:
    """Return the first line of an error message with quoted names and numbers replaced."""
    first = next((line for line in error.splitlines() if line.strip()), "(no message)").strip()
    return _STANDALONE_NUMBER.sub("N", _QUOTED.sub("'…'", first[:400]))[:100]
