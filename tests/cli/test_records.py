"""The `toolroll records` command."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from collector import Collector, attributes
from record_samples import trajectory, verl_line, write_verl
from typer.testing import CliRunner

from toolroll.cli.app import app
from toolroll.records.writer import RecordWriter


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Write three steps of toolroll, one of verl, and an incomplete line."""
    folder = tmp_path / "dumps"
    with RecordWriter(folder) as writer:
        for number in range(30):
            writer.append(trajectory(number, score=number % 2), 8 + number // 10)
    write_verl(folder / "100.jsonl", [verl_line(100, score=-0.25)])
    with (folder / "9.jsonl").open("ab") as file:
        file.write(b'{"input": "half')
    return folder


def toolroll(*arguments: object, columns: int = 80) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolroll.cli", *map(str, arguments)]
    environment = {"COLUMNS": str(columns), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.process
def test_stats_fit_a_narrow_terminal(dumps: Path) -> None:
    done = toolroll("records", "stats", dumps)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"31 samples of 4 steps in {dumps}, 1 unreadable line"
    assert all(len(line) <= 80 for line in lines[1:])
    steps = [line.split() for line in lines if line[:3].strip().isdecimal()][1:]
    assert [row[:3] for row in steps] == [
        ["8", "10", "0.500"],
        ["9", "10", "0.500"],
        ["10", "10", "0.500"],
        ["100", "1", "-0.250"],
    ]
    assert any(line.split()[:2] == ["code_interpreter", "30"] for line in lines)
    assert any(line.split()[:2] == ["stop", "30"] for line in lines)
    assert "9.jsonl: skipped line 11: Incomplete line" in done.stderr


@pytest.mark.process  # matplotlib lists the fonts of a new machine by a program
def test_stats_as_json_and_plot(dumps: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["records", "stats", str(dumps), "--json", "--plot", str(tmp_path / "stats.png")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bad_lines"] == 1
    assert [step["step"] for step in found["steps"]] == [8, 9, 10, 100]
    assert found["total"]["score"]["count"] == 31
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.process  # matplotlib lists the fonts of a new machine by a program
def test_huge_step_does_not_break_the_plot(dumps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10**30, -(10**400)):
        write_verl(dumps / f"huge-{len(str(step))}.jsonl", [{**verl_line(1), "step": step}])
    done = CliRunner().invoke(app, ["records", "stats", str(dumps), "--plot", str(tmp_path / "stats.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")
    assert "Not plotted: 2 steps" in caplog.text


@pytest.mark.process
def test_stats_of_empty_or_missing_directory(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["records", "stats", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout == f"0 samples of 0 steps in {tmp_path}\n"
    missing = toolroll("records", "stats", tmp_path / "nothing")
    assert missing.returncode == 2
    assert "No such directory" in missing.stderr


def test_convert_to_parquet(dumps: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.parquet"
    done = CliRunner().invoke(app, ["records", "convert", str(dumps), str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"31 records in {out}, ")
    assert done.stdout.endswith("; skipped 1 unreadable line\n")
    assert sorted(pd.read_parquet(out)["step"].unique()) == [8, 9, 10, 100]


@pytest.mark.process
def test_missing_extra_is_named(dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolroll.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments in (
        ["convert", str(dumps), str(tmp_path / "x")],
        ["stats", str(dumps), "--plot", str(tmp_path / "x.png")],
    ):
        done = CliRunner().invoke(app, ["records", *arguments])
        assert isinstance(done.exception, MissingExtra)
        assert "toolroll[records]" in str(done.exception)


NO_EXTRAS = """
import sys

for name in ("ray", "transformers", "renderers", "pyarrow", "matplotlib", "numpy", "pandas", "textual"):
    sys.modules[name] = None
sys.argv[1:] = ["records", "stats", *sys.argv[1:]]
from toolroll.cli.app import main

main()
"""


@pytest.mark.process
def test_stats_work_without_extras(dumps: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_EXTRAS, dumps, "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"]["samples"] == 31


def test_schema_is_printed(root: Path) -> None:
    done = CliRunner().invoke(app, ["records", "schema"])
    assert done.stdout == (root / "docs/records.schema.json").read_text()


def test_export_sends_a_trace_of_each_record(dumps: Path) -> None:
    with Collector() as collector:
        done = CliRunner().invoke(app, ["records", "export", str(dumps), "--otlp", collector.url, "--model", "small"])
    assert done.output.endswith(f"300 spans of 30 records sent to {collector.url}; 2 lines without timings skipped\n")
    assert len(collector.spans) == 300
    roots = [attributes(span) for span in collector.spans if not span.parent_span_id]
    assert [root["toolroll.step"] for root in roots] == [8] * 10 + [9] * 10 + [10] * 10
    assert {root["gen_ai.request.model"] for root in roots} == {"small"}
