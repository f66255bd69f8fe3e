"""Output and values are compared by the documented rules."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rewards.comparison import first_difference, same_value


def same_output(got: str, expected: str, tolerance: float | None = None) -> bool:
    return first_difference(got, expected, tolerance) is None


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("7\n", "7"),
        ("7", "7\n\n\n"),
        ("a  \nb\t\n", "a\nb"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("", "\n \n"),
        ("a\n\nb", "a\n\nb\n"),
    ],
)
def test_trailing_white_space_is_ignored(got: str, expected: str) -> None:
    assert same_output(got, expected)
    assert same_output(expected, got)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("8", "7"),
        (" 7", "7"),
        ("a b", "a  b"),
        ("a\nb", "a\n\nb"),
        ("", "0"),
        ("7.0", "7"),
        ("1e3", "1000"),
        ("A", "a"),
    ],
)
def test_other_differences_count(got: str, expected: str) -> None:
    assert not same_output(got, expected)
    assert not same_output(expected, got)


def test_first_differing_line_is_returned() -> None:
    assert first_difference("a\nb\nc", "a\nx\nc") == 1
    assert first_difference("a", "a\nb") == 1
    assert first_difference("a\n", "a") is None


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("3.1415926", "3.14159", True),
        ("3.15", "3.14159", False),
        ("1000001", "1000000", True),
        ("0.0000001", "0", True),
        ("x = 1.0000001 m", "x = 1 m", True),
        ("x = 1.0000001 m", "y = 1 m", False),
        ("1 2", "1 2 3", False),
        ("1  2", "1 2", False),
        ("nan", "NaN", True),
        ("nan", "1", False),
        ("inf", "Infinity", True),
        ("-inf", "inf", False),
        ("inf", "1e300", False),
        ("1" * 400, "2" * 400, False),
        ("0x10", "16", False),
        ("1_0", "10", False),
    ],
)
def test_tolerance_applies_to_numbers_in_output(got: str, expected: str, same: bool) -> None:
    assert same_output(got, expected, 1e-5) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([1, [2, [3]]], [1, [2, [3]]], True),
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (None, False, False),
        (None, None, True),
        ("1", 1, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [2, 1], False),
        ([], {}, False),
        ("", [], False),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
        (10**400, 1.5, False),
    ],
)
def test_json_values_are_compared(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same
    assert same_value(expected, got) is same


def test_tolerance_applies_to_nested_floats() -> None:
    assert same_value({"a": [1.0000001, 2]}, {"a": [1, 2]}, 1e-5)
    assert not same_value({"a": [1.1, 2]}, {"a": [1, 2]}, 1e-5)
    assert not same_value([100000001], [100000000], 1e-5), "two integers are compared exactly"
    assert not same_value(10**400, 1.0, 1e-5)
    assert not same_value(math.inf, 1.0, 1e-5)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
TOLERANCES = st.none() | st.floats(min_value=0, max_value=1)


@given(VALUES, TOLERANCES)
def test_value_equals_itself(value: Any, tolerance: float | None) -> None:
    assert same_value(value, value, tolerance)


@given(VALUES, VALUES)
def test_value_comparison_is_symmetric(one: Any, other: Any) -> None:
    assert same_value(one, other) is same_value(other, one)


@given(VALUES, VALUES, st.floats(min_value=0, max_value=1))
def test_tolerance_only_accepts_more(one: Any, other: Any, tolerance: float) -> None:
    assert same_value(one, other, tolerance) or not same_value(one, other)


LINES = st.lists(st.text(alphabet="ab1.5e- \t", max_size=8), max_size=6)
SPACE = st.text(alphabet=" \t\r", max_size=3)


@given(st.text(), TOLERANCES)
def test_output_equals_itself(text: str, tolerance: float | None) -> None:
    assert same_output(text, text, tolerance)


@given(st.text(), st.text(), TOLERANCES)
def test_output_comparison_is_symmetric_and_total(one: str, other: str, tolerance: float | None) -> None:
    same_output(one, other, tolerance)
    assert same_output(one, other) is same_output(other, one)
    assert same_output(one, other, tolerance) or not same_output(one, other)


@given(LINES, st.data(), TOLERANCES)
def test_added_trailing_white_space_is_ignored(lines: list[str], data: st.DataObject, tolerance: float | None) -> None:
    padded = "\n".join(line + data.draw(SPACE) for line in lines) + data.draw(st.text(alphabet=" \r\n", max_size=4))
    assert same_output(padded, "\n".join(lines), tolerance)


@pytest.mark.parametrize("piece", ["1", "1 ", " ", "\n", "1.", "e", "1e5 ", "nan ", "\r\n", "-"])
def test_time_is_linear_in_the_output(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    started_at = time.process_time()
    same_output(text + "x", text + "y", 1e-6)
    assert time.process_time() - started_at < 20


def test_deeply_nested_values_are_compared() -> None:
    deep: list[Any] = []
    other: list[Any] = []
    for _ in range(100_000):
        deep, other = [deep], [other]
    assert same_value(deep, other)
    while deep:  # destroyed step by step, since the interpreter would recurse
        deep, other = deep[0], other[0]
