"""Positions and fields of samples, and the base class of passes over them: listings and searches."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.records.summary import SampleSummary

_ROW_BITS = 40


class SamplePosition(NamedTuple):
    """Position of a sample: its step and its row there."""

    step: StepFile
    row: int


class SampleScan(ABC):
    """Sequence of the samples that a pass over steps has found so far.

    `advance()` does the work in time slices. Results can be read from any thread at any time. After the last slice,
    `advance()` can be called again to process samples that have been appended since.

    Args:
        steps: Steps to process, in order.
    """

    def __init__(self, steps: Sequence[StepFile]) -> None:
        self.steps = list(steps)
        self.examined = 0
        """Number of samples processed so far."""
        self._versions = [step.version for step in self.steps]
        self._next_rows = [0] * len(self.steps)
        self._positions: array[int] = array("q")
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> SamplePosition:
        step_index, row = unpack_position(self._positions[index])
        return SamplePosition(self.steps[step_index], row)

    def find(self, position: SamplePosition) -> int | None:
        """Return the index of a sample, or None if it has not been found."""
        try:
            return self._positions.index(pack_position(self.steps.index(position.step), position.row))
        except ValueError:
            return None

    @property
    def is_stale(self) -> bool:
        """True if a step has been rewritten, so that the scan must be restarted."""
        return any(step.version != version for step, version in zip(self.steps, self._versions, strict=True))

    def advance(self, seconds: float) -> bool:
        """Work for a limited time.

        Only one thread works at a time; a concurrent call waits for its turn for at most `seconds`.

        Args:
            seconds: Approximate duration of the call.

        Returns:
            True if all samples that exist now have been processed.
        """
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            return self._advance(deadline)
        finally:
            self._lock.release()

    @abstractmethod
    def _advance(self, deadline: float) -> bool:
        """Work until the deadline. Return True if all samples that exist now have been processed."""


def pack_position(step_index: int, row: int) -> int:
    """Encode a position as one integer, to keep millions of them in an array."""
    return step_index << _ROW_BITS | row


def unpack_position(packed: int) -> tuple[int, int]:
    """Return the index of the step and the row of a packed position."""
    return divmod(packed, 1 << _ROW_BITS)


INDEXED_FIELDS = {"finish": "finish_reason", **{field.name: field.name for field in fields(SampleSummary)}}
"""Fields that the index holds, by their names in filters. The sample itself is not read for them."""
FIELD_NAMES = (*INDEXED_FIELDS, "faults", "row", "file", "line")
"""All names that are defined for every sample."""


@dataclass(slots=True)
class SampleFields:
    """Lookup of a sample's fields. The record is read when a field is not in the index."""

    step: StepFile
    row: int
    record: Record | None = None

    def __call__(self, name: str) -> Any:
        """Return the value of a field, or None if the sample does not have it."""
        if name in INDEXED_FIELDS or name == "faults":
            value = column_getter(self.step, INDEXED_FIELDS.get(name, name))(self.row)
            return self.step.step if name == "step" and value is None else value
        if name == "row":
            return self.row + 1
        if name == "file":
            return self.step.name
        if self.record is None:
            try:
                self.record = self.step.record(self.row)
            except BadLine:
                return None
        return self.record.fields if name == "line" else self.record.fields.get(name)


def column_getter(step: StepFile, name: str) -> Callable[[int], Any]:
    """Return a function from the rows of a step to their values of an indexed field or of "faults"."""
    return partial(_fault_count, step) if name == "faults" else step.column(name).__getitem__


def _fault_count(step: StepFile, row: int) -> int:
    return (step.column("policy_faults")[row] or 0) + (step.column("infra_faults")[row] or 0)
