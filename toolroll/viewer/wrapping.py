"""Wrapping: where the rows of a text begin and end, at a width in cells.

The rows are places in the text, not copies of it, so that a match of a search is found on the row where it is drawn.
They follow each other in order and leave out nothing but newlines and the one space at which a row was broken. No row
is wider than the width, unless a single character is.
"""

from __future__ import annotations

from rich.cells import cell_len

Row = tuple[int, int]
"""From, and to (exclusive)."""


def wrap(text: str, width: int) -> list[Row]:
    """The rows of a harmless text. An empty text has one, which is empty.

    >>> [("one two three")[start:end] for start, end in wrap("one two three", 8)]
    ['one two', 'three']
    """
    rows: list[Row] = []
    start = 0
    plain = text.isascii()
    while True:
        end = text.find("\n", start)
        last = end < 0
        end = len(text) if last else end
        if end - start <= width and (plain or cell_len(text[start:end]) <= width):
            rows.append((start, end))
        else:
            _wrap_line(text, start, end, width, plain, rows)
        if last:
            return rows
        start = end + 1


def _wrap_line(text: str, start: int, end: int, width: int, plain: bool, rows: list[Row]) -> None:
    while start < end:
        cut = min(end, start + width) if plain else _fitting(text, start, end, width)
        if cut < end and text[cut] != " ":
            space = text.rfind(" ", start + 1, cut)
            if space > start and text[start:space].strip():  # never a row of nothing but the indentation
                cut = space
        rows.append((start, cut))
        start = cut + 1 if cut < end and text[cut] == " " else cut


def _fitting(text: str, start: int, end: int, width: int) -> int:
    """How far a row reaches: at least one character, however wide it is."""
    cut = min(end, start + width)
    over = cell_len(text[start:cut]) - width
    while over > 0 and cut > start + 1:
        cut = max(start + 1, cut - max(1, over // 2))
        over = cell_len(text[start:cut]) - width
    return cut
