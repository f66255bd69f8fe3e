"""Search: every sample that has the needle, and how often. Over all steps, a line at a time, in a thread.

`advance` goes on for a while. What was found can be read from another thread at any time, and only grows. The steps are
gone through from a given one on, and around, so that what is near is found first.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.viewer.document import Document
from toolroll.viewer.expression import Expression
from toolroll.viewer.listing import ROW_BITS, ROWS, Place, field
from toolroll.viewer.needle import Needle

Show = Callable[[Record], Document]
"""From a sample to what is shown of it, which is what is searched."""


class Search:
    """A search, and what it has found."""

    def __init__(
        self, steps: Sequence[StepFile], first: int, needle: Needle, show: Show, wanted: Expression | None = None
    ) -> None:
        self.needle = needle
        self.steps = [*steps[first:], *steps[:first]]
        self.wanted = wanted
        self.samples = 0
        """Looked at, so far."""
        self.steps_done = 0
        self._show = show
        self._places: array[int] = array("q")
        self._ends: array[int] = array("q")
        self._versions = [step.version for step in self.steps]
        self._next = [0] * len(self.steps)
        self._lines: tuple[int, Iterator[tuple[int, bytes]]] | None = None
        self._lock = threading.Lock()

    @property
    def matches(self) -> int:
        """Found, in all."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """Samples with a match."""
        return len(self._ends)

    @property
    def is_stale(self) -> bool:
        """Whether a step was begun anew."""
        return any(step.version != version for step, version in zip(self.steps, self._versions, strict=True))

    def sample(self, number: int) -> Place:
        """A sample with a match, by its number."""
        packed = self._places[number]
        return Place(self.steps[packed >> ROW_BITS], packed & ROWS)

    def before(self, number: int) -> int:
        """How many matches are in the samples before this one."""
        return self._ends[number - 1] if number else 0

    def sample_of(self, match: int) -> int:
        """In which of the samples the match of this number is."""
        return bisect_right(self._ends, match)

    def find(self, place: Place) -> int | None:
        """Which of the samples this one is; None where it has no match."""
        try:
            return self._places.index(self.steps.index(place.step) << ROW_BITS | place.row)
        except ValueError:
            return None

    def advance(self, seconds: float) -> bool:
        """Go on for so long. Whether everything was searched.

        One thread does it at a time; another that comes meanwhile does nothing.
        """
        until = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            return self._advance(until)
        finally:
            self._lock.release()

    def _advance(self, until: float) -> bool:
        for number, step in enumerate(self.steps):
            while self._next[number] < len(step) or not step.is_indexed:
                if not self._look(number, step, until):
                    break
                if time.monotonic() >= until:
                    return False
            self.steps_done = max(self.steps_done, number + 1)
        return True

    def _look(self, number: int, step: StepFile, until: float) -> bool:
        """Look at the next lines of a step. Whether there were any."""
        if self._lines is None or self._lines[0] != number:
            self._lines = number, step.scan(self._next[number])
        for row, line in self._lines[1]:
            self._next[number] = row + 1
            self.samples += 1
            if self.needle.may_be_in(line):
                self._take(number, step, row, line)
            if time.monotonic() >= until:
                return True
        self._lines = None
        return False

    def _take(self, number: int, step: StepFile, row: int, line: bytes) -> None:
        try:
            record = Record.parse(line)
        except BadLine:
            return
        found = self._show(record).count(self.needle)
        if found and (self.wanted is None or self.wanted.matches(lambda name: field(step, row, record, name))):
            self._places.append(number << ROW_BITS | row)
            self._ends.append(self.matches + found)
