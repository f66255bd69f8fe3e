"""Stats: what a run did, step by step, out of its records.

Pure: it is given records, in any order and number, and keeps counts only. A Tally is what is known of some samples; the
tallies of steps add up to that of a range, and of the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from toolroll.errors import Fault
from toolroll.records.histogram import Histogram
from toolroll.records.record import Record, number

MOST_KINDS = 1000
"""Different errors that are told apart."""
OTHERS = "(others)"


class Mean:
    """A mean, and how far from it numbers are."""

    __slots__ = ("_from_mean", "count", "least", "mean", "most")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._from_mean = 0.0
        self.least = self.most = 0.0

    def add(self, value: float) -> None:
        """Count a number."""
        self._merge(1, value, 0.0, value, value)

    def merge(self, other: Mean) -> None:
        """Count all that another has counted."""
        if other.count:
            self._merge(other.count, other.mean, other._from_mean, other.least, other.most)

    def _merge(self, count: int, mean: float, from_mean: float, least: float, most: float) -> None:
        """Welford's sums, which stay exact where those of squares don't."""
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most) if self.count else most
        both, apart = self.count + count, mean - self.mean
        self._from_mean += from_mean + apart * apart * self.count * count / both
        self.mean += apart * count / both
        self.count = both

    @property
    def deviation(self) -> float:
        """The standard deviation of these numbers."""
        return float((self._from_mean / self.count) ** 0.5) if self.count else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """For programs."""
        if not self.count:
            return {"count": 0, "mean": None, "std": None, "min": None, "max": None}
        return {
            "count": self.count,
            "mean": self.mean,
            "std": self.deviation,
            "min": self.least,
            "max": self.most,
        }


@dataclass(slots=True)
class Calls:
    """What is known of some tool calls."""

    count: int = 0
    policy_faults: int = 0
    infra_faults: int = 0
    queue_wait: Histogram = field(default_factory=Histogram)
    """Seconds until a slot was free."""
    execution_time: Histogram = field(default_factory=Histogram)
    """Seconds that it ran, where the tool says."""
    seconds: Histogram = field(default_factory=Histogram)
    """Seconds of the whole call."""
    rewards: Mean = field(default_factory=Mean)

    def add(self, call: dict[str, Any]) -> None:
        """Count a call."""
        self.count += 1
        self.policy_faults += call.get("fault") == Fault.POLICY.value
        self.infra_faults += call.get("fault") == Fault.INFRA.value
        given = call.get("metrics")
        metrics = given if isinstance(given, dict) else {}
        for histogram, value in (
            (self.queue_wait, metrics.get("queue_wait")),
            (self.execution_time, metrics.get("execution_time")),
            (self.seconds, call.get("seconds")),
        ):
            seconds = number(value)
            if seconds is not None and seconds >= 0:
                histogram.add(seconds)
        reward = number(call.get("reward"))
        if reward is not None:
            self.rewards.add(reward)

    def merge(self, other: Calls) -> None:
        """Count all that another has counted."""
        self.count += other.count
        self.policy_faults += other.policy_faults
        self.infra_faults += other.infra_faults
        self.queue_wait.merge(other.queue_wait)
        self.execution_time.merge(other.execution_time)
        self.seconds.merge(other.seconds)
        self.rewards.merge(other.rewards)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "calls": self.count,
            "policy_faults": self.policy_faults,
            "infra_faults": self.infra_faults,
            "queue_wait": self.queue_wait.as_dict(),
            "execution_time": self.execution_time.as_dict(),
            "seconds": self.seconds.as_dict(),
            "reward": self.rewards.as_dict(),
        }


@dataclass(slots=True)
class Tally:
    """What is known of some samples."""

    samples: int = 0
    infra: int = 0
    """Samples that the infrastructure kept out of the loss."""
    turns: int = 0
    made: int = 0
    """Calls of tools, those too of which nothing else is known."""
    score: Mean = field(default_factory=Mean)
    components: dict[str, Mean] = field(default_factory=dict)
    """Of the score: by reward function and by tool."""
    tokens: Mean = field(default_factory=Mean)
    seconds: Histogram = field(default_factory=Histogram)
    calls: Calls = field(default_factory=Calls)
    finish_reasons: dict[str, Mean] = field(default_factory=dict)
    """With the scores of those that ended so."""
    endings: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count a sample."""
        summary = record.summary()
        self.samples += 1
        self.infra += summary.outcome == "infra"
        self.turns += summary.turns
        self.made += summary.calls
        reason = summary.finish_reason or "unknown"
        self.endings[reason] += 1
        scores = self.finish_reasons.setdefault(reason, Mean())
        if summary.score is not None:
            self.score.add(summary.score)
            scores.add(summary.score)
        if summary.tokens is not None:
            self.tokens.add(summary.tokens)
        if summary.seconds is not None:
            self.seconds.add(max(0.0, summary.seconds))
        for kind in ("functions", "tools"):
            parts = record.rewards.get(kind)
            for name, value in parts.items() if isinstance(parts, dict) else ():
                if (known := number(value)) is not None:
                    self.components.setdefault(name, Mean()).add(known)
        for call in record.calls:
            self.calls.add(call)

    def merge(self, other: Tally) -> None:
        """Count all that another has counted."""
        self.samples += other.samples
        self.infra += other.infra
        self.turns += other.turns
        self.made += other.made
        self.endings.update(other.endings)
        self.score.merge(other.score)
        self.tokens.merge(other.tokens)
        self.seconds.merge(other.seconds)
        self.calls.merge(other.calls)
        for name, mean in other.components.items():
            self.components.setdefault(name, Mean()).merge(mean)
        for name, mean in other.finish_reasons.items():
            self.finish_reasons.setdefault(name, Mean()).merge(mean)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "samples": self.samples,
            "infra": self.infra,
            "score": self.score.as_dict(),
            "rewards": {name: mean.as_dict() for name, mean in self.components.items()},
            "turns": self.turns,
            "tokens": self.tokens.as_dict(),
            "seconds": self.seconds.as_dict(),
            **self.calls.as_dict(),
            "calls": self.made,
            "finish_reasons": dict(self.endings.most_common()),
        }


