"""Malformed dumps, and dumps that change while they are displayed."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from toolroll.viewer.app import RolloutViewer
from toolroll.viewer.keys import BROWSE_KEYS
from viewer.driving import viewing
from viewer.dumps import write_toolroll_run

pytestmark = pytest.mark.viewer

EVERY_KEY = [
    name for key in BROWSE_KEYS for name, action in key.actions.items() if action not in ("app.quit", "export")
]


def line(**fields: Any) -> bytes:
    return json.dumps({"input": "user\nhi", "output": "there", "score": 1.0, "step": 1, **fields}).encode() + b"\n"


async def test_empty_directory_shows_first_step_when_written(tmp_path: Path) -> None:
    async with viewing(tmp_path) as user:
        await user.sees("no steps yet", "No dumps in", "They appear here as they are written")
        await user.press(*(key for key in EVERY_KEY if key not in ("f", "slash", "i", "question_mark", "l")))
        write_toolroll_run(tmp_path, steps=[7], groups=1)
        await user.look()
        await user.sees("in 1 step", "sample 4 of 4", "▎ ground truth")  # the keys r and F were pressed above


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
async def test_empty_file_is_explained(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.jsonl").write_bytes(content)
    write_toolroll_run(tmp_path, steps=[2], groups=1)
    async with viewing(tmp_path) as user:
        await user.sees("No samples in step 1", "Its file is empty")
        await user.press("n", "p", "enter", "j", "s", "s", "t", "r", "c", "y", "z", "d", "escape", "escape", "N")
        await user.sees("sample 1 of 4")
        await user.press("N")
        await user.sees("No samples in step 1")


async def test_file_with_non_numeric_name_is_listed(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path, steps=[2, 10], groups=1)
    (tmp_path / "best [of] all.jsonl").write_bytes(line())
    async with viewing(tmp_path) as user:
        assert [step.name for step in user.browse.navigator.steps] == ["2", "10", "best [of] all"]
        await user.press("P")
        await user.sees("step best [of] all", "▎ there", "sample 1 of 1")
        await user.press("l")
        await user.sees("2 steps with samples")


async def test_unreadable_lines_show_problem_and_text(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(
        line()
        + b'{"output": "\xff\xfe"}\n'
        + b"[1, 2]\n"
        + b"not json at all\n"
        + b'{"format": "toolroll/999"}\n'
        + line(output="the end")[:-20]
    )
    async with viewing(tmp_path) as user:
        await user.sees("sample 1 of 6")
        for problem, shown in (
            ("Invalid UTF-8: byte 12 is 0xff", '{"output": "\\xff\\xfe"}'),
            ("Expected a JSON object", "[1, 2]"),
            ("Invalid JSON", "not json at all"),
            ("Unsupported format toolroll/999", "toolroll/999"),
            ("Incomplete line", '{"input": "user'),
        ):
            await user.press("n")
            await user.sees("unreadable line", problem, shown)
        await user.press("t")
        await user.sees("Unreadable line: ")
        await user.press("s", "s", "s", "r", "c", "y", "z", "escape")
        (tmp_path / "1.jsonl").write_bytes((tmp_path / "1.jsonl").read_bytes()[:-1] + line(output="the end")[-21:])
        await user.look()
        await user.sees("▎ the end", "sample 6 of 6")


async def test_five_megabyte_field_stays_responsive(tmp_path: Path) -> None:
    text = "word " * 500_000 + "\x1b[31m" * 50_000 + "x" * 1_500_000 + "é漢字😀 " * 100_000
    (tmp_path / "1.jsonl").write_bytes(line() + line(output=text + "\nneedle") + line())
    async with viewing(tmp_path) as user:
        began = time.process_time()
        await user.press("n")
        await user.sees("sample 2 of 3", "▸ assistant · turn 0")
        await user.press("enter", "G")
        await user.sees("more characters (press z or click to show)")
        await user.press("z", "j", "G", "s", "s")
        await user.press("f")
        await user.type("needle")
        await user.press("enter")
        await user.sees("match 1 of 1 in 1 sample", "│ needle")
        assert time.process_time() - began < 12
        await user.press("escape", "escape", "n")
        await user.sees("sample 3 of 3")


async def test_markup_and_control_characters_are_plain_text(tmp_path: Path) -> None:
    hostile = "[bold red]b[/] [@click=app.quit]x[/] $primary \x1b[2J\x1b]0;owned\x07 \u202eback :smile:"
    call = {"turn": 0, "tool": hostile, "arguments": {hostile: hostile}, "answer": hostile, "metrics": {}}
    sample = {
        "format": "toolroll/1",
        "messages": [{"role": hostile, "content": hostile}, {"role": "assistant", "content": hostile}],
        "calls": [call],
        "turns": [{"turn": 0, "finish": hostile, "weight_version": hostile}],
        "rewards": {"functions": {hostile: 1.0}},
        "request_id": hostile,
        "group": hostile,
        "finish_reason": hostile,
        "error": hostile,
        hostile: hostile,
    }
    (tmp_path / "[red].jsonl").write_bytes(line(**sample) * 2)
    async with viewing(tmp_path) as user:
        seen = []
        for key in ("enter", "z", "s", "s", "t", "r", "c", "escape", "d", "escape", "y", "a", "o"):
            await user.press(key)
            seen.append(user.text)
        await user.press("slash")
        await user.type(hostile)
        seen.append(user.text)
        await user.press("escape", "f")
        await user.type("[bold red]")
        await user.press("enter")
        seen.append(user.text)
        await user.press("escape", "i")
        await user.type(hostile)
        await user.press("enter")
        seen.append(user.text)
        shown = "\n".join(seen)
        assert "[bold red]b[/] [@click=app.quit]x[/]" in shown
        assert "␛[2J␛]0;owned␇" in shown
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
        assert "[red]" in shown


async def test_added_grown_rewritten_and_removed_steps(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path, steps=[1], groups=2)
    async with viewing(tmp_path) as user:
        await user.press("end")
        await user.sees("sample 8 of 8", "in 1 step")
        write_toolroll_run(tmp_path, steps=[2], groups=1)
        await user.look()
        await user.sees("in 2 steps", "sample 8 of 8")
        with (tmp_path / "1.jsonl").open("ab") as file:
            file.write(line(output="a ninth"))
        await user.look()
        await user.sees("sample 8 of 9")
        await user.press("n")
        await user.sees("▎ a ninth")
        (tmp_path / "1.jsonl").write_bytes(line(output="rewritten") + line(output="and smaller"))
        await user.look()
        await user.sees("of 2", "▎ rewritten")
        (tmp_path / "1.jsonl").write_bytes(line(output="the only one"))
        await user.look()
        await user.sees("sample 1 of 1", "▎ the only one")
        (tmp_path / "1.jsonl").unlink()
        await user.look()
        await user.sees("in 1 step", "sample 1 of 4")
        shutil.rmtree(tmp_path)
        await user.look()
        await user.sees("No dumps in")


async def test_directory_is_polled(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path, steps=[1], groups=1)
    async with viewing(tmp_path, refresh_interval_s=0.05, follow=True) as user:
        await user.sees("sample 4 of 4", "following")
        write_toolroll_run(tmp_path, steps=[2], groups=1, samples=2)
        await user.sees("in 2 steps", "sample 2 of 2", "following")


async def test_search_includes_added_samples(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(line(output="needle"))
    async with viewing(tmp_path) as user:
        await user.press("f")
        await user.type("needle")
        await user.press("enter")
        await user.sees("match 1 of 1")
        with (tmp_path / "1.jsonl").open("ab") as file:
            file.write(line(output="needle needle"))
        await user.look()
        await user.sees("match 1 of 3 in 2 samples")
        (tmp_path / "2.jsonl").write_bytes(line(output="needle"))
        await user.look()
        await user.sees("match 1 of 4 in 3 samples")


async def test_single_file_is_displayed(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path, steps=[1, 2], groups=1)
    async with viewing(tmp_path / "2.jsonl") as user:
        await user.sees("in 1 step", "sample 1 of 4")


def test_files_of_several_writers_form_one_step(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path / "rank-0", steps=[1], groups=1)
    write_toolroll_run(tmp_path / "rank-1", steps=[1], groups=1)
    viewer = RolloutViewer(tmp_path)
    steps = viewer._browse.navigator.steps
    steps[0].index()
    assert [(step.name, len(step)) for step in steps] == [("1", 8)]
