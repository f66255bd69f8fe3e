"""Layout: a document as lines of a width.

Lines are places in the document, not text: they are drawn when they are seen. Every character of a block that is open
is on exactly one line, but for newlines and the spaces at which a line was broken.

A block is folded if it says so, or if it is long: then the beginning is shown, and how much more there is. `turned` are
the blocks for which the user wants the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from rich.cells import cell_len

from toolroll.viewer.document import Block, Document
from toolroll.viewer.wrapping import Row, wrap

GUTTER = 2
"""Cells at the left of a block: its coloured bar."""
BESIDE_FROM = 80
"""The width from which on there is room for two blocks side by side."""
LONG, BEGINNING = 120, 40
"""A text of more lines than LONG is shown by its BEGINNING."""
HUGE = 100_000
"""Characters beyond which lines aren't even counted before somebody wants to see them."""
NAMES = 16
"""The width of a table's first column, at the most."""


class Part(IntEnum):
    """What of a block stands on a line."""

    TITLE = 0
    DETAIL = 1
    BODY = 2
    MORE = 3
    """That there is more which isn't shown."""


class Cell(NamedTuple):
    """A part of a block, from one character to another. Of MORE, from the first character that isn't shown."""

    block: int
    part: Part
    start: int = 0
    end: int = 0


class Line(NamedTuple):
    """One line. A line of two columns has `paired`; an empty one has no cells."""

    left: Cell | None = None
    right: Cell | None = None
    paired: bool = False


class Layout:
    """The lines of a document."""

    def __init__(self, document: Document, width: int, *, turned: Collection[int] = (), as_table: bool = False) -> None:
        self.document = document
        self.width = max(width, 20)
        self.as_table = as_table
        self.turned = turned
        self.lines: list[Line] = []
        self._bodies: dict[int, tuple[list[int], list[int]]] = {}
        self._ends: dict[int, int] = {}
        self._folds: set[int] = set()
        if as_table:
            names = max((cell_len(block.title) for block in document.blocks), default=0)
            self.split = min(names, NAMES) + 1
            self._lay_table()
        else:
            self.split = (self.width - 1) // 2
            self._lay_text()

    def line_of(self, block: int, offset: int) -> int | None:
        """On which line a character of a block is; None where it is folded away."""
        starts, lines = self._bodies.get(block, ([], []))
        place = bisect_right(starts, offset) - 1
        if place < 0 or (offset >= self._ends[block] and not self.is_open(block)):
            return None
        return lines[place]

    def is_foldable(self, block: int) -> bool:
        """Whether there is anything to fold or unfold."""
        return block in self._folds

    @property
    def foldable(self) -> frozenset[int]:
        """All that can be folded or unfolded."""
        return frozenset(self._folds)

    def is_open(self, block: int) -> bool:
        """Whether all of a block is shown."""
        return not (block in self._folds and block not in self.turned)

    @property
    def right_width(self) -> int:
        """The width of the second column."""
        return self.width - self.split - 1

    # Text: one block below the other, an answer beside its call

    def _lay_text(self) -> None:
        blocks = self.document.blocks
        number = 0
        while number < len(blocks):
            if number:
                self.lines.append(Line())
            paired = (
                self.width >= BESIDE_FROM
                and not blocks[number].beside
                and number + 1 < len(blocks)
                and blocks[number + 1].beside
            )
            if paired:
                left = self._cells(number, self.split)
                right = self._cells(number + 1, self.right_width)
                for place in range(max(len(left), len(right))):
                    self._add(
                        Line(
                            left[place] if place < len(left) else None,
                            right[place] if place < len(right) else None,
                            paired=True,
                        )
                    )
                number += 2
            else:
                for cell in self._cells(number, self.width):
                    self._add(Line(cell))
                number += 1

    def _cells(self, number: int, width: int) -> list[Cell]:
        """A block's lines at a width, the title first."""
        block = self.document.blocks[number]
        cells = [Cell(number, Part.TITLE)]
        if block.detail and not _fits(block, width):
            cells += [Cell(number, Part.DETAIL, *row) for row in wrap(block.detail, width - GUTTER)]
        return cells + self._body(number, width - GUTTER)

    def _body(self, number: int, width: int) -> list[Cell]:
        block = self.document.blocks[number]
        if not block.text:
            return []
        if block.folded:
            self._folds.add(number)
            if number not in self.turned:
                return []
        width = max(width, 10)
        is_huge = len(block.text) > HUGE
        if is_huge and not block.folded:
            self._folds.add(number)
            if number not in self.turned:
                return self._beginning(number, wrap(block.text[: 2 * width * BEGINNING], width))
        rows = wrap(block.text, width)
        if len(rows) > LONG and not block.folded:
            self._folds.add(number)
            if number not in self.turned:
                return self._beginning(number, rows)
        return [Cell(number, Part.BODY, *row) for row in rows]

    def _beginning(self, number: int, rows: list[Row]) -> list[Cell]:
        """The beginning of a long text, and that there is more."""
        shown = [Cell(number, Part.BODY, *row) for row in rows[:BEGINNING]]
        return [*shown, Cell(number, Part.MORE, shown[-1].end, len(self.document.blocks[number].text))]

    # A table: the names on the left, the values on the right

    def _lay_table(self) -> None:
        for number in range(len(self.document.blocks)):
            if number:
                self.lines.append(Line(paired=True))
            block = self.document.blocks[number]
            name: Cell | None = Cell(number, Part.TITLE)
            rows = [Cell(number, Part.DETAIL, 0, len(block.detail))] if block.detail else []
            rows += self._body(number, self.right_width - 1)
            if not rows:
                self._add(Line(name, paired=True))
            for cell in rows:
                self._add(Line(name, cell, paired=True))
                name = None

    def _add(self, line: Line) -> None:
        for cell in (line.left, line.right):
            if cell is not None and cell.part is Part.BODY:
                starts, lines = self._bodies.setdefault(cell.block, ([], []))
                starts.append(cell.start)
                lines.append(len(self.lines))
                self._ends[cell.block] = cell.end
        self.lines.append(line)


def _fits(block: Block, width: int) -> bool:
    """Whether title and detail have room on one line."""
    return GUTTER + cell_len(block.title) + 3 + cell_len(block.detail) <= width
