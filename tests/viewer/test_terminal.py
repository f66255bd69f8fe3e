"""The viewer in a real terminal, driven through tmux."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tmux_terminal import Terminal

from viewer.dumps import write_toolroll_run

pytestmark = pytest.mark.viewer


def test_keys_work_in_terminal(terminal: Terminal, tmp_path: Path) -> None:
    runs = write_toolroll_run(tmp_path / "runs", steps=[1, 2])
    command = str(Path(sys.executable).with_name("toolroll"))
    terminal.run("env", "COLORTERM=truecolor", command, "view", "runs", folder=tmp_path)
    terminal.sees("step 1 · sample 1 of 16 · ", "kB in 2 steps · runs", "▎ user", "t tokens  r reward  c compare")
    terminal.press("n", "N")
    terminal.sees("step 2 · sample 1 of 16")
    terminal.press("f")
    terminal.sees("find", "enter: search all steps")
    terminal.type("NameError")
    terminal.press("Enter")
    terminal.sees("find NameError: match 1 of", "NameError: name 'prnt' is not defined")
    terminal.press("Escape")
    time.sleep(0.3)  # a terminal needs a pause to distinguish the key from an escape sequence
    terminal.press("t")
    terminal.sees("mask 0: prompt tool")
    terminal.press("e")
    terminal.sees("Saved to")
    assert len(list(tmp_path.glob("step-2-sample-*.md"))) == 1
    write_toolroll_run(runs, steps=[3])
    terminal.sees("in 3 steps")  # the directory is polled
    terminal.press("F")
    terminal.sees("step 3 · sample 16 of 16", "following")
    terminal.press("q")
    terminal.sees("exit status 0")


def test_rollout_viewer_script_and_missing_directory(terminal: Terminal, tmp_path: Path, root: Path) -> None:
    script = str(root / "scripts" / "rollout_viewer.py")
    terminal.run(
        sys.executable, script, str(write_toolroll_run(tmp_path / "runs", steps=[1], groups=1)), folder=tmp_path
    )
    terminal.sees("sample 1 of 4")
    terminal.press("q")
    terminal.sees("exit status 0")
    done = subprocess.run([sys.executable, script, "nowhere"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "No such directory: nowhere" in done.stderr
