"""Format scores, durations, sizes and counts, and fit text into columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.filesize import pick_unit_and_suffix

UNKNOWN = "–"
DEFAULT_MASK = r"<\|image_pad\|>|<\|imgpad\|>"
"""Pattern of image padding, of which a prompt contains one token per image patch."""


def score(value: float | None) -> str:
    """Return a score with four significant digits.

    >>> [score(value) for value in (1.0, -0.05, 2e-05, 0.123456, None)]
    ['1', '-0.05', '2e-05', '0.1235', '–']
    """
    return UNKNOWN if value is None else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """Return a duration in a suitable unit.

    >>> [seconds(value) for value in (0.0004, 0.0123, 1.5, 75, 7300, None)]
    ['<1 ms', '12 ms', '1.5 s', '75 s', '2.0 h', '–']
    """
    if value is None:
        return UNKNOWN
    if value < 0.001:
        return "<1 ms" if value > 0 else "0 s"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 100:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5970 else f"{value / 3600:.1f} h"


def size(value: int) -> str:
    """Return a size in bytes in a suitable unit.

    >>> [size(value) for value in (812, 5_300_000, 10_700_000_000)]
    ['812 B', '5.3 MB', '10.7 GB']
    """
    unit, suffix = pick_unit_and_suffix(value, ["B", "kB", "MB", "GB", "TB"], 1000)
    amount = value / unit
    return f"{amount:.1f} {suffix}" if unit > 1 and amount < 99.95 else f"{amount:.0f} {suffix}"


def count(value: int | None) -> str:
    """Return an integer with thousands separators."""
    return UNKNOWN if value is None else f"{value:,}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun.

    >>> plural(1, "sample"), plural(1200, "sample"), plural(2, "match", "matches")
    ('1 sample', '1,200 samples', '2 matches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def fit(text: str, width: int, *, align_right: bool = False) -> str:
    """Truncate or pad a text to exactly `width` terminal cells."""
    if cell_len(text) > width:
        text = f"{set_cell_size(text, max(0, width - 1))}…"
    padding = " " * (width - cell_len(text))
    return padding + text if align_right else text + padding


def truncate_left(text: str, width: int) -> str:
    """Return the end of a text that fits into `width` cells, or "" if that is too little to be useful."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return f"…{text}" if text and width > 8 else ""


def table(rows: Sequence[Sequence[str]], *, align_right: bool = True) -> str:
    """Return rows as lines with aligned columns. The first column is aligned left.

    Args:
        rows: Cells of each row. All rows have the same number of cells.
        align_right: Align the other columns right.
    """
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(cell_len, cells))
        columns.append([fit(cell, width, align_right=align_right and number > 0) for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
