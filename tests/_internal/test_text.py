"""Text is made encodable, and shortened to a given length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll._internal.text import (
    replace_lone_surrogates,
    replace_lone_surrogates_in_json,
    shorten,
    shorten_middle,
)

TEXTS = st.text(st.characters(blacklist_categories=[])) | st.text("a😀\ud800\udbff\udc00\udfff")


@given(TEXTS)
def test_any_text_becomes_encodable(text: str) -> None:
    replaced = replace_lone_surrogates(text)
    replaced.encode()
    assert replaced == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udfff\ud800", "\ufffd\ufffd"),
        ("\ud83d\ude00\ud83d", "😀\ufffd"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
    ],
)
def test_only_lone_surrogates_are_replaced(text: str, expected: str) -> None:
    assert replace_lone_surrogates(text) == expected


def test_json_value_is_replaced_throughout() -> None:
    value = {"\ud800": ["\udfff", 1, None, {"a": True, "b": "\ud83d\ude00"}]}
    assert replace_lone_surrogates_in_json(value) == {"\ufffd": ["\ufffd", 1, None, {"a": True, "b": "😀"}]}


@given(st.text(max_size=30), st.integers(3, 30))
def test_shortened_text_has_the_given_length(text: str, max_chars: int) -> None:
    for short in (shorten(text, max_chars), shorten_middle(text, max_chars)):
        assert short == text if len(text) <= max_chars else len(short) == max_chars


def test_shortened_text_keeps_the_wanted_part() -> None:
    assert shorten("abcdefghij", 5) == "abcd…"
    assert shorten_middle("abcdefghij", 5) == "ab…ij"
    assert shorten_middle("abcdefghij", 5, head_chars=1) == "a…hij"
    assert shorten_middle("abcdefghij", 5, head_chars=0) == "…ghij"
