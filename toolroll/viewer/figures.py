"""Figures for people: scores, times, sizes and counts, short and aligned."""

from __future__ import annotations

UNKNOWN = "–"


def score(value: float | None) -> str:
    """A score in at most seven characters, for most.

    >>> [score(value) for value in (1.0, -0.05, 2e-05, 0.123456, None)]
    ['1', '-0.05', '2e-05', '0.1235', '–']
    """
    return UNKNOWN if value is None else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """A time.

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
    """A size.

    >>> [size(value) for value in (812, 5_300_000, 10_700_000_000)]
    ['812 B', '5.3 MB', '10.7 GB']
    """
    if value < 1000:
        return f"{value} B"
    amount = float(value)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.5 or unit == "TB":
            break
    return f"{amount:.0f} {unit}" if amount >= 99.95 else f"{amount:.1f} {unit}"


def count(value: int | None) -> str:
    """A number of things."""
    return UNKNOWN if value is None else f"{value:,}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """A number of things, with their name.

    >>> plural(1, "sample"), plural(1200, "sample"), plural(2, "match", "matches")
    ('1 sample', '1,200 samples', '2 matches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