class Stats:
    """A run."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps: dict[int | None, Tally] = {}
        self.tools: dict[str, Calls] = {}
        self.kinds: Counter[tuple[str, str]] = Counter()
        """Faults: whose, and what."""
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Count a sample."""
        step = self.steps.get(record.step)
        if step is None:
            step = self.steps[record.step] = Tally()
        step.add(record)
        for call in record.calls:
            name = call.get("tool")
            tool = self.tools.setdefault(name if isinstance(name, str) else "(none)", Calls())
            tool.add(call)
            if call.get("fault"):
                kind = str(call["fault"]), kind_of(str(call.get("error") or call.get("answer") or ""))
                if kind not in self.kinds and len(self.kinds) >= MOST_KINDS:
                    kind = kind[0], OTHERS
                self.kinds[kind] += 1

    @property
    def total(self) -> Tally:
        """All samples."""
        return merged(self.steps.values())

    def ranges(self, most: int) -> list[tuple[list[int | None], Tally]]:
        """The steps in order, neighbours put together where they are more than `most`; those without a number last."""
        steps = sorted(self.steps, key=lambda step: (step is None, step or 0))
        wide = -(-len(steps) // most) if steps else 1
        parts = (steps[at : at + wide] for at in range(0, len(steps), wide))
        return [(part, merged(self.steps[step] for step in part)) for part in parts]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "total": self.total.as_dict(),
            "steps": [{"step": part[0], **tally.as_dict()} for part, tally in self.ranges(len(self.steps) or 1)],
            "tools": {name: calls.as_dict() for name, calls in self.tools.items()},
            "faults": [
                {"fault": fault, "kind": kind, "count": count} for (fault, kind), count in self.kinds.most_common()
            ],
        }


def merged(tallies: Iterable[Tally]) -> Tally:
    """What is known of all of these."""
    both = Tally()
    for tally in tallies:
        both.merge(tally)
    return both


QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
DIGITS = re.compile(r"\d+(?:\.\d+)?")


def kind_of(error: str) -> str:
    """What errors have in common that differ in names and numbers only."""
    first = next((line for line in error.splitlines() if line.strip()), "(nothing was said)").strip()
    return DIGITS.sub("N", QUOTED.sub("'…'", first[:400]))[:100]
