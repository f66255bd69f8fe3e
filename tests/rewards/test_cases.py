"""A data set's ground truth is read correctly, or rejected with the position of the error."""

import contextlib
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rewards.cases import AssertCase, CallCase, Cases, StdinCase, read_cases


def test_stdin_cases_are_read() -> None:
    cases = read_cases({"inputs": ["3 4\n", ["1", "2"], 5], "outputs": ["7\n", ["a", "b"], 1.5]})
    assert cases == Cases((StdinCase("3 4\n", "7\n"), StdinCase("1\n2", "a\nb"), StdinCase("5", "1.5")))


def test_json_text_is_read() -> None:
    truth = {"inputs": ["é"], "outputs": ["7"], "language": "c++", "timeout": 2}
    assert read_cases(json.dumps(truth)) == Cases((StdinCase("é", "7"),), "cpp", 2.0)


def test_call_cases_are_read() -> None:
    cases = read_cases(
        {"fn_name": "f", "inputs": [[1, "a"], '1\n"a"', "", []], "outputs": [3, "[1, 2]", "not JSON", None]}
    )
    assert cases.cases == (
        CallCase("f", (1, "a"), 3),
        CallCase("f", (1, "a"), [1, 2], ("[1, 2]",)),
        CallCase("f", (), "not JSON"),
        CallCase("f", (), None),
    )


@pytest.mark.parametrize(
    ("given", "as_json"),
    [
        ((1, 2), [1, 2]),
        ([1, [2, (3,)]], [1, [2, [3]]]),
        ({1: "a"}, {"1": "a"}),
        ({None: 1, True: 2}, {"null": 1, "true": 2}),
    ],
)
def test_values_are_converted_to_json(given: Any, as_json: Any) -> None:
    cases = read_cases({"fn_name": "f", "inputs": [[given]], "outputs": [given]})
    assert cases.cases == (CallCase("f", (as_json,), as_json),)


@pytest.mark.parametrize("value", [{(1, 2): 3}, object()])
def test_values_without_json_form_are_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"outputs\[0\] is not a JSON value"):
        read_cases({"fn_name": "f", "inputs": [[]], "outputs": [value]})


@pytest.mark.parametrize("text", ["1\n[2, 3]", "1\n[2, 3]\n", "\n1\n\n[2, 3]\n \n", "1\r\n[2, 3]\r\n"])
def test_empty_lines_are_not_arguments(text: str) -> None:
    (case,) = read_cases({"fn_name": "f", "inputs": [text], "outputs": [0]}).cases
    assert isinstance(case, CallCase)
    assert case.arguments == (1, [2, 3])


def test_element_of_a_list_of_one_is_accepted() -> None:
    given_as_list, given_as_text = read_cases({"fn_name": "f", "inputs": [[], []], "outputs": [[5], "[5]"]}).cases
    assert isinstance(given_as_list, CallCase)
    assert isinstance(given_as_text, CallCase)
    assert (given_as_list.expected, given_as_list.alternatives) == ([5], (5,))
    assert (given_as_text.expected, given_as_text.alternatives) == ([5], ("[5]", 5))


def test_assert_cases_are_read() -> None:
    asserted = Cases((AssertCase("assert f() == 1"), AssertCase("assert f() > 0")))
    code = ["assert f() == 1", "assert f() > 0"]
    assert read_cases({"assert_case": code}) == asserted
    assert read_cases({"assert_case": code, "inputs": ["", ""], "outputs": [None, None], "fn_name": "f"}) == asserted


def test_parquet_rows_are_read() -> None:
    truth = {
        "inputs": np.array(["1", "2"], dtype=object),
        "outputs": np.array(["3", "4"], dtype=object),
        "fn_name": None,
        "assert_case": None,
        "language": None,
        "timeout": np.float64(3),
    }
    assert read_cases(truth) == Cases((StdinCase("1", "3"), StdinCase("2", "4")), None, 3.0)
    nested = {"fn_name": "f", "inputs": ((np.array([1, 2]), (3,)),), "outputs": np.array([[4, 5]])}
    assert read_cases(nested).cases == (CallCase("f", ([1, 2], [3]), [4, 5]),)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("{", "ground_truth is not valid JSON"),
        ("[1]", "must be a dict"),
        (None, "must be a dict"),
        ({}, "needs 'inputs' and 'outputs', or 'assert_case'"),
        ({"inputs": ["1"]}, "needs 'inputs' and 'outputs'"),
        ({"inputs": [], "outputs": []}, "no test cases"),
        ({"assert_case": []}, "no test cases"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "the lists have different lengths: 2 inputs, 1 outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "output": []}, "unknown key 'output' (did you mean 'outputs'?)"),
        ({"inputs": "1", "outputs": ["1"]}, "inputs: Input should be a valid list"),
        ({"inputs": ["1"], "outputs": [None]}, "outputs[0] must be a string"),
        ({"inputs": [{}], "outputs": ["1"]}, "inputs[0] must be a string"),
        ({"inputs": ["1"], "outputs": ["1"], "language": "pyton"}, "Unknown language 'pyton'. Did you mean 'python'?"),
        ({"inputs": ["1"], "outputs": ["1"], "timeout": 0}, "timeout: Input should be greater than 0"),
        (
            {"inputs": [[1]], "outputs": [1], "fn_name": "f", "language": "cpp"},
            "requires the language 'python'",
        ),
        ({"inputs": [[1], "1\nx"], "outputs": [1, 1], "fn_name": "f"}, "inputs[1], argument 1 is not valid JSON"),
        ({"inputs": [7], "outputs": [1], "fn_name": "f"}, "inputs[0] must be a list of arguments"),
        ({"inputs": [[1]], "outputs": [{1, 2}], "fn_name": "f"}, "outputs[0] is not a JSON value"),
        ({"inputs": [[1]], "outputs": ["9" * 5000], "fn_name": "f"}, "outputs[0] cannot be parsed"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f()"}, "is not a valid function name"),
        ({"inputs": ["1"], "outputs": [None], "assert_case": ["x"]}, "inputs[0] must be empty for an assert, got '1'"),
        ({"assert_case": ["x"], "inputs": ["", ""]}, "2 inputs, 1 assert_case"),
        ({"assert_case": [1]}, "assert_case.0: Input should be a valid string"),
    ],
)
def test_invalid_data_is_rejected(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_cases(truth)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.lists(JSON, max_size=3), JSON), min_size=1, max_size=4))
def test_call_as_text_equals_call_as_values(calls: list[tuple[list[Any], Any]]) -> None:
    inputs, outputs = zip(*calls, strict=True)
    values = {"fn_name": "f", "inputs": inputs, "outputs": [["x", output] for output in outputs]}
    text = {
        "fn_name": "f",
        "inputs": ["\n".join(map(json.dumps, arguments)) + "\n" for arguments in inputs],
        "outputs": [json.dumps(["x", output]) for output in outputs],
    }
    for one, other in zip(read_cases(values).cases, read_cases(text).cases, strict=True):
        assert isinstance(one, CallCase)
        assert isinstance(other, CallCase)
        assert (one.arguments, one.expected) == (other.arguments, other.expected)


@given(JSON | st.dictionaries(st.sampled_from(["inputs", "outputs", "fn_name", "assert_case", "x"]), JSON))
def test_any_data_is_read_or_rejected(truth: Any) -> None:
    with contextlib.suppress(ValueError):
        assert read_cases(truth).cases
