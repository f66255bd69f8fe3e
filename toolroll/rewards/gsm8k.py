"""The score of an answer to a GSM8K question.

Two ways to find the answer in the last 300 characters of a solution: `strict` takes what follows the last `#### `,
`flexible` the last number of all. Numbers are compared as numbers: thousands separators, a dollar sign, trailing zeros
and a full stop at the end make no difference (`1,000` is 1000, `#### $72` is 72, `72.0` is 72). What holds no digit,
such as a lone `,`, is no answer.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Method = Literal["strict", "flexible"]

LOOKED_AT = 300
"""How many characters at the end of a solution are searched.

The answer stands at the end, and a search through a long text is slow.
"""

_NUMBER = r"-?\$?-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(r"#### (" + _NUMBER + ")")
_PART_OF_NUMBER = re.compile(r"[0-9.,$-]*")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The answer as a plain number (`"-1234.5"`), or None where there is none.

    >>> extract_solution("So she pays #### $1,250.00")
    '1250'
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}; it must be 'strict' or 'flexible'.")
    found = (_MARKED if method == "strict" else _ANYWHERE).findall(_end_of(solution_str))
    return _plain(found[-1]) if found else None


def compute_score(
    solution_str: str,
    ground_truth: str | float,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 where there is none.

    >>> compute_score("It is #### 72", "72")
    1.0
    """
    truth = parse_ground_truth(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == truth else format_score


def parse_ground_truth(ground_truth: str | float) -> str:
    """The true answer as a plain number. It may be written as the data set writes it, behind the solution and `#### `.

    Raises ValueError where it is no number: to score everything as wrong would teach the model nonsense.
    """
    written = ground_truth if isinstance(ground_truth, str) else _decimals(ground_truth)
    found = _ANYWHERE.fullmatch(written.rpartition("####")[2].strip().rstrip("."))
    if found is None:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is no number")
    return _plain(found[0])


def _decimals(number: object) -> str:
    """1e22 as 10000000000000000000000; what is no number as it is."""
    try:
        return format(Decimal(str(number)), "f")
    except InvalidOperation:
        return str(number)


def _end_of(text: str) -> str:
    """The part that is searched, without the rest of a number that the cut went through."""
    if len(text) <= LOOKED_AT:
        return text
    end = text[-LOOKED_AT:]
    cut_through = text[-LOOKED_AT - 1] in "0123456789.,$-"
    return _PART_OF_NUMBER.sub("", end, count=1) if cut_through else end


def _plain(written: str) -> str:
    """A number without what makes no difference to its value. As text, because a number here may have any length."""
    whole, _, fraction = re.sub(r"[$,-]", "", written).partition(".")
    plain = (whole.lstrip("0") or "0") + f".{fraction}".rstrip("0").rstrip(".")
    return f"-{plain}" if "-" in written and plain != "0" else plain
