"""Markdown export: complete, and safe against text that breaks out of its fences."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from toolroll.records.index import DumpDirectory, StepFile
from toolroll.records.record import Record
from toolroll.viewer.export import code_block, export_file_name, inline_code, markdown, unused_path
from toolroll.viewer.query.scan import SamplePosition
from viewer.dumps import write_toolroll_run


def test_markdown_of_sample(tmp_path: Path) -> None:
    step = DumpDirectory(write_toolroll_run(tmp_path, steps=[1])).steps[0]
    step.index()
    text = markdown(step.record(2), "step 1, sample 3")
    assert text.startswith("# `step 1, sample 3`\n\n| field | value |\n")
    for part in (
        "## `user`",
        "### `call code_interpreter`",
        "```python\nshelf = 48",
        "### `policy fault` (",
    ):
        assert part in text
    assert "\u00a0" not in text


@given(st.text(st.sampled_from("a`\n~ "), max_size=40))
def test_text_cannot_close_its_fence(text: str) -> None:
    lines = code_block(text).split("\n")
    fence = lines[0].removesuffix("text")
    assert set(fence) == {"`"}
    assert lines[-1] == fence
    assert all(not line.strip(" ").startswith(fence) for line in lines[1:-1])
    inline = inline_code(text)
    mark = inline[: len(inline) - len(inline.lstrip("`"))] if text.strip("`") else ""
    assert not mark or mark not in inline[len(mark) : -len(mark)]


def test_hostile_sample_stays_text() -> None:
    line = {"input": "user\nx", "output": "```\n# not a heading\n<script>", "request_id": "a|b`c\n", "score": 1}
    text = markdown(Record.parse(json.dumps(line).encode()), "`t`")
    assert "````text\n```\n# not a heading\n<script>\n````" in text
    assert "| request ID | ``" in text


def test_export_path_is_valid_and_unused(tmp_path: Path) -> None:
    name = export_file_name(SamplePosition(StepFile("../we ird\n", None), 4))
    assert name == "step-.._we_ird_-sample-5.md"
    first = unused_path(tmp_path, name)
    first.touch()
    second = unused_path(tmp_path, name)
    assert (first.name, second.name) == (name, "step-.._we_ird_-sample-5-2.md")
