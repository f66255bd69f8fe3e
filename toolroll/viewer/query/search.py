"""Search the text of all samples of all steps."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.viewer.documents.document import Document, TextQuery
from toolroll.viewer.query.expression import FilterExpression
from toolroll.viewer.query.scan import SampleFields, SampleScan, pack_position


class SampleSearch(SampleScan):
    """Samples that contain a text, with the number of matches in each.

    Args:
        steps: All steps.
        first: Index of the step to search first; the search wraps around.
        query: Text to find.
        render: Returns the document in which matches are counted: the one that is displayed.
        expression: Filter; samples that do not match it are ignored.
    """

    def __init__(
        self,
        steps: Sequence[StepFile],
        first: int,
        query: TextQuery,
        render: Callable[[Record], Document],
        expression: FilterExpression | None = None,
    ) -> None:
        super().__init__([*steps[first:], *steps[:first]])
        self.query = query
        self.steps_done = 0
        self._render = render
        self._expression = expression
        self._match_ends: array[int] = array("q")
        """Total number of matches up to and including each sample."""
        self._lines: tuple[int, Iterator[tuple[int, bytes]]] | None = None

    @property
    def match_count(self) -> int:
        """Number of matches in all samples."""
        return self._match_ends[-1] if self._match_ends else 0

    def __len__(self) -> int:
        return len(self._match_ends)

    def matches_before(self, index: int) -> int:
        """Return the number of matches in the samples before the one at `index`."""
        return self._match_ends[index - 1] if index else 0

    def sample_of_match(self, match: int) -> int:
        """Return the index of the sample that contains a match, given its number in the whole search."""
        return bisect_right(self._match_ends, match)

    def _advance(self, deadline: float) -> bool:
        for step_index, step in enumerate(self.steps):
            while self._next_rows[step_index] < len(step) or not step.is_indexed:
                if not self._search_lines(step_index, step, deadline):
                    break
                if time.monotonic() >= deadline:
                    return False
            self.steps_done = max(self.steps_done, step_index + 1)
        return True

    def _search_lines(self, step_index: int, step: StepFile, deadline: float) -> bool:
        """Search lines of a step until the deadline. Return False at its end."""
        if self._lines is None or self._lines[0] != step_index:
            self._lines = step_index, step.scan(self._next_rows[step_index])
        for row, line in self._lines[1]:
            self._next_rows[step_index] = row + 1
            self.examined += 1
            if self.query.may_match_line(line):
                self._search_sample(step_index, step, row, line)
            if time.monotonic() >= deadline:
                return True
        self._lines = None
        return False

    def _search_sample(self, step_index: int, step: StepFile, row: int, line: bytes) -> None:
        try:
            record = Record.parse(line)
        except BadLine:
            return
        found = self._render(record).count(self.query)
        if found and (self._expression is None or self._expression.matches(SampleFields(step, row, record))):
            self._positions.append(pack_position(step_index, row))
            self._match_ends.append(self.match_count + found)
