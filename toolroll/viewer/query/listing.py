"""List the samples of one or more steps that match a filter, in a sort order.

Numbers are compared as numbers. Unknown values come last in both directions, and equal samples keep the order of the
file.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolroll.records.index import StepFile
from toolroll.records.summary import UnreadableLine
from toolroll.viewer.query.expression import FilterExpression
from toolroll.viewer.query.scan import SampleFields, SampleScan, column_getter, pack_position, unpack_position

SORT_COLUMNS = ("file", "score", "turns", "calls", "faults", "tokens", "seconds", "finish_reason")
"""Sortable columns, in the order in which the key `o` selects them. "file" is the order of the file."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Column and direction of a sort order."""

    column: str = "file"
    descending: bool = False

    def next(self) -> SampleOrder:
        """Return the order by the next column."""
        return SampleOrder(SORT_COLUMNS[(SORT_COLUMNS.index(self.column) + 1) % len(SORT_COLUMNS)])

    def reversed(self) -> SampleOrder:
        """Return the order by the same column in the other direction."""
        return replace(self, descending=not self.descending)


def sorted_indices(values: Sequence[Any], descending: bool = False) -> list[int]:
    """Return the indices of values in sorted order, those of None and NaN last.

    >>> scores = [9, None, -0.05, 10, 2e-05, 1.0, 0.5]
    >>> [scores[index] for index in sorted_indices(scores)]
    [-0.05, 2e-05, 0.5, 1.0, 9, 10, None]
    """
    is_known = [value is not None and value == value for value in values]  # NaN differs from itself
    known = [index for index, known in enumerate(is_known) if known]
    unknown = [index for index, known in enumerate(is_known) if not known]
    return sorted(known, key=values.__getitem__, reverse=descending) + unknown


MAX_IMMEDIATE_SORT = 20_000
"""Maximum number of samples that the first slice sorts, so that it does not block the user interface."""
ROWS_PER_DEADLINE_CHECK = 256
LINES_PER_INDEXING = 2000


class SampleListing(SampleScan):
    """Listed samples. An unreadable line is listed only without a filter.

    Args:
        steps: Steps whose samples are listed.
        expression: Filter; None lists all samples.
        order: Sort order; the order of the files by default.
    """

    def __init__(
        self, steps: Sequence[StepFile], expression: FilterExpression | None = None, order: SampleOrder | None = None
    ) -> None:
        super().__init__(steps)
        self.expression = expression
        self.order = order or SampleOrder()
        self._unreadable: set[tuple[int, int]] = set()
        self._matching = self._positions
        """Matching samples in the order of the files; `_positions` has them in the sort order."""
        self._sorted_count = -1
        self._is_started = False

    def _advance(self, deadline: float) -> bool:
        is_first, self._is_started = not self._is_started, True
        self._retry_unreadable()
        for step_index, step in enumerate(self.steps):
            while not self._examine_rows(step_index, step, deadline):
                if time.monotonic() >= deadline:
                    if len(self._matching) >= 2 * self._sorted_count and not is_first:
                        self._sort()
                    return False
                step.index(up_to=LINES_PER_INDEXING, seconds=max(0.001, deadline - time.monotonic()))
        if self._sorted_count == len(self._matching):
            return True
        if is_first and len(self._matching) > MAX_IMMEDIATE_SORT and self.order != SampleOrder():
            return False
        self._sort()
        return True

    def _examine_rows(self, step_index: int, step: StepFile, deadline: float) -> bool:
        """Process the indexed rows of a step. Return True if the step is complete."""
        start = row = self._next_rows[step_index]
        rows = len(step)
        while row < rows:
            if self._matches(step_index, row):
                self._matching.append(pack_position(step_index, row))
            row += 1
            if row % ROWS_PER_DEADLINE_CHECK == 0 and time.monotonic() >= deadline:
                break
        self.examined += row - start
        self._next_rows[step_index] = row
        return row >= len(step) and step.is_indexed

    def _matches(self, step_index: int, row: int) -> bool:
        if self.expression is None:
            return True
        step = self.steps[step_index]
        if isinstance(step.summary(row), UnreadableLine):
            self._unreadable.add((step_index, row))
            return False
        return self.expression.matches(SampleFields(step, row))

    def _retry_unreadable(self) -> None:
        """Check unreadable lines again: one that was still being written may be complete now."""
        retried, self._unreadable = sorted(self._unreadable), set()
        for step_index, row in retried:
            if row < len(self.steps[step_index]) and self._matches(step_index, row):
                self._matching.append(pack_position(step_index, row))

    def _sort(self) -> None:
        self._sorted_count = len(self._matching)
        if self.order == SampleOrder():
            return
        if self.order.column == "file":
            self._positions = array("q", reversed(self._matching))
            return
        getters = [column_getter(step, self.order.column) for step in self.steps]
        values = [getters[step_index](row) for step_index, row in map(unpack_position, self._matching)]
        indices = sorted_indices(values, self.order.descending)
        self._positions = array("q", (self._matching[index] for index in indices))
