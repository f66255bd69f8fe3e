"""Lay out a document as lines of a given width.

Lines refer to ranges of the document's text and are drawn when they become visible. Every character of an open block is
on exactly one line, except newlines and the spaces at which lines are broken.

A block is folded if it is marked so. A long block shows only its start. The user can toggle both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from enum import IntEnum
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len

from toolroll.viewer.documents.document import Document

GUTTER_CELLS = 2
"""Width of the coloured bar to the left of a block."""
MIN_WIDTH_BESIDE = 80
"""Minimum width for two blocks side by side."""
MAX_OPEN_ROWS = 120
"""Number of rows from which on only the start of a block is shown."""
PREVIEW_ROWS = 40
"""Number of rows shown of a long block."""
MAX_WRAPPED_CHARS = 100_000
"""Length from which on a block counts as long without being wrapped completely."""
MAX_NAME_CELLS = 16
"""Maximum width of the first column of a table."""


class LinePart(IntEnum):
    """Part of a block that is shown on a line."""

    TITLE = 0
    DETAIL = 1
    BODY = 2
    MORE = 3
    """Note on the text that is not shown."""


class LayoutCell(NamedTuple):
    """A range of characters of a block. For MORE, the range that is not shown."""

    block: int
    part: LinePart
    start: int = 0
    end: int = 0


class LayoutLine(NamedTuple):
    """A line of one column, or of two if `paired`. Missing cells are blank."""

    left: LayoutCell | None = None
    right: LayoutCell | None = None
    paired: bool = False


class Layout:
    """The lines of a document.

    Args:
        document: Document to lay out.
        width: Width in cells.
        toggled: Numbers of the blocks that the user has unfolded.
        as_table: Lay out titles and texts as the two columns of a table.
    """

    def __init__(
        self, document: Document, width: int, *, toggled: Collection[int] = (), as_table: bool = False
    ) -> None:
        self.document = document
        self.width = max(width, 20)
        self.as_table = as_table
        self.toggled = toggled
        self.lines: list[LayoutLine] = []
        self.foldable: set[int] = set()
        """Numbers of the blocks that can be folded or unfolded."""
        self._bodies: dict[int, tuple[list[int], list[int]]] = {}
        """For each block, the first character of each of its lines and the numbers of these lines."""
        self._ends: dict[int, int] = {}
        if as_table:
            names = max((cell_len(block.title) for block in document.blocks), default=0)
            self.split = min(names, MAX_NAME_CELLS) + 1
            self._lay_out_table()
        else:
            self.split = (self.width - 1) // 2
            self._lay_out_text()

    @property
    def right_width(self) -> int:
        """Width of the second column."""
        return self.width - self.split - 1

    def line_of(self, block: int, offset: int) -> int | None:
        """Return the number of the line that shows a character of a block, or None if it is folded away."""
        starts, lines = self._bodies.get(block, ([], []))
        index = bisect_right(starts, offset) - 1
        if index < 0 or (offset >= self._ends[block] and not self.is_open(block)):
            return None
        return lines[index]

    def is_open(self, block: int) -> bool:
        """Return True if the whole block is shown."""
        return block not in self.foldable or block in self.toggled

    def _lay_out_text(self) -> None:
        blocks = self.document.blocks
        number = 0
        while number < len(blocks):
            if number:
                self.lines.append(LayoutLine())
            has_neighbour = number + 1 < len(blocks) and blocks[number + 1].beside and not blocks[number].beside
            if has_neighbour and self.width >= MIN_WIDTH_BESIDE:
                left, right = self._cells(number, self.split), self._cells(number + 1, self.right_width)
                for pair in zip_longest(left, right):
                    self._add(LayoutLine(*pair, paired=True))
                number += 2
            else:
                for cell in self._cells(number, self.width):
                    self._add(LayoutLine(cell))
                number += 1

    def _cells(self, number: int, width: int) -> list[LayoutCell]:
        """Return the lines of a block at a width, starting with the title."""
        block = self.document.blocks[number]
        cells, room = [LayoutCell(number, LinePart.TITLE)], width - GUTTER_CELLS
        if block.detail and cell_len(block.title) + 3 + cell_len(block.detail) > room:  # too wide for the title line
            cells += [LayoutCell(number, LinePart.DETAIL, *row) for row in wrap(block.detail, room)]
        return cells + self._body(number, room)

    def _body(self, number: int, width: int) -> list[LayoutCell]:
        block = self.document.blocks[number]
        if not block.text:
            return []
        width, is_toggled = max(width, 10), number in self.toggled
        if block.folded:
            self.foldable.add(number)
            return _body_cells(number, wrap(block.text, width)) if is_toggled else []
        is_huge = len(block.text) > MAX_WRAPPED_CHARS
        wrapped = block.text[: 2 * width * PREVIEW_ROWS] if is_huge and not is_toggled else block.text
        rows = wrap(wrapped, width)
        if is_huge or len(rows) > MAX_OPEN_ROWS:
            self.foldable.add(number)
            if not is_toggled:
                shown = _body_cells(number, rows[:PREVIEW_ROWS])
                return [*shown, LayoutCell(number, LinePart.MORE, shown[-1].end, len(block.text))]
        return _body_cells(number, rows)

    def _lay_out_table(self) -> None:
        for number, block in enumerate(self.document.blocks):
            if number:
                self.lines.append(LayoutLine(paired=True))
            rows = [LayoutCell(number, LinePart.DETAIL, 0, len(block.detail))] if block.detail else []
            rows += self._body(number, self.right_width - 1)
            for name, cell in zip_longest([LayoutCell(number, LinePart.TITLE)], rows):
                self._add(LayoutLine(name, cell, paired=True))

    def _add(self, line: LayoutLine) -> None:
        for cell in (line.left, line.right):
            if cell is not None and cell.part is LinePart.BODY:
                starts, lines = self._bodies.setdefault(cell.block, ([], []))
                starts.append(cell.start)
                lines.append(len(self.lines))
                self._ends[cell.block] = cell.end
        self.lines.append(line)


def _body_cells(number: int, rows: list[Row]) -> list[LayoutCell]:
    return [LayoutCell(number, LinePart.BODY, *row) for row in rows]


Row = tuple[int, int]
"""Start and end (exclusive)."""


def wrap(text: str, width: int) -> list[Row]:
    """Return the rows of a sanitized text. An empty text has one empty row.

    >>> [("one two three")[start:end] for start, end in wrap("one two three", 8)]
    ['one two', 'three']
    """
    rows: list[Row] = []
    start = 0
    for line in text.split("\n"):
        end = start + len(line)
        if len(line) <= width and (line.isascii() or cell_len(line) <= width):
            rows.append((start, end))
        else:
            rows += _wrap_line(text, start, end, width)
        start = end + 1
    return rows


def _wrap_line(text: str, start: int, end: int, width: int) -> Iterator[Row]:
    while start < end:
        cut = _fitting_end(text, start, end, width)
        if cut < end and text[cut] != " ":
            space = text.rfind(" ", start + 1, cut)
            if space > start and text[start:space].strip():  # a row must not consist of the indentation only
                cut = space
        yield start, cut
        start = cut + 1 if cut < end and text[cut] == " " else cut


def _fitting_end(text: str, start: int, end: int, width: int) -> int:
    """Return the end of the longest row that fits, of at least one character."""
    cut = min(end, start + width)
    excess = cell_len(text[start:cut]) - width
    while excess > 0 and cut > start + 1:
        cut = max(start + 1, cut - max(1, excess // 2))
        excess = cell_len(text[start:cut]) - width
    return cut
