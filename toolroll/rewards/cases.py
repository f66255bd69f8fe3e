r"""Test cases of a coding problem, and how to read them from a data set's ground truth.

There are three kinds of cases:

- `StdinCase`: the program reads a text from stdin and prints another.
- `CallCase`: a function of the solution is called with JSON arguments and returns a JSON value. Python only.
- `AssertCase`: code that is appended to the solution and must run to its end.

`read_cases` accepts a dict, or its JSON text, in the format that verl's data sets use:

    {"inputs": ["3\n4\n"], "outputs": ["7\n"]}                                    # stdin and stdout
    {"fn_name": "add", "inputs": [[3, 4], "3\n4\n"], "outputs": [7, "7"]}          # a function
    {"assert_case": ["assert add(3, 4) == 7"]}                                     # asserts

Each may have `language` and `timeout` (seconds for one case), which override the grader's settings.

- Function calls: an input is a list of arguments, or a text with one JSON value per line, without counting empty lines.
  An output is a JSON value, or a text that contains one. The text itself is accepted too, because some data sets omit
  the quotes of a string such as "12"; a text that is not JSON is the value. If a list with one element is expected, the
  bare element is accepted, which is how APPS writes return values.
- Programs: an input or output may also be a list of lines, or a number.
- Tuples and numpy arrays are treated as lists, and a key whose value is None as absent, since Parquet produces both.

Invalid data raises ValueError with the position of the error. It never becomes a score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from toolroll._internal.code_fences import LANGUAGE_ALIASES, canonical_language
from toolroll.errors import explain, unknown_name
from toolroll.sandbox.protocol import Language


def parse_language(name: str) -> str:
    """Return the sandbox's name of a language.

    Args:
        name: Name of the language, or an alias of it.

    Raises:
        ValueError: If no sandbox supports the language.
    """
    language, known = canonical_language(name), get_args(Language)
    if language not in known:
        aliases = (alias for aliases in LANGUAGE_ALIASES.values() for alias in aliases)
        raise ValueError(unknown_name("language", name, [*known, *aliases]))
    return language


KnownLanguage = Annotated[str, AfterValidator(parse_language)]
"""Language that some sandbox supports, given by its name or an alias."""


@dataclass(frozen=True)
class StdinCase:
    """A program reads `stdin` and prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """`fn_name(*arguments)` returns `expected` or one of `alternatives`. All are JSON values."""

    fn_name: str
    arguments: tuple[Any, ...]
    expected: Any
    alternatives: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AssertCase:
    """Code that is appended to the solution and must run to its end."""

    code: str


Case = StdinCase | CallCase | AssertCase


@dataclass(frozen=True)
class Cases:
    """The test cases of one problem.

    Raises:
        ValueError: If the cases are empty, or the name of a function is invalid.
    """

    cases: tuple[Case, ...]
    language: str | None = None
    """Language of the solution; None for the grader's setting."""
    timeout: float | None = None
    """Timeout for each case, in seconds; None for the grader's setting."""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("The ground truth has no test cases.")
        for number, case in enumerate(self.cases):
            if isinstance(case, CallCase) and not case.fn_name.isidentifier():
                raise ValueError(f"Case {number}: fn_name {case.fn_name!r:.80} is not a valid function name.")


class _GroundTruth(BaseModel, extra="forbid", strict=True):
    inputs: list[Any] | None = None
    outputs: list[Any] | None = None
    fn_name: str | None = None
    assert_case: list[str] | None = None
    language: KnownLanguage | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=False)

    @model_validator(mode="after")
    def _validate_lengths(self) -> Self:
        if self.assert_case is None and (self.inputs is None or self.outputs is None):
            raise ValueError("needs 'inputs' and 'outputs', or 'assert_case'")
        lengths = {name: len(values) for name, values in self if isinstance(values, list)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ValueError(f"the lists have different lengths: {counts}")
        return self


def read_cases(ground_truth: Any) -> Cases:
    """Read the test cases from a data set's ground truth.

    Args:
        ground_truth: A dict, or the JSON text of one, in the format above.

    Returns:
        The test cases.

    Raises:
        ValueError: If the ground truth is invalid.

    Example:
        >>> read_cases({"inputs": ["3 4"], "outputs": ["7"]}).cases
        (StdinCase(stdin='3 4', expected='7'),)
    """
    given = _parse_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(given, Mapping):
        raise ValueError(f"ground_truth must be a dict or the JSON text of one, got {given!r:.80}")
    try:
        truth = _GroundTruth.model_validate(_to_lists(dict(given)))
    except ValidationError as error:
        problems = explain(error, _GroundTruth.model_fields).replace("Value error, ", "")
        raise ValueError(f"ground_truth: {problems}") from None
    if truth.fn_name and truth.assert_case is None and truth.language not in (None, "python"):
        raise ValueError(f"ground_truth: fn_name requires the language 'python', got {truth.language!r}")
    return Cases(tuple(_make_cases(truth)), truth.language, truth.timeout)


def _make_cases(truth: _GroundTruth) -> list[Case]:
    inputs, outputs = truth.inputs or [], truth.outputs or []
    if truth.assert_case is not None:
        for name, values in (("inputs", inputs), ("outputs", outputs)):
            for number, value in enumerate(values):
                if value not in (None, ""):
                    raise ValueError(f"ground_truth: {name}[{number}] must be empty for an assert, got {value!r:.80}")
        return [AssertCase(code) for code in truth.assert_case]
    pairs = list(enumerate(zip(inputs, outputs, strict=True)))
    if truth.fn_name:
        return [_call_case(truth.fn_name, given, expected, number) for number, (given, expected) in pairs]
    return [
        StdinCase(_to_text(given, f"inputs[{number}]"), _to_text(expected, f"outputs[{number}]"))
        for number, (given, expected) in pairs
    ]


def _call_case(fn_name: str, given: Any, expected: Any, number: int) -> CallCase:
    position = f"inputs[{number}]"
    if isinstance(given, str):
        lines = [line for line in given.split("\n") if line.strip()]
        given = [_parse_json(line, f"{position}, argument {index}") for index, line in enumerate(lines)]
    if not isinstance(given, list):
        raise ValueError(
            f"{position} must be a list of arguments, or a text with one JSON value per line, got {given!r:.80}"
        )
    alternatives: list[Any] = []
    if isinstance(expected, str):
        text = expected
        try:
            expected = json.loads(text)
            alternatives.append(text)
        except json.JSONDecodeError:
            pass  # the text is the value
        except (ValueError, RecursionError) as error:
            raise ValueError(f"outputs[{number}] cannot be parsed: {error}") from None
    given, expected = _to_json(given, position), _to_json(expected, f"outputs[{number}]")
    if isinstance(expected, list) and len(expected) == 1:
        alternatives.append(expected[0])
    return CallCase(fn_name, tuple(given), expected, tuple(alternatives))


def _to_json(value: Any, position: str) -> Any:
    """Return a value as JSON represents it, with the keys of objects as strings."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{position} is not a JSON value: {error}") from None


def _to_text(value: Any, position: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"ground_truth: {position} must be a string, got {value!r:.80}")
    return value


def _parse_json(text: str, position: str = "ground_truth") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{position} is not valid JSON ({error}): {text!r:.80}") from None


def _to_lists(value: Any) -> Any:
    """Convert tuples and numpy arrays to lists, recursively."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_lists(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _to_lists(item) for name, item in value.items()}
    return value
