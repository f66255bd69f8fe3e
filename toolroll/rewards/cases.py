"""The test cases of one problem, and how they are read from a data set's ground truth.

Three kinds of case:

- StdinCase: the program reads a text and prints another.
- CallCase: a function of the solution is called with JSON arguments, and returns a JSON value. Python only.
- AssertCase: code that is put behind the solution, and must run to its end.

`read_cases` takes a dict, or its JSON text, in the form that verl's users have:

    {"inputs": ["3\\n4\\n"], "outputs": ["7\\n"]}                                    # stdin and stdout
    {"fn_name": "add", "inputs": [[3, 4], "3\\n4\\n"], "outputs": [7, "7"]}          # a function
    {"assert_case": ["assert add(3, 4) == 7"]}                                     # asserts

and each may have `language` and `timeout` (seconds for a case), which go before the grader's settings.

- Of a function, an input is a list of its arguments, or a text with one JSON value in a line; empty lines are of no
  account. An output is a JSON value, or a text that holds one. Such a text is itself accepted too, as where a function
  returns "12" and the data set wrote it without quotes; one that isn't JSON is the value. Where a list of one is
  expected, the bare element is accepted, as APPS writes what a function returns.
- Of a program, an input or output may also be a list of lines, or a number.
- Tuples and numpy arrays are lists, and a key that is None is not there, as parquet has it.

Data that is wrong raises ValueError, which says what and where. It is never a score: the model had no part in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from toolroll.errors import did_you_mean, explain
from toolroll.rewards.fence import OTHER_NAMES, language_of
from toolroll.sandbox.protocol import Language


@dataclass(frozen=True)
class StdinCase:
    """A program reads `stdin`, and prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """`fn_name(*arguments)` returns `expected`, or one of `also`. All are JSON values."""

    fn_name: str
    arguments: tuple[Any, ...]
    expected: Any
    also: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AssertCase:
    """Code that is put behind the solution, and must run to its end."""

    code: str


Case = StdinCase | CallCase | AssertCase


@dataclass(frozen=True)
class Cases:
    """The test cases of one problem."""

    cases: tuple[Case, ...]
    language: str | None = None
    """Of the solution; None for what the grader's settings say."""
    timeout: float | None = None
    """Seconds for each case; None for what the grader's settings say."""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("There are no test cases: a solution could neither pass nor fail.")
        for number, case in enumerate(self.cases):
            if isinstance(case, CallCase) and not case.fn_name.isidentifier():
                raise ValueError(f"Case {number}: fn_name {case.fn_name!r:.80} can't be a function's name.")


class _GroundTruth(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: list[Any] | None = None
    outputs: list[Any] | None = None
    fn_name: str | None = None
    assert_case: list[str] | None = None
    language: str | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=False)

    @field_validator("language")
    @classmethod
    def _known(cls, given: str | None) -> str | None:
        return None if given is None else checked_language(given)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.assert_case is None and (self.inputs is None or self.outputs is None):
            raise ValueError("needs 'inputs' and 'outputs', or 'assert_case'")
        lengths = {
            name: len(values)
            for name in ("inputs", "outputs", "assert_case")
            if (values := getattr(self, name)) is not None
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"as many of each are needed, but it has {_listed(lengths)}")
        return self


def read_cases(ground_truth: Any) -> Cases:
    """The cases in a data set's ground truth: a dict, or its JSON text. Raises ValueError where it is wrong."""
    given = _parsed(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(given, Mapping):
        raise ValueError(f"ground_truth must be a dict, or the JSON text of one, not {given!r:.80}")
    try:
        truth = _GroundTruth.model_validate(_plain(dict(given)))
    except ValidationError as error:
        said = explain(error, _GroundTruth.model_fields).replace("Value error, ", "")
        raise ValueError(f"ground_truth: {said}") from None
    if truth.fn_name and truth.assert_case is None and truth.language not in (None, "python"):
        raise ValueError(f"ground_truth: fn_name is for Python only, and the language is {truth.language!r}")
    return Cases(tuple(_cases(truth)), truth.language, truth.timeout)


def checked_language(name: str) -> str:
    """The sandbox's name of a language. Raises ValueError for one that it has no word for."""
    language, known = language_of(name), get_args(Language)
    if language not in known:
        names = [*known, *(other for others in OTHER_NAMES.values() for other in others)]
        raise ValueError(f"no sandbox knows the language {name!r}{did_you_mean(name, names)}")
    return language


def _cases(truth: _GroundTruth) -> list[Case]:
    inputs, outputs = truth.inputs or [], truth.outputs or []
    if truth.assert_case is not None:
        for name, values in (("inputs", inputs), ("outputs", outputs)):
            for number, value in enumerate(values):
                if value not in (None, ""):
                    raise ValueError(f"ground_truth: {name}[{number}] is {value!r:.80}, but an assert has none")
        return [AssertCase(code) for code in truth.assert_case]
    pairs = list(enumerate(zip(inputs, outputs, strict=True)))
    if truth.fn_name:
        return [_call(truth.fn_name, given, expected, number) for number, (given, expected) in pairs]
    return [
        StdinCase(_text(given, f"inputs[{number}]"), _text(expected, f"outputs[{number}]"))
        for number, (given, expected) in pairs
    ]


def _call(fn_name: str, given: Any, expected: Any, number: int) -> CallCase:
    where = f"inputs[{number}]"
    if isinstance(given, str):
        lines = [line for line in given.split("\n") if line.strip()]
        given = [_parsed(line, f"{where}, argument {place}") for place, line in enumerate(lines)]
    if not isinstance(given, list):
        raise ValueError(f"{where} must be a list of arguments, or a text with one in a line, not {given!r:.80}")
    also: list[Any] = []
    if isinstance(expected, str):
        text = expected
        try:
            expected = json.loads(text)
            also.append(text)
        except json.JSONDecodeError:
            pass  # it is the value itself
        except (ValueError, RecursionError) as error:
            raise ValueError(f"outputs[{number}] can't be read: {error}") from None
    if isinstance(expected, list) and len(expected) == 1:
        also.append(expected[0])
    for value, place in ((given, where), (expected, f"outputs[{number}]")):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{place} is no JSON value: {error}") from None
    return CallCase(fn_name, tuple(given), expected, tuple(also))


def _text(value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"ground_truth: {where} must be a text, not {value!r:.80}")
    return value


def _parsed(text: str, where: str = "ground_truth") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} isn't JSON ({error}): {text!r:.80}") from None


def _plain(value: Any) -> Any:
    """With lists for tuples and arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _listed(lengths: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in lengths.items())
