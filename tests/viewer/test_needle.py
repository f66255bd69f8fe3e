"""What is searched for is found, and the quick look at a line never overlooks it."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.harmless import harmless
from toolroll.viewer.needle import Needle


def test_small_letters_find_both_and_capitals_only_themselves() -> None:
    text = "Error: ERROR, an error. ÜBER über"
    assert Needle("error").count(text) == 3
    assert Needle("Error").count(text) == 1
    assert Needle("über").count(text) == 2
    assert list(Needle("error").find(text)) == [(0, 5), (7, 12), (17, 22)]
    assert Needle(".").count("a.b.c") == 2  # no regular expression


def test_a_needle_is_not_empty() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        Needle("")


TEXTS = st.text(st.sampled_from('abkKſsSiIİıßé漢字😀"\\/\n _1.'), max_size=20)


@given(TEXTS, TEXTS, TEXTS.filter(bool), st.booleans())
def test_a_line_that_has_it_is_never_passed_over(before: str, after: str, text: str, in_any_case: bool) -> None:
    held = before + (text.upper() if in_any_case else text) + after
    needle = Needle(harmless(text))
    if needle.count(harmless(held)):
        fields = {"output": held, "inner": [held]}
        assert needle.may_be_in(orjson.dumps(fields))
        assert needle.may_be_in(json.dumps(fields).encode())
        assert needle.may_be_in(json.dumps(fields, ensure_ascii=False).encode())


def test_most_lines_are_passed_over_without_being_parsed() -> None:
    line = orjson.dumps({"output": "nothing of the kind, and nothing 漢 either"})
    assert not Needle("trace").may_be_in(line)
    assert not Needle("Traceback (most recent").may_be_in(line)
    assert not Needle("字").may_be_in(line)
    assert Needle("漢").may_be_in(line)
