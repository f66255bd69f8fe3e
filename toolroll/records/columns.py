"""Columns: the summaries of many samples, a field at a time, in about a hundred bytes each.

A million samples would be a gigabyte of Python objects. What is asked for by row is made when it is asked for. A row
can be set again: the last line of a file that grows is half at first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from math import nan
from typing import Any, Protocol

from toolroll.records.summary import Summary


class Column(Protocol):
    """One field of all rows. None where it isn't known, and where the line can't be read."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...

    def __setitem__(self, row: int, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Add a row."""
        ...


class Whole:
    """Whole numbers. What is too large for the column is shown as the largest that isn't."""

    def __init__(self, kind: str) -> None:
        self._values: array[int] = array(kind)
        bits = 8 * self._values.itemsize
        signed = kind.islower()
        self._low = -(1 << bits - 1) if signed else 0
        self._none = (1 << bits - signed) - 1

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> int | None:
        value = self._values[row]
        return None if value == self._none else value

    def __setitem__(self, row: int, value: int | None) -> None:
        self._values[row] = self._none if value is None else min(max(value, self._low), self._none - 1)

    def append(self, value: int | None) -> None:
        """Add a row."""
        self._values.append(self._none if value is None else min(max(value, self._low), self._none - 1))


class Real:
    """Numbers."""

    def __init__(self, kind: str) -> None:
        self._values: array[float] = array(kind)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> float | None:
        value = self._values[row]
        return value if value == value else None  # NaN, which is no value of ours, is not itself

    def __setitem__(self, row: int, value: float | None) -> None:
        self._values[row] = nan if value is None else value

    def append(self, value: float | None) -> None:
        """Add a row."""
        self._values.append(nan if value is None else value)


class Word:
    """Texts of which there are few different ones."""

    def __init__(self) -> None:
        self._words: list[str | None] = [None]
        self._codes: dict[str | None, int] = {None: 0}
        self._values: array[int] = array("I")

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> str | None:
        return self._words[self._values[row]]

    def __setitem__(self, row: int, value: str | None) -> None:
        self._values[row] = self._code(value)

    def append(self, value: str | None) -> None:
        """Add a row."""
        self._values.append(self._code(value))

    def _code(self, value: str | None) -> int:
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self._words)
            self._words.append(value)
        return code


class Text:
    """Texts that are all different, one behind the other, each with a byte behind it that no text has."""

    END = 0xFF

    def __init__(self) -> None:
        self._bytes = bytearray(1)  # what has no text begins at 0
        self._starts: array[int] = array("I")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> str | None:
        start = self._starts[row]
        if not start:
            return None
        return self._bytes[start : self._bytes.index(self.END, start)].decode("utf-8", "surrogatepass")

    def __setitem__(self, row: int, value: str | None) -> None:
        self._starts[row] = self._put(value)

    def append(self, value: str | None) -> None:
        """Add a row."""
        self._starts.append(self._put(value))

    def _put(self, value: str | None) -> int:
        if value is None:
            return 0
        start = len(self._bytes)
        self._bytes += value.encode("utf-8", "surrogatepass")
        self._bytes.append(self.END)
        return start


class Columns:
    """Every field of a Summary, and where its line is."""

    NAMES: Sequence[str] = tuple(field.name for field in fields(Summary))

    def __init__(self) -> None:
        self.part = Whole("H")
        self.start = Whole("q")
        self.length = Whole("I")
        self._by_name: dict[str, Column] = {
            "step": Whole("i"),
            "score": Real("d"),
            "turns": Whole("H"),
            "calls": Whole("H"),
            "policy_faults": Whole("H"),
            "infra_faults": Whole("H"),
            "finish_reason": Word(),
            "outcome": Word(),
            "fidelity": Word(),
            "group": Text(),
            "sample": Whole("i"),
            "request_id": Text(),
            "tokens": Whole("i"),
            "seconds": Real("f"),
        }
        self._all = [(name, self._by_name[name]) for name in self.NAMES]

    def __len__(self) -> int:
        return len(self._all[-1][1])  # written last, so that a row that is counted is whole

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    def summary(self, row: int) -> Summary:
        """The fields of a row."""
        return Summary(*(column[row] for _, column in self._all))

    def append(self, part: int, start: int, length: int, summary: Summary | None) -> None:
        """Add a row; None where the line can't be read."""
        self.part.append(part)
        self.start.append(start)
        self.length.append(length)
        for name, column in self._all:
            column.append(None if summary is None else getattr(summary, name))

    def set(self, row: int, length: int, summary: Summary | None) -> None:
        """A row anew."""
        self.length[row] = length
        for name, column in self._all:
            column[row] = None if summary is None else getattr(summary, name)
