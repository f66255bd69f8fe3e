"""What a step comes to: the figures of its samples, for the list of steps and the plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from toolroll.records.index import StepFile


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step. Means are over the samples of which they are known; None where of none."""

    samples: int
    bad: int
    """Lines that can't be read."""
    score: float | None
    lowest: float | None
    highest: float | None
    turns: float | None
    calls: float | None
    policy_faults: float | None
    infra_faults: float | None
    tokens: float | None
    seconds: float | None
    finishes: Mapping[str, int] = field(default_factory=dict)


def step_figures(step: StepFile) -> StepFigures:
    """The figures of what is indexed of a step."""
    rows = range(len(step))
    known: dict[str, list[float]] = {}
    for name in ("score", "turns", "calls", "policy_faults", "infra_faults", "tokens", "seconds"):
        column = step.column(name)
        known[name] = [value for row in rows if (value := column[row]) is not None]
    finishes = step.column("finish_reason")
    return StepFigures(
        samples=len(rows),
        bad=step.bad,
        lowest=min(known["score"], default=None),
        highest=max(known["score"], default=None),
        finishes=Counter(reason for row in rows if (reason := finishes[row]) is not None),
        **{name: _mean(values) for name, values in known.items()},
    )


def _mean(values: Iterable[float]) -> float | None:
    given = list(values)
    return sum(given) / len(given) if given else None
