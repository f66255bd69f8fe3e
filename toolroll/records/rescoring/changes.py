"""Count how new scores differ from the recorded ones. Pure, in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from toolroll.records.record import Record, number

SCORE_TOLERANCE = 1e-9
"""Relative and absolute difference up to which two scores are equal: sums of floats depend on their order."""
TOTAL = "total"
"""Name of the weighted sum of all rewards, which is compared with the record's score."""


@dataclass(slots=True)
class ScoreChanges:
    """Counts and sums of records whose old and new scores were compared."""

    records: int = 0
    compared: int = 0
    """Records with an old and a new score."""
    improved: int = 0
    worse: int = 0
    gained: int = 0
    """Records with a new score that had no old one."""
    unscored: int = 0
    """Records without a new score."""
    old_sum: float = 0.0
    """Sum of the old scores of the compared records."""
    new_sum: float = 0.0

    def add(self, old: float | None, new: float | None) -> None:
        """Add a record."""
        self.records += 1
        if new is None:
            self.unscored += 1
        elif old is None:
            self.gained += 1
        else:
            self.compared += 1
            self.old_sum += old
            self.new_sum += new
            if not isclose(old, new, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE):
                self.improved += new > old
                self.worse += new < old

    def merge(self, other: ScoreChanges) -> None:
        """Add all records of another instance."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def changed(self) -> int:
        """Number of records whose score is another, including those that had none."""
        return self.improved + self.worse + self.gained

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON. The means are over the compared records."""
        return {
            "records": self.records,
            "old_mean": self.old_sum / self.compared if self.compared else None,
            "new_mean": self.new_sum / self.compared if self.compared else None,
            "changed": self.changed,
            "improved": self.improved,
            "worse": self.worse,
            "gained": self.gained,
            "unscored": self.unscored,
        }


class ChangeTable:
    """Changes by name of the score and by finish reason."""

    def __init__(self) -> None:
        self.by_reason: dict[str, dict[str, ScoreChanges]] = defaultdict(lambda: defaultdict(ScoreChanges))

    def add(self, record: Record, scores: Mapping[str, float | None]) -> None:
        """Add a record with its new scores."""
        for name, score in scores.items():
            self.by_reason[name][record.finish_reason or "unknown"].add(old_score(record, name), score)

    def total(self, name: str) -> ScoreChanges:
        """Return the changes of all records."""
        total = ScoreChanges()
        for changes in self.by_reason[name].values():
            total.merge(changes)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            name: {
                "total": self.total(name).as_dict(),
                "finish_reasons": {reason: changes.as_dict() for reason, changes in reasons.items()},
            }
            for name, reasons in self.by_reason.items()
        }


def old_score(record: Record, name: str) -> float | None:
    """Return the recorded score that a new one is compared with.

    Args:
        record: The record.
        name: Name of the new score.

    Returns:
        The recorded result of the reward function of this name, or the record's score if it had no such function.
    """
    functions = record.rewards.get("functions")
    if name != TOTAL and isinstance(functions, dict) and name in functions:
        return number(functions[name])
    return record.score
