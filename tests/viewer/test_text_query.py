"""Text queries, and their test on raw lines, which has no false negatives."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll._internal.sanitize import sanitize
from toolroll.viewer.documents.document import TextQuery


def test_lower_case_query_ignores_case() -> None:
    text = "Error: ERROR, an error. ÜBER über"
    assert TextQuery("error").count(text) == 3
    assert TextQuery("Error").count(text) == 1
    assert TextQuery("über").count(text) == 2
    assert list(TextQuery("error").find(text)) == [(0, 5), (7, 12), (17, 22)]
    assert TextQuery(".").count("a.b.c") == 2  # not a regular expression


def test_empty_query_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        TextQuery("")


TEXTS = st.text(st.sampled_from('abkKſsSiIİıßé漢字😀"\\/\n _1.'), max_size=20)


@given(TEXTS, TEXTS, TEXTS.filter(bool), st.booleans())
def test_matching_line_is_never_skipped(before: str, after: str, text: str, in_any_case: bool) -> None:
    held = before + (text.upper() if in_any_case else text) + after
    query = TextQuery(sanitize(text))
    if query.count(sanitize(held)):
        fields = {"output": held, "inner": [held]}
        assert query.may_match_line(orjson.dumps(fields))
        assert query.may_match_line(json.dumps(fields).encode())
        assert query.may_match_line(json.dumps(fields, ensure_ascii=False).encode())


def test_most_other_lines_are_skipped() -> None:
    line = orjson.dumps({"output": "nothing of the kind, and nothing 漢 either"})
    assert not TextQuery("trace").may_match_line(line)
    assert not TextQuery("Traceback (most recent").may_match_line(line)
    assert not TextQuery("字").may_match_line(line)
    assert TextQuery("漢").may_match_line(line)
