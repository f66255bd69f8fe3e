r"""Compare output and values with what a test case expects.

Text output (`first_difference`) is compared line by line, ignoring white space at the end of each line (including
`\r`) and empty lines at the end. Everything else counts, including white space at the start of a line. With a
tolerance, two words that are both numbers may differ by `tolerance × max(1, |expected|)`; the white space between words
still counts. NaN equals NaN, and an infinity equals only itself.

JSON values (`same_value`): `1` equals `1.0`, `true` does not equal `1`, and the order of keys does not matter. A
tolerance applies if at least one of two numbers is a float; NaN equals NaN.

All functions are pure, never raise, and take time linear in the size of their arguments.
"""

from __future__ import annotations

import re
from math import isfinite, isnan
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SPECIAL_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_WORDS_AND_SPACES = re.compile(r"\s+|\S+")


def first_difference(got: str, expected: str, tolerance: float | None = None) -> int | None:
    """Return the index of the first line that differs, or None if the outputs are equal."""
    got_lines, expected_lines = comparable_lines(got), comparable_lines(expected)
    if got_lines == expected_lines:
        return None
    for number, (line, expected_line) in enumerate(zip(got_lines, expected_lines, strict=False)):
        if line != expected_line and (tolerance is None or not _same_line(line, expected_line, tolerance)):
            return number
    return None if len(got_lines) == len(expected_lines) else min(len(got_lines), len(expected_lines))


def comparable_lines(output: str) -> list[str]:
    """Return the lines of an output that are compared, without trailing white space."""
    lines = [line.rstrip() for line in output.rstrip().split("\n")]
    return [] if lines == [""] else lines


def same_value(got: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return True if two JSON values are equal."""
    pairs = [(got, expected)]
    while pairs:  # a loop instead of recursion, because the program decides how deeply a value is nested
        one, other = pairs.pop()
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs.extend(zip(one, other, strict=True))
        elif isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs.extend((one[key], other[key]) for key in other)
        elif not _same_scalar(one, other, tolerance):
            return False
    return True


def _same_scalar(got: Any, expected: Any, tolerance: float | None) -> bool:
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        has_float = isinstance(got, float) or isinstance(expected, float)
        return _same_number(got, expected, tolerance if has_float else None)
    return type(got) is type(expected) and got == expected


def _same_number(got: float, expected: float, tolerance: float | None) -> bool:
    if got == expected:
        return True
    try:
        if tolerance is None or not (isfinite(got) and isfinite(expected)):
            return isnan(got) and isnan(expected)
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer that is too large for a float
        return False


def _same_line(got: str, expected: str, tolerance: float) -> bool:
    words, expected_words = _WORDS_AND_SPACES.findall(got), _WORDS_AND_SPACES.findall(expected)
    return len(words) == len(expected_words) and all(
        word == expected_word or _same_word(word, expected_word, tolerance)
        for word, expected_word in zip(words, expected_words, strict=True)
    )


def _same_word(got: str, expected: str, tolerance: float) -> bool:
    number, expected_number = _parse_number(got), _parse_number(expected)
    return number is not None and expected_number is not None and _same_number(number, expected_number, tolerance)


def _parse_number(word: str) -> float | None:
    if _SPECIAL_NUMBER.fullmatch(word):
        return float(word)
    if _NUMBER.fullmatch(word) and isfinite(number := float(word)):  # else too large for a float: compared as text
        return number
    return None
