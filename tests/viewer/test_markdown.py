"""A sample as Markdown: whole, and unable to break out of its fences."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from toolroll.records.index import Shelf, StepFile
from toolroll.records.record import Record
from toolroll.viewer.export import file_name, free_path
from toolroll.viewer.listing import Place
from toolroll.viewer.markdown import code, fenced, markdown
from viewer.dumps import ours


def test_a_sample(tmp_path: Path) -> None:
    step = Shelf(ours(tmp_path, steps=[1])).steps[0]
    step.index()
    made = markdown(step.record(2), "step 1, sample 3")
    assert made.startswith("# `step 1, sample 3`\n\n| | |\n")
    for part in (
        "## `user`",
        "### `calls code_interpreter`",
        "```python\nshelf = 48",
        "### `failed, the model's fault` (",
    ):
        assert part in made
    assert "\u00a0" not in made


@given(st.text(st.sampled_from("a`\n~ "), max_size=40))
def test_nothing_gets_out_of_a_fence(text: str) -> None:
    lines = fenced(text).split("\n")
    fence = lines[0].removesuffix("text")
    assert set(fence) == {"`"}
    assert lines[-1] == fence
    assert all(not line.strip(" ").startswith(fence) for line in lines[1:-1])
    inline = code(text)
    mark = inline[: len(inline) - len(inline.lstrip("`"))] if text.strip("`") else ""
    assert not mark or mark not in inline[len(mark) : -len(mark)]


def test_a_hostile_sample_stays_text() -> None:
    line = {"input": "user\nx", "output": "```\n# not a heading\n<script>", "request_id": "a|b`c\n", "score": 1}
    made = markdown(Record.parse(json.dumps(line).encode()), "`t`")
    assert "````text\n```\n# not a heading\n<script>\n````" in made
    assert "| request id | ``" in made


def test_nothing_is_overwritten_and_any_name_is_a_file_name(tmp_path: Path) -> None:
    name = file_name(Place(StepFile("../we ird\n", None), 4))
    assert name == "step-.._we_ird_-sample-5.md"
    first = free_path(tmp_path, name)
    first.touch()
    second = free_path(tmp_path, name)
    assert (first.name, second.name) == (name, "step-.._we_ird_-sample-5-2.md")
