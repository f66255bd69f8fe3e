"""Order: by which column samples are listed, and which way.

Numbers are compared as numbers. What isn't known comes last, whichever way, and samples that are equal stay in the
order of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

COLUMNS = ("file", "score", "turns", "calls", "faults", "tokens", "seconds", "finish_reason")
"""What can be sorted by, in the order in which the key goes through them. "file": as written."""


@dataclass(frozen=True, slots=True)
class Order:
    """A column and a direction."""

    column: str = "file"
    descending: bool = False

    def next(self) -> Order:
        """By the next column."""
        return Order(COLUMNS[(COLUMNS.index(self.column) + 1) % len(COLUMNS)])

    def turned(self) -> Order:
        """The other way around."""
        return replace(self, descending=not self.descending)


def in_order(values: Sequence[Any], descending: bool = False) -> list[int]:
    """The places of values, by value; those of what isn't known at the end.

    >>> scores = [9, None, -0.05, 10, 2e-05, 1.0, 0.5]
    >>> [scores[place] for place in in_order(scores)]
    [-0.05, 2e-05, 0.5, 1.0, 9, 10, None]
    """
    known: list[int] = []
    unknown: list[int] = []
    for place, value in enumerate(values):
        # What is no number (NaN) has no place among numbers.
        (unknown if value is None or value != value else known).append(place)
    known.sort(key=values.__getitem__, reverse=descending)
    return known + unknown
