"""Filters: what one can say with them, and that nothing one types does any harm."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolroll.viewer.expression import Expression, ExpressionError

SAMPLE = {
    "score": 0.25,
    "turns": 3,
    "finish_reason": "stop",
    "output": "Traceback (most recent call last)",
    "rewards": {"total": None, "by turn": [0.0, -0.05]},
    "group": None,
    "acc": True,
}


def holds(text: str) -> bool:
    return Expression(text).matches(SAMPLE.get)


@pytest.mark.parametrize(
    "text",
    [
        "score < 0.5",
        "0 < score <= 0.25",
        "score == 0.25 and finish_reason == 'stop'",
        "not (score > 1 or turns > 5)",
        "'Traceback' in output",
        "'traceback' in lower(output)",
        "'Traceback' not in finish_reason",
        "finish_reason in ['stop', 'length']",
        "rewards.total == None",
        "rewards.total is null",
        "rewards['by turn'][1] < 0",
        "rewards['by turn'][-1] == -0.05",
        "turns * 2 + 1 == 7",
        "turns // 2 == 1 and turns % 2 == 1 and turns / 2 > 1",
        "abs(rewards['by turn'][1]) > 0",
        "len(output) > 10",
        "'total' in rewards",
        "'-0.05' in text(rewards)",
        "acc == true and acc",
        "group != 'x'",
        "  score < 1  ",
    ],
)
def test_what_holds(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "score > 0.5",
        "group > 1",  # None with a number
        "group < 1",
        "output > 3",  # a text with a number
        "missing > 0",
        "missing.deeper['x'][0] == 1",
        "missing + 1 > 0",
        "score / 0 > 1",
        "'x' in missing",
        "'x' in turns",
        "-output > 0",
        "abs(output) > 0 or len(turns) > 0 or lower(turns) == ''",
        "rewards['by turn'][7] == 0",
    ],
)
def test_what_does_not_hold_and_is_no_error_either(text: str) -> None:
    assert not holds(text)


@pytest.mark.parametrize(
    ("text", "said", "column"),
    [
        ("", "nothing to filter by", 0),
        ("score <", "unfinished", 7),
        ("score = 1", "write == to compare", 6),
        ("score < 1 && turns > 2", "write and for &&", 11),
        ("score < 1 || turns > 2", "write or for ||", 11),
        ("(score < 1", "'(' was never closed", 0),
        ("  (score < 1", "'(' was never closed", 2),
        ("lenght(output) > 3", "there is no function lenght()", 0),
        ("__import__('os')", "there is no function __import__()", 0),
        ("len(output, 3)", "len() takes one value", 0),
        ("output.format(1)", "this call can't be used here", 0),
        ("score ** 2 > 1", "the operator Pow can't be used here", 0),
        ("[x for x in rewards]", "ListComp can't be used here", 0),
        ("(lambda: 1)()", "this call can't be used here", 0),
        ("output[1:3] == ''", "a slice can't be used here", 0),
        ("f'{score}' == ''", "an f-string can't be used here", 0),
        ("score < 1 and {1} == 2", "a set", 14),
        ("(" * 300 + "1" + ")" * 300, "", 0),
        ("not " * 240 + "1", "nested too deeply", 0),
        ("x" * 2000, "longer than 1000 characters", 1000),
        ("score\0", "", 0),
    ],
)
def test_what_is_refused_is_said_with_its_place(text: str, said: str, column: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        Expression(text)
    assert said in str(caught.value)
    if said:
        assert caught.value.column == column


def test_names_are_those_of_fields() -> None:
    assert Expression("score < 1 and len(text(line.calls)) > extra['score'] or null == x").names == {
        "score",
        "line",
        "extra",
        "x",
    }


def test_nothing_grows_beyond_what_it_was_made_of() -> None:
    for text in ("'a' * 1000000000 == 'b'", "'%999999999d' % 1 == ''", "[0] * 999999999 == 1", "output + output == 1"):
        assert not holds(text)


WORDS = st.sampled_from(
    [
        "score",
        "output",
        "rewards",
        "(",
        ")",
        "[",
        "]",
        "<",
        "==",
        "in",
        "not",
        "and",
        "or",
        ".",
        ",",
        "1",
        "-0.5",
        "'a'",
        "len(",
        "text(",
        "None",
        "null",
        "*",
        "/",
        "%",
        "is",
        "if",
        "else",
        "lambda",
        ":",
        "{",
        "}",
        "=",
        "\\",
        "\n",
    ]
)
TYPED = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=14).map(" ".join))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(TYPED, st.dictionaries(st.sampled_from(["score", "output", "rewards"]), JSON))
@example("score == output", {"score": [[]], "output": [[]]})
def test_any_text_is_a_filter_or_is_refused_and_no_sample_breaks_a_filter(text: str, sample: dict[str, object]) -> None:
    try:
        expression = Expression(text)
    except ExpressionError as error:
        column = error.column
    else:
        assert expression.matches(sample.get) in (True, False)
        column = 0
    assert 0 <= column <= max(len(text), 1)
