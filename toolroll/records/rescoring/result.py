"""The result of a re-scoring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolroll.records.rescoring.changes import ChangeTable
from toolroll.records.stats.statistics import error_kind

MAX_RESCORE_ERROR_KINDS = 16
"""Maximum number of different errors that are counted."""


@dataclass
class RescoreResult:
    """Counts, and the comparison of old and new scores."""

    records: int = 0
    """Number of records in the output."""
    reused: int = 0
    """Records that an earlier process had scored."""
    incomplete: int = 0
    """Records that cannot have all scores: those whose conversation an infra fault ended have none, and those without
    the rewards of their steps and tools have no total."""
    unscored: int = 0
    """Records that lack another score, because a reward function failed or returned None."""
    bad_lines: int = 0
    """Unreadable lines. Complete ones are copied."""
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number of errors and the first message, by kind of error."""
    changes: ChangeTable = field(default_factory=ChangeTable)
    """Comparison of old and new scores."""

    def add_error(self, message: str) -> None:
        """Count an error of a reward function."""
        kind = error_kind(message)
        if kind in self.errors or len(self.errors) < MAX_RESCORE_ERROR_KINDS:
            count, first = self.errors.get(kind, (0, message))
            self.errors[kind] = count + 1, first

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON."""
        counts = {name: getattr(self, name) for name in ("records", "reused", "incomplete", "unscored", "bad_lines")}
        errors = [{"count": count, "error": error} for count, error in self.errors.values()]
        return {**counts, "errors": errors, "scores": self.changes.as_dict()}


@dataclass(frozen=True, slots=True)
class RescoreProgress:
    """How far a re-scoring is."""

    records: int
    unscored: int
    bytes_done: int
    """Size of the records that are done."""
    total_bytes: int
