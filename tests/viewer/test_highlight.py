"""Programs in colours."""

import time

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.highlight import runs


def styled(text: str, language: str | None = None) -> dict[str, str]:
    return {text[start:end]: style for start, end, style in runs(text, language)}


def test_a_program_and_a_program_in_a_fence() -> None:
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


def test_json_and_what_is_no_language() -> None:
    assert styled('{"a": 1}', "json")["1"] == "number"
    assert runs("whatever", "no such language") == []


@given(st.text(st.sampled_from("ab `~\n<>|'\"#(){}=1"), max_size=80), st.sampled_from([None, "python", "json", "bash"]))
def test_runs_are_in_order_and_inside_the_text(text: str, language: str | None) -> None:
    end_before = 0
    for start, end, style in runs(text, language):
        assert end_before <= start < end <= len(text)
        assert style
        end_before = end


def test_a_text_that_is_too_long_is_left_plain_at_once() -> None:
    began = time.process_time()
    assert runs("```\n" * 500_000, None) == []
    assert time.process_time() - began < 1
