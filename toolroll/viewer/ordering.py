"""Order: by which column samples are listed, and which way.

Numbers are compared as numbers. What isn't known comes last, whichever way, and samples that are equal stay in the
order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Item = TypeVar("Item")

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


def in_order(items: Iterable[Item], value: Callable[[Item], Any], descending: bool = False) -> list[Item]:
    """The items by their value, what has none at the end.

    >>> in_order([9, None, -0.05, 10, 2e-05, 1.0, 0.5], lambda score: score)
    [-0.05, 2e-05, 0.5, 1.0, 9, 10, None]
    """
    known: list[tuple[Any, Item]] = []
    unknown: list[Item] = []
    for item in items:
        found = value(item)
        if found is None or found != found:  # not a number: it has no place among numbers
            unknown.append(item)
        else:
            known.append((found, item))
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [item for _, item in known] + unknown
