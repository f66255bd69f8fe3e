"""Filter expressions: evaluation, errors, and safety for any input."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolroll.viewer.query.expression import ExpressionError, FilterExpression

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
    return FilterExpression(text).matches(SAMPLE.get)


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
def test_true_expressions(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "score > 0.5",
        "group > 1",  # None compared with a number
        "group < 1",
        "output > 3",  # text compared with a number
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
def test_false_or_undefined_expressions_are_false(text: str) -> None:
    assert not holds(text)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("", "empty expression", 0),
        ("score <", "incomplete expression", 7),
        ("score = 1", "use == to compare", 6),
        ("score < 1 && turns > 2", "use and instead of &&", 11),
        ("score < 1 || turns > 2", "use or instead of ||", 11),
        ("(score < 1", "'(' was never closed", 0),
        ("  (score < 1", "'(' was never closed", 2),
        ("lenght(output) > 3", "unknown function lenght()", 0),
        ("__import__('os')", "unknown function __import__()", 0),
        ("len(output, 3)", "len() takes one argument", 0),
        ("output.format(1)", "'output.format(1)' is not supported", 0),
        ("score ** 2 > 1", "'score ** 2' is not supported", 0),
        ("[x for x in rewards]", "'[x for x in rewards]' is not supported", 0),
        ("(lambda: 1)()", "'(lambda: 1)()' is not supported", 0),
        ("output[1:3] == ''", "'output[1:3]' is not supported", 0),
        ("f'{score}' == ''", "is not supported", 0),
        ("score < 1 and {1} == 2", "'{1}' is not supported", 14),
        ("(" * 300 + "1" + ")" * 300, "", 0),
        ("not " * 240 + "1", "nested too deeply", 0),
        ("x" * 2000, "longer than 1000 characters", 1000),
        ("score\0", "", 0),
    ],
)
def test_invalid_expression_reports_message_and_column(text: str, message: str, column: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        FilterExpression(text)
    assert message in str(caught.value)
    if message:
        assert caught.value.column == column


def test_names_contains_used_fields() -> None:
    assert FilterExpression("score < 1 and len(text(line.calls)) > extra['score'] or null == x").names == {
        "score",
        "line",
        "extra",
        "x",
    }


def test_arithmetic_on_text_is_rejected() -> None:
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
def test_any_text_compiles_or_raises_expression_error(text: str, sample: dict[str, object]) -> None:
    try:
        expression = FilterExpression(text)
    except ExpressionError as error:
        column = error.column
    else:
        assert expression.matches(sample.get) in (True, False)
        column = 0
    assert 0 <= column <= max(len(text), 1)
