"""Whether what came out is what was expected.

Text, as a program prints it (`same_output`): line by line, after white space at the end of each line (`\\r` among it)
and empty lines at the end of all have been removed. Everything else counts, white space at a line's beginning too. With
a tolerance, two words that are both numbers may differ by `tolerance × max(1, |expected|)`; the white space between
words still counts. NaN is NaN, and an infinity is only itself.

Values, as JSON has them (`same_value`): a tuple is a list, `1` is `1.0`, `true` is not `1`, names of an object are
text (`{1: 2}` is `{"1": 2}`), and the order of names is of no account. A tolerance counts where one of two numbers has
a fraction (is a float); NaN is NaN. What is no JSON value is like nothing.

Pure, never raises, and takes time in proportion to what is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import inf, isfinite, isinf, isnan
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_NUMBER = {"nan": float("nan"), "inf": inf, "infinity": inf}
_WORDS = re.compile(r"\s+|\S+")


def same_output(got: str, expected: str, tolerance: float | None = None) -> bool:
    """Whether a program printed what was expected."""
    return first_difference(got, expected, tolerance) is None


def first_difference(got: str, expected: str, tolerance: float | None = None) -> int | None:
    """The first line in which they differ, from 0; None if they are the same."""
    ours, theirs = lines_of(got), lines_of(expected)
    if ours == theirs:
        return None
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other and (tolerance is None or not _same_line(one, other, tolerance)):
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def lines_of(output: str) -> list[str]:
    """The lines that are compared."""
    lines = [line.rstrip() for line in output.rstrip().split("\n")]
    return [] if lines == [""] else lines


def same_value(got: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Whether two JSON values are the same."""
    left = [(got, expected)]
    while left:  # not by recursion: how deep a value goes is the program's choice
        one, other = left.pop()
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            if len(one) != len(other):
                return False
            left.extend(zip(one, other, strict=True))
        elif isinstance(one, Mapping) and isinstance(other, Mapping):
            ours, theirs = _by_name(one), _by_name(other)
            if ours is None or theirs is None or ours.keys() != theirs.keys():
                return False
            left.extend((ours[name], theirs[name]) for name in theirs)
        elif not _same_scalar(one, other, tolerance):
            return False
    return True


def _same_scalar(got: Any, expected: Any, tolerance: float | None) -> bool:
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        loosely = tolerance is not None and (isinstance(got, float) or isinstance(expected, float))
        return _same_number(got, expected, tolerance if loosely else None)
    if isinstance(got, str) and isinstance(expected, str):
        return got == expected
    return got is None and expected is None


def _same_number(got: float, expected: float, tolerance: float | None) -> bool:
    if got == expected:
        return True
    try:
        if isnan(got) or isnan(expected):
            return isnan(got) and isnan(expected)
        if tolerance is None or isinf(got) or isinf(expected):
            return False
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer beyond all floats
        return False


def _by_name(value: Mapping[Any, Any]) -> dict[str, Any] | None:
    """With its names as JSON has them; None where one can't be a name."""
    if all(isinstance(name, str) for name in value):
        return dict(value)
    try:
        return {name if isinstance(name, str) else _name_of(name): item for name, item in value.items()}
    except (TypeError, ValueError):
        return None


def _name_of(name: Any) -> str:
    if name is None or isinstance(name, bool | int | float):
        return json.dumps(name)
    raise TypeError(f"{name!r} can't be a name in JSON")


def _same_line(got: str, expected: str, tolerance: float) -> bool:
    ours, theirs = _WORDS.findall(got), _WORDS.findall(expected)
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_word(one, other, tolerance) for one, other in zip(ours, theirs, strict=True))


def _same_word(got: str, expected: str, tolerance: float) -> bool:
    one, other = _number_of(got), _number_of(expected)
    return one is not None and other is not None and _same_number(one, other, tolerance)


def _number_of(word: str) -> float | None:
    if _NUMBER.fullmatch(word):
        number = float(word)
        return number if isfinite(number) else None  # beyond all floats: as text, so that no two are taken for one
    sign, name = (-1.0, word[1:]) if word[:1] == "-" else (1.0, word.removeprefix("+"))
    found = _NO_NUMBER.get(name.lower())
    return None if found is None else sign * found
