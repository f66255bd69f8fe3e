"""`toolroll demo` and `toolroll examples`: what a first user sees."""

import json
import subprocess
import sys
from pathlib import Path

import other_system
import pytest

from toolroll.records.reader import read_records

COMMAND = Path(sys.executable).with_name("toolroll")


def toolroll(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.sandbox
def test_demo_runs_a_whole_rollout(tmp_path: Path) -> None:
    done = toolroll("demo", "--no-view", "--directory", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "64 trajectories of 16 prompts" in done.stdout
    assert "toolroll run gsm8k/run.yaml engine.kind=transformers" in done.stdout
    assert not done.stderr, "nothing distracts"
    records = list(read_records(tmp_path / "out"))
    assert len(records) == 64
    assert {record.outcome for record in records} == {"ok"}
    assert {record.fidelity for record in records} == {"exact"}
    calls = [call for record in records for call in record.calls]
    assert {call["tool"] for call in calls} >= {"code_interpreter", "calc_gsm8k_reward"}
    assert any(call["answer"].strip().isdecimal() for call in calls), "programs have really run"
    assert {record.score is not None and record.score >= 0.5 for record in records} == {True, False}
    assert "programs" in done.stdout, "programs that failed are visible"
    assert sum(record.summary().failed_programs for record in records) > 0
    stats = toolroll("records", "stats", "out", cwd=tmp_path).stdout
    assert "Programs" in stats
    assert "failed" in stats


def toolroll_on_other_system(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command, environment = other_system.command(*arguments), other_system.environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["demo"], ["sandbox", "serve"], ["sandbox", "run", "x.py"]])
def test_other_systems_are_told_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    done = toolroll_on_other_system(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    assert "cannot isolate programs on darwin. Start the server in a Linux container" in message
    assert "set SANDBOX_FUSION_URL" in message
    assert "use --unsafe to run code that you trust" in message
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--version"], ["examples", "list"], ["doctor"], ["records", "schema"]])
def test_other_commands_work_on_other_systems(arguments: list[str], tmp_path: Path) -> None:
    done = toolroll_on_other_system(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if arguments == ["doctor"]:
        assert "programs cannot be isolated" in done.stdout
        assert "--unsafe" in done.stdout


@pytest.mark.sandbox
def test_demo_runs_without_isolation_on_other_systems(tmp_path: Path) -> None:
    done = toolroll_on_other_system("demo", "--no-view", "--unsafe", "--directory", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "Programs are not isolated on this system (--unsafe)" in done.stdout
    assert "64 trajectories of 16 prompts" in done.stdout
    records = list(read_records(tmp_path / "out"))
    assert {record.outcome for record in records} == {"ok"}
    assert any(call["answer"].strip().isdecimal() for record in records for call in record.calls)


@pytest.mark.process
def test_examples_can_be_copied(tmp_path: Path) -> None:
    listed = toolroll("examples", "list", cwd=tmp_path).stdout.split()
    assert "gsm8k" in listed
    copied = toolroll("examples", "copy", "gsm8k", cwd=tmp_path)
    assert copied.returncode == 0
    assert "gsm8k/run.yaml" in copied.stdout.split()
    rows = (tmp_path / "gsm8k/problems.jsonl").read_text().splitlines()
    assert len([json.loads(row) for row in rows]) == 16
    again = toolroll("examples", "copy", "gsm8k", cwd=tmp_path)
    assert again.returncode == 2
    assert "gsm8k exists already. Choose another directory." in again.stderr
    unknown = toolroll("examples", "copy", "gsm9k", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "Unknown example 'gsm9k'. Did you mean 'gsm8k'?" in unknown.stderr


@pytest.mark.process
def test_package_is_a_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "toolroll", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("toolroll ")
