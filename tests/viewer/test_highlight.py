"""Syntax highlighting."""

import time

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.documents.highlight import highlight


def styled(text: str, language: str | None = None) -> dict[str, str]:
    return {text[start:end]: style for start, end, style in highlight(text, language)}


def test_code_and_fenced_code_are_highlighted() -> None:
    program = styled("def f(): return 1  # one", "python")
    assert (program["def"], program["f"], program["1"], program["# one"]) == (
        "keyword",
        "function",
        "number",
        "comment",
    )
    fenced = styled("Look:\n```python\nprint('x')\n```\nand <think>so</think>")
    assert fenced["print"] == "builtin"
    assert fenced["<think>"] == "tag"
    assert fenced["```python\n"] == "fence"


def test_json_and_unknown_language() -> None:
    assert styled('{"a": 1}', "json")["1"] == "number"
    assert highlight("whatever", "no such language") == []


@given(st.text(st.sampled_from("ab `~\n<>|'\"#(){}=1"), max_size=80), st.sampled_from([None, "python", "json", "bash"]))
def test_ranges_are_ordered_and_within_text(text: str, language: str | None) -> None:
    end_before = 0
    for start, end, style in highlight(text, language):
        assert end_before <= start < end <= len(text)
        assert style
        end_before = end


def test_too_long_text_is_not_highlighted() -> None:
    began = time.process_time()
    assert highlight("```\n" * 500_000, None) == []
    assert time.process_time() - began < 1
