"""Score answers to GSM8K questions.

The answer is searched in the last 300 characters of a solution: `strict` takes the number after the last `#### `,
`flexible` takes the last number. Numbers are compared by value: thousands separators, a dollar sign, trailing zeros and
a final period do not matter (`1,000` is 1000, `#### $72` is 72, `72.0` is 72). Text without a digit is not an answer.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Method = Literal["strict", "flexible"]

SEARCHED_CHARS = 300
"""Number of characters at the end of a solution that are searched, because searching a long text is slow."""

_NUMBER_PATTERN = r"-?\$?-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_ANY_NUMBER = re.compile(_NUMBER_PATTERN)
_MARKED_NUMBER = re.compile(r"#### (" + _NUMBER_PATTERN + ")")
_PART_OF_NUMBER_OR_CHAR = re.compile(r"[0-9.,$-]+|.", re.DOTALL)


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Extract the answer from a solution.

    Args:
        solution_str: Text of the solution.
        method: "strict" for the number after the last `#### `, "flexible" for the last number.

    Returns:
        The answer as a plain number such as "-1234.5", or None if the solution contains no answer.

    Raises:
        ValueError: If the method is unknown.

    Example:
        >>> extract_solution("So she pays #### $1,250.00")
        '1250'
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"Unknown method {method!r}. Expected 'strict' or 'flexible'.")
    found = (_MARKED_NUMBER if method == "strict" else _ANY_NUMBER).findall(_searched_part(solution_str))
    return _normalize(found[-1]) if found else None


def compute_score(
    solution_str: str,
    ground_truth: str | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Compare the answer in a solution with the ground truth.

    Args:
        solution_str: Text of the solution.
        ground_truth: The correct answer; see `parse_ground_truth`.
        method: How to find the answer; see `extract_solution`.
        format_score: Score of a wrong answer.
        score: Score of the correct answer.

    Returns:
        `score`, `format_score`, or 0 if the solution contains no answer.

    Raises:
        ValueError: If the ground truth is not a number.

    Example:
        >>> compute_score("It is #### 72", "72")
        1.0
    """
    truth = parse_ground_truth(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == truth else format_score


def parse_ground_truth(ground_truth: str | float) -> str:
    """Return the correct answer as a plain number.

    Args:
        ground_truth: A number, or a text as in the data set, where the number follows the solution and `#### `.

    Raises:
        ValueError: If it is not a number. Scoring every answer as wrong instead would mislead the model.
    """
    try:
        text = ground_truth if isinstance(ground_truth, str) else format(Decimal(str(ground_truth)), "f")  # no exponent
    except InvalidOperation:
        text = ""
    found = _ANY_NUMBER.fullmatch(text.rpartition("####")[2].strip().rstrip("."))
    if found is None:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is not a number")
    return _normalize(found[0])


def _searched_part(text: str) -> str:
    """Return the end of the text. A number that starts before it is skipped."""
    if len(text) <= SEARCHED_CHARS:
        return text
    # The character before the end is removed, together with the part of a number that starts with it.
    return _PART_OF_NUMBER_OR_CHAR.sub("", text[-SEARCHED_CHARS - 1 :], count=1)


def _normalize(number: str) -> str:
    """Remove everything that does not affect the value. The result is text, because a number may have any length."""
    whole, _, fraction = re.sub(r"[$,-]", "", number).partition(".")
    plain = (whole.lstrip("0") or "0") + f".{fraction}".rstrip("0").rstrip(".")
    return f"-{plain}" if "-" in number and plain != "0" else plain
