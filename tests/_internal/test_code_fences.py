"""The program is found in any answer of a model."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll._internal.code_fences import extract_program, strip_code_fence

CODE = "def f(x):\n    return x"


@pytest.mark.parametrize(
    "fenced",
    [
        f"```python\n{CODE}\n```",
        f"```\n{CODE}\n```",
        f"~~~py\n{CODE}\n~~~",
        f"````python title=x\n{CODE}\n````",
        f"  \n```python\n{CODE}\n```\n\n",
        f"```python\n{CODE}",
        f"```python\r\n{CODE}\n```\r\n",
    ],
)
def test_fence_around_the_whole_text_is_removed(fenced: str) -> None:
    assert strip_code_fence(fenced) == CODE


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        "",
        "  x = 1\n",
        f"Here it is:\n```python\n{CODE}\n```",
        f"```python\n{CODE}\n```\nThat was it.",
        f"```python\n{CODE}\n```\n```python\n{CODE}\n```",
        "x = '''\n```\ncode\n```\n'''",
        "```print(1)```",
    ],
)
def test_other_text_is_returned_unchanged(text: str) -> None:
    assert strip_code_fence(text) == text


def test_last_closed_block_of_the_language_is_the_program() -> None:
    answer = f"First\n```python\nold\n```\nbetter:\n```python\n{CODE}\n```\nRun it:\n```bash\npython main.py\n```\n"
    assert extract_program(answer, "python") == CODE


@pytest.mark.parametrize(
    ("language", "tag"),
    [
        ("python", "py"),
        ("python", "Python3"),
        ("cpp", "c++"),
        ("cpp", "cc"),
        ("nodejs", "javascript"),
        ("nodejs", "js"),
        ("bash", "sh"),
        ("bash", "shell"),
        ("go", "golang"),
        ("rust", "rs"),
        ("typescript", "ts"),
        ("csharp", "c#"),
        ("c++", "cpp"),
        ("lua", "lua"),
    ],
)
def test_tag_may_be_an_alias_of_the_language(language: str, tag: str) -> None:
    assert extract_program(f"```{tag}\nright\n```\n```\nother\n```", language) == "right"


def test_last_closed_block_if_none_has_the_language() -> None:
    assert extract_program("```\none\n```\n```text\ntwo\n```\n```\ncut", "python") == "two"


def test_unclosed_block_of_a_truncated_answer() -> None:
    assert extract_program("I think:\n```python\nprint(1)\nprint(", "python") == "print(1)\nprint("


def test_answer_without_a_fence_is_the_program() -> None:
    assert extract_program("print(1)\n", "python") == "print(1)\n"
    assert extract_program("", "python") == ""


def test_fences_next_to_answer_tags() -> None:
    assert extract_program(f"<answer>```python\n{CODE}\n```</answer>", "python") == CODE
    assert extract_program(f"<answer>```\n{CODE}\n```</answer>", "python") == CODE


def test_indentation_of_the_fence_is_removed() -> None:
    assert extract_program("1. So:\n\n   ```python\n   if x:\n       y()\n   ```\n", "python") == "if x:\n    y()"


def test_fence_in_a_docstring_is_code() -> None:
    code = 'def f():\n    """As in:\n\n    ```python\n    f()\n    ```\n    """\n    return 1'
    assert extract_program(f"```python\n{code}\n```", "python") == code


def test_longer_fence_encloses_a_shorter_one() -> None:
    assert extract_program("````python\na\n```\nb\n```\n````", "python") == "a\n```\nb\n```"


def test_unclosed_block_ends_at_the_next_tagged_fence() -> None:
    assert extract_program(f"```python\nold\n\nNo, wait:\n```python\n{CODE}\n```", "python") == CODE


def test_inline_code_is_not_a_fence() -> None:
    assert extract_program(f"Use ```x``` and ``` y ``` here.\n```python\n{CODE}\n```", "python") == CODE


PIECES = st.sampled_from(
    ["```", "````", "~~~", "`", "~", "python", "c++", " ", "    ", "\n", "\r\n", "\t", "x", "é", "\0"]
)
TEXTS = st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=60)


@given(TEXTS)
def test_program_consists_of_lines_of_the_text(text: str) -> None:
    """Each line of the program is a line of the text, or the end of an indented one."""
    lines = [line.rstrip() for line in text.split("\n")]
    for program in (extract_program(text, "python"), strip_code_fence(text)):
        assert program == "" or all(any(line.endswith(part.rstrip()) for line in lines) for part in program.split("\n"))


@given(st.text(alphabet="abc \t\n(){}=\"'#", max_size=80), st.text(alphabet="Some words.\n", max_size=30))
def test_fenced_code_is_returned_unchanged(code: str, prose: str) -> None:
    assert extract_program(f"{prose}\n```python\n{code}\n```\n{prose}", "python") == code
    assert strip_code_fence(f"```python\n{code}\n```") == code


@pytest.mark.parametrize(
    "piece", ["`", "```", "``` ", "```\n", "```a\n", "~~~\n", " ", "\n", "    ```x\n", "`` `", "a```"]
)
def test_time_is_linear_in_the_text(piece: str) -> None:
    text = piece * (500_000 // len(piece))
    started = time.process_time()
    extract_program(text, "python")
    strip_code_fence(text)
    assert time.process_time() - started < 20  # a backtracking search would take hours
