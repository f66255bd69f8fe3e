"""Listing: which samples are listed. Those of one step or of all, that the filter wants, in an order.

It is made in a thread: `advance` goes on for a while, and says when it has seen everything that there is now. What was
found so far can be read from another thread at any time. Called again after a step has grown, it goes on from there.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.records.summary import Bad
from toolroll.viewer.expression import Expression, Lookup
from toolroll.viewer.ordering import Order, in_order

SORTED_AT_ONCE = 20_000
"""Samples that are put in order in a moment."""
ROW_BITS = 40
ROWS = (1 << ROW_BITS) - 1

FROM_THE_INDEX = {
    "step": "step",
    "score": "score",
    "turns": "turns",
    "calls": "calls",
    "policy_faults": "policy_faults",
    "infra_faults": "infra_faults",
    "finish_reason": "finish_reason",
    "finish": "finish_reason",
    "outcome": "outcome",
    "fidelity": "fidelity",
    "group": "group",
    "sample": "sample",
    "request_id": "request_id",
    "tokens": "tokens",
    "seconds": "seconds",
}
"""Names in a filter that are answered without reading the sample, by the index's name for them."""
NAMES = (*FROM_THE_INDEX, "faults", "row", "file", "line")
"""All names that every sample has."""


class Place(NamedTuple):
    """Where a sample is."""

    step: StepFile
    row: int


class Listing:
    """The samples listed."""

    def __init__(self, steps: Sequence[StepFile], wanted: Expression | None = None, order: Order | None = None) -> None:
        self.steps = list(steps)
        self.wanted = wanted
        self.order = order or Order()
        self.looked_at = 0
        """Samples that were asked whether they are wanted, so far."""
        self._versions = [step.version for step in self.steps]
        self._taken = [0] * len(self.steps)
        self._unread: set[tuple[int, int]] = set()
        self._found: array[int] = array("q")
        self._shown = self._found
        self._sorted = -1
        self._begun = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, number: int) -> Place:
        packed = self._shown[number]
        return Place(self.steps[packed >> ROW_BITS], packed & ROWS)

    @property
    def is_stale(self) -> bool:
        """Whether a step was begun anew, so that this must be too."""
        return any(step.version != version for step, version in zip(self.steps, self._versions, strict=True))

    def find(self, place: Place) -> int | None:
        """Where a sample is listed."""
        try:
            return self._shown.index(self.steps.index(place.step) << ROW_BITS | place.row)
        except ValueError:
            return None

    def advance(self, seconds: float) -> bool:
        """Go on for so long. Whether everything was seen, and is in order.

        The first call never puts many in order, so that it can be made where nobody must wait. One thread does it at a
        time; another that comes meanwhile does nothing.
        """
        until = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            return self._advance(until)
        finally:
            self._lock.release()

    def _advance(self, until: float) -> bool:
        is_first, self._begun = not self._begun, True
        self._look_again()
        for number, step in enumerate(self.steps):
            while not self._take(number, step, until):
                if time.monotonic() >= until:
                    if len(self._found) >= 2 * self._sorted and not is_first:
                        self._sort()
                    return False
                step.index(up_to=2000, seconds=max(0.001, until - time.monotonic()))
        if self._sorted == len(self._found):
            return True
        if is_first and len(self._found) > SORTED_AT_ONCE and self.order != Order():
            return False
        self._sort()
        return True

    def _take(self, number: int, step: StepFile, until: float) -> bool:
        """Take in the rows that are indexed. Whether those are all."""
        row, rows = self._taken[number], len(step)
        lookups = None if self.wanted is None else _Lookups(step, self.wanted)
        while row < rows:
            if lookups is None or self._is_wanted(lookups, number, row):
                self._found.append(number << ROW_BITS | row)
            row += 1
            if row % 256 == 0 and time.monotonic() >= until:
                break
        self.looked_at += row - self._taken[number]
        self._taken[number] = row
        return row >= len(step) and step.is_indexed

    def _is_wanted(self, lookups: _Lookups, number: int, row: int) -> bool:
        assert self.wanted is not None
        if isinstance(lookups.step.summary(row), Bad):
            self._unread.add((number, row))
            return False
        return self.wanted.matches(lookups.of(row))

    def _look_again(self) -> None:
        """A half line may be whole by now."""
        for number, row in sorted(self._unread):
            step = self.steps[number]
            if row < len(step) and not isinstance(step.summary(row), Bad):
                self._unread.discard((number, row))
                assert self.wanted is not None
                if self.wanted.matches(_Lookups(step, self.wanted).of(row)):
                    self._found.append(number << ROW_BITS | row)

    def _sort(self) -> None:
        """Put what was found in order."""
        self._sorted = len(self._found)
        if self.order == Order():
            return
        if self.order.column == "file":
            self._shown = array("q", reversed(self._found))
            return
        found = self._found
        columns = [_sort_values(step, self.order.column) for step in self.steps]
        values = [columns[packed >> ROW_BITS](packed & ROWS) for packed in found]
        self._shown = array("q", (found[place] for place in in_order(values, self.order.descending)))


class _Lookups:
    """From a row of a step to the values of its fields."""

    def __init__(self, step: StepFile, wanted: Expression) -> None:
        self.step = step
        self._reads = bool(wanted.names - (set(NAMES) - {"line"}))

    def of(self, row: int) -> Lookup:
        record: Record | None = None
        if self._reads:
            try:
                record = self.step.record(row)
            except BadLine:
                record = None

        def lookup(name: str) -> Any:
            return field(self.step, row, record, name)

        return lookup


def field(step: StepFile, row: int, record: Record | None, name: str) -> Any:
    """A field of a sample by the name that a filter has for it."""
    if name in FROM_THE_INDEX:
        value = step.column(FROM_THE_INDEX[name])[row]
        return step.step if name == "step" and value is None else value
    if name == "faults":
        return _faults(step, row)
    if name == "row":
        return row + 1
    if name == "file":
        return step.name
    if record is None:
        return None
    return record.fields if name == "line" else record.fields.get(name)


def _faults(step: StepFile, row: int) -> int:
    return (step.column("policy_faults")[row] or 0) + (step.column("infra_faults")[row] or 0)


def _sort_values(step: StepFile, name: str) -> Any:
    if name == "faults":
        return lambda row: _faults(step, row)
    column = step.column(name)
    return lambda row: column[row]
