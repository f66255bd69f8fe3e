"""GSM8K answers are scored by the rules of the original design, without its bugs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rewards.gsm8k import compute_score, extract_solution


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("So it is #### 72", "72"),
        ("#### 5 then #### 72", "72"),
        ("#### $72", "72"),
        ("#### -$72", "-72"),
        ("#### $-72", "-72"),
        ("#### 1,000", "1000"),
        ("#### 72.0", "72"),
        ("#### 72.50.", "72.5"),
        ("#### 72.", "72"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### -0", "0"),
        ("#### 1,234,567.00 dollars", "1234567"),
        ("#### 1,2,3", "1"),
        ("####72", None),
        ("#### ,", None),
        ("#### seventy-two", None),
        ("72", None),
        ("", None),
    ],
)
def test_strict_takes_number_after_the_marker(solution: str, answer: str | None) -> None:
    assert extract_solution(solution, "strict") == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("3 and 4 make 7", "7"),
        ("She pays $1,000.", "1000"),
        ("It is 72, I think, .", "72"),
        ("-5", "-5"),
        ("pick 1,2", "2"),
        (",", None),
        (".", None),
        ("$", None),
        ("none", None),
    ],
)
def test_flexible_takes_the_last_number(solution: str, answer: str | None) -> None:
    assert extract_solution(solution, "flexible") == answer


def test_only_last_300_characters_are_searched() -> None:
    assert extract_solution("#### 72" + " " * 293) == "72"
    assert extract_solution("#### 72" + " " * 294) is None
    assert extract_solution("12345" + " " * 298, "flexible") is None
    assert extract_solution("7 12345" + " " * 295, "flexible") == "12345"


def test_correct_wrong_and_missing_answers() -> None:
    assert compute_score("#### 72", "72") == 1.0
    assert compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert compute_score("no idea", "72", format_score=0.1) == 0.0
    assert compute_score("#### 1,000", "1000", score=2.0) == 2.0
    assert compute_score("#### 1000", "1,000") == 1.0
    assert compute_score("#### 72", 72) == 1.0
    assert compute_score("#### 72", 72.0) == 1.0
    assert compute_score("#### 72", "She has 70 + 2 = <<70+2=72>>72. #### 72") == 1.0
    assert compute_score("#### 10000000000000000000000", 1e22) == 1.0
    assert compute_score("72", "72") == 0.0, "strict is the default"


@pytest.mark.parametrize("truth", ["", "seventy-two", "72 apples", None, ["72"], float("nan")])
def test_non_numeric_ground_truth_is_rejected(truth: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        compute_score("#### 72", truth)


def test_unknown_method_is_rejected() -> None:
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        extract_solution("#### 72", "lenient")  # type: ignore[arg-type]


@given(
    st.integers(), st.sampled_from(["{}", "{:,}", "${:,}", "{}.00", "{}."]), st.text(alphabet="abc #\n", max_size=50)
)
def test_notation_of_a_number_does_not_matter(number: int, form: str, before: str) -> None:
    written = form.format(number)
    assert compute_score(f"{before}#### {written}", str(number)) == 1.0
    assert compute_score(f"{before} {written}", str(number), method="flexible") == 1.0
    assert compute_score(f"{before}#### {written}", str(number + 1)) == 0.0


@given(st.text(alphabet="0123456789.,$-# ab", max_size=400))
def test_any_text_gets_a_score(text: str) -> None:
    for method in ("strict", "flexible"):
        answer = extract_solution(text, method)
        assert answer is None or float(answer) is not None
        assert compute_score(text, answer or "1", method) == (0.0 if answer is None else 1.0)
