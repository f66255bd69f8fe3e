"""Summaries of many samples, stored by column in about 100 bytes per sample.

As Python objects, the summaries of a million samples would take a gigabyte. A row can be replaced, because the last
line of a growing file is incomplete at first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from math import nan
from typing import Any

from toolroll.records.summary import SampleSummary


class SummaryColumn(ABC):
    """One field of all rows. The value is None if it is unknown or if the line is unreadable.

    Args:
        typecode: Type of the array that stores the encoded values.
    """

    def __init__(self, typecode: str) -> None:
        self._values: array[Any] = array(typecode)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        return self._decode(self._values[row])

    def put(self, row: int, value: Any) -> None:
        """Replace a row, or add it after the last one."""
        if row < len(self._values):
            self._values[row] = self._encode(value)
        else:
            self._values.append(self._encode(value))

    @abstractmethod
    def _encode(self, value: Any) -> Any: ...

    @abstractmethod
    def _decode(self, stored: Any) -> Any: ...


class IntColumn(SummaryColumn):
    """Integers, clamped to the range of the array type."""

    def __init__(self, typecode: str) -> None:
        super().__init__(typecode)
        bits = 8 * self._values.itemsize
        signed = typecode.islower()
        self._min = -(1 << bits - 1) if signed else 0
        self._none = (1 << bits - signed) - 1

    def _encode(self, value: int | None) -> int:
        return self._none if value is None else min(max(value, self._min), self._none - 1)

    def _decode(self, stored: int) -> int | None:
        return None if stored == self._none else stored


class FloatColumn(SummaryColumn):
    """Floating-point numbers. NaN stands for None."""

    def _encode(self, value: float | None) -> float:
        return nan if value is None else value

    def _decode(self, stored: float) -> float | None:
        return stored if stored == stored else None


class CategoryColumn(SummaryColumn):
    """Strings with few distinct values."""

    def __init__(self) -> None:
        super().__init__("I")
        self._categories: list[str | None] = []
        self._codes: dict[str | None, int] = {}

    def _encode(self, value: str | None) -> int:
        if value not in self._codes:
            self._codes[value] = len(self._categories)
            self._categories.append(value)
        return self._codes[value]

    def _decode(self, stored: int) -> str | None:
        return self._categories[stored]


class TextColumn(SummaryColumn):
    """Strings that are mostly distinct, concatenated, each followed by a byte that UTF-8 does not use."""

    END = 0xFF

    def __init__(self) -> None:
        super().__init__("I")
        self._bytes = bytearray(1)  # offset 0 stands for None

    def _encode(self, value: str | None) -> int:
        if value is None:
            return 0
        start = len(self._bytes)
        self._bytes += value.encode("utf-8", "surrogatepass")
        self._bytes.append(self.END)
        return start

    def _decode(self, stored: int) -> str | None:
        if not stored:
            return None
        return self._bytes[stored : self._bytes.index(self.END, stored)].decode("utf-8", "surrogatepass")


class SummaryTable:
    """The columns of all fields of `SampleSummary`, and the location of each row's line."""

    def __init__(self) -> None:
        self.part = IntColumn("H")
        self.start = IntColumn("q")
        self.length = IntColumn("I")
        self._columns: dict[str, SummaryColumn] = {
            "step": IntColumn("i"),
            "score": FloatColumn("d"),
            "turns": IntColumn("H"),
            "calls": IntColumn("H"),
            "policy_faults": IntColumn("H"),
            "infra_faults": IntColumn("H"),
            "failed_programs": IntColumn("H"),
            "finish_reason": CategoryColumn(),
            "outcome": CategoryColumn(),
            "fidelity": CategoryColumn(),
            "group": TextColumn(),
            "sample": IntColumn("i"),
            "request_id": TextColumn(),
            "tokens": IntColumn("i"),
            "seconds": FloatColumn("f"),
        }

    def __len__(self) -> int:
        return len(self._columns["seconds"])  # added last, so that every counted row is complete

    def __getitem__(self, name: str) -> SummaryColumn:
        return self._columns[name]

    def summary(self, row: int) -> SampleSummary:
        """Return the summary of a row."""
        return SampleSummary(**{name: column[row] for name, column in self._columns.items()})

    def put(self, row: int, part: int, start: int, length: int, summary: SampleSummary | None) -> None:
        """Replace a row, or add it after the last one. `summary` is None if the line is unreadable."""
        self.part.put(row, part)
        self.start.put(row, start)
        self.length.put(row, length)
        for name, column in self._columns.items():
            column.put(row, None if summary is None else getattr(summary, name))
