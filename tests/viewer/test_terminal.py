"""The viewer in a real terminal: tmux runs it, presses keys and reads the screen."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from viewer.dumps import ours


class Terminal:
    """A terminal of 80 × 24, of a tmux of its own."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def tmux(self, *words: str) -> str:
        """Tell tmux something."""
        done = subprocess.run(["tmux", "-L", self._socket, *words], capture_output=True, text=True, timeout=30)
        return done.stdout

    def run(self, *command: str, folder: Path) -> None:
        """Run a command in it. When it has ended, the screen says with what status."""
        size = ("-x", "80", "-y", "24")
        script = f"{shlex.join(command)}; echo ended with $?; sleep 60"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-s", "t", *size, "-c", str(folder), "sh", "-c", script)

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names for them."""
        self.tmux("send-keys", "-t", "t", *keys)

    def type(self, text: str) -> None:
        """Type a text."""
        self.tmux("send-keys", "-t", "t", "-l", text)

    @property
    def screen(self) -> str:
        """What is on the screen."""
        return self.tmux("capture-pane", "-t", "t", "-p")

    def sees(self, *texts: str, within: float = 30) -> None:
        """What the screen has to show, soon."""
        deadline = time.monotonic() + within
        while not all(text in self.screen for text in texts):
            assert time.monotonic() < deadline, f"{texts} not in\n{self.screen}"
            time.sleep(0.1)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    assert shutil.which("tmux"), "The test needs tmux: apt-get install tmux"
    made = Terminal(f"toolroll-{os.getpid()}-{abs(hash(request.node.nodeid))}")
    yield made
    made.tmux("kill-server")


def test_keys_in_screens_out(terminal: Terminal, tmp_path: Path) -> None:
    runs = ours(tmp_path / "runs", steps=[1, 2])
    command = str(Path(sys.executable).with_name("toolroll"))
    terminal.run("env", "COLORTERM=truecolor", command, "view", "runs", folder=tmp_path)
    terminal.sees("step 1 · sample 1 of 16 · ", "kB in 2 steps · runs", "▎ user", "t tokens  r reward  c compare")
    terminal.press("n", "N")
    terminal.sees("step 2 · sample 1 of 16")
    terminal.press("f")
    terminal.sees("find", "enter finds it")
    terminal.type("NameError")
    terminal.press("Enter")
    terminal.sees("find NameError: match 1 of", "NameError: name 'prnt' is not defined")
    terminal.press("Escape")
    time.sleep(0.3)  # a terminal can't tell an escape from the beginning of a sequence but by the time between
    terminal.press("t")
    terminal.sees("mask 0: prompt tool")
    terminal.press("e")
    terminal.sees("Written to")
    assert len(list(tmp_path.glob("step-2-sample-*.md"))) == 1
    ours(runs, steps=[3])
    terminal.sees("in 3 steps")  # it looks by itself
    terminal.press("F")
    terminal.sees("step 3 · sample 16 of 16", "following")
    terminal.press("q")
    terminal.sees("ended with 0")


def test_the_script_of_the_original_name_and_a_directory_that_is_not_there(
    terminal: Terminal, tmp_path: Path, root: Path
) -> None:
    script = str(root / "scripts" / "rollout_viewer.py")
    terminal.run(sys.executable, script, str(ours(tmp_path / "runs", steps=[1], groups=1)), folder=tmp_path)
    terminal.sees("sample 1 of 4")
    terminal.press("q")
    terminal.sees("ended with 0")
    done = subprocess.run([sys.executable, script, "nowhere"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "There is no directory nowhere" in done.stderr
