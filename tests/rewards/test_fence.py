"""The program is found in a model's answer, whatever the answer looks like."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rewards.fence import last_block, unfence

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
def test_a_fence_around_the_whole_text_is_removed(fenced: str) -> None:
    assert unfence(fenced) == CODE


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
def test_anything_else_is_returned_as_it_is(text: str) -> None:
    assert unfence(text) == text


def test_the_last_closed_block_of_the_language_is_the_program() -> None:
    answer = f"First\n```python\nold\n```\nbetter:\n```python\n{CODE}\n```\nRun it:\n```bash\npython main.py\n```\n"
    assert last_block(answer, "python") == CODE


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
def test_usual_names_of_a_language(language: str, tag: str) -> None:
    assert last_block(f"```{tag}\nright\n```\n```\nother\n```", language) == "right"


def test_without_a_block_of_the_language_it_is_the_last_closed_one() -> None:
    assert last_block("```\none\n```\n```text\ntwo\n```\n```\ncut", "python") == "two"


def test_an_answer_cut_short() -> None:
    assert last_block("I think:\n```python\nprint(1)\nprint(", "python") == "print(1)\nprint("


def test_without_a_fence_it_is_the_whole_text() -> None:
    assert last_block("print(1)\n", "python") == "print(1)\n"
    assert last_block("", "python") == ""


def test_fences_behind_and_before_tags_of_the_answer() -> None:
    assert last_block(f"<answer>```python\n{CODE}\n```</answer>", "python") == CODE
    assert last_block(f"<answer>```\n{CODE}\n```</answer>", "python") == CODE


def test_a_block_in_a_list_loses_its_indent() -> None:
    assert last_block("1. So:\n\n   ```python\n   if x:\n       y()\n   ```\n", "python") == "if x:\n    y()"


def test_a_fence_in_a_docstring_is_code() -> None:
    code = 'def f():\n    """As in:\n\n    ```python\n    f()\n    ```\n    """\n    return 1'
    assert last_block(f"```python\n{code}\n```", "python") == code


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert last_block("````python\na\n```\nb\n```\n````", "python") == "a\n```\nb\n```"


def test_a_block_that_was_never_closed_ends_where_the_next_begins() -> None:
    assert last_block(f"```python\nold\n\nNo, wait:\n```python\n{CODE}\n```", "python") == CODE


def test_inline_code_is_no_fence() -> None:
    assert last_block(f"Use ```x``` and ``` y ``` here.\n```python\n{CODE}\n```", "python") == CODE


PIECES = st.sampled_from(
    ["```", "````", "~~~", "`", "~", "python", "c++", " ", "    ", "\n", "\r\n", "\t", "x", "é", "\0"]
)
TEXTS = st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=60)


@given(TEXTS)
def test_any_text_has_a_program(text: str) -> None:
    """Nothing is made up: each line of it is a line of the text, or the end of one that was indented."""
    lines = [line.rstrip() for line in text.split("\n")]
    for program in (last_block(text, "python"), unfence(text)):
        assert program == "" or all(any(line.endswith(part.rstrip()) for line in lines) for part in program.split("\n"))


@given(st.text(alphabet="abc \t\n(){}=\"'#", max_size=80), st.text(alphabet="Some words.\n", max_size=30))
def test_code_comes_out_as_it_went_in(code: str, prose: str) -> None:
    assert last_block(f"{prose}\n```python\n{code}\n```\n{prose}", "python") == code
    assert unfence(f"```python\n{code}\n```") == code


@pytest.mark.parametrize(
    "piece", ["`", "```", "``` ", "```\n", "```a\n", "~~~\n", " ", "\n", "    ```x\n", "`` `", "a```"]
)
def test_time_is_in_proportion_to_the_text(piece: str) -> None:
    text = piece * (500_000 // len(piece))
    began = time.process_time()
    last_block(text, "python")
    unfence(text)
    assert time.process_time() - began < 20  # a search that goes back would take hours
