"""A real terminal for tests of the things that people look at, driven through tmux."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Terminal:
    """A terminal of 80 × 24 in a private tmux server."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def tmux(self, *words: str) -> str:
        """Run a tmux command and return its output."""
        done = subprocess.run(["tmux", "-L", self._socket, *words], capture_output=True, text=True, timeout=30)
        return done.stdout

    def run(self, *command: str, folder: Path) -> None:
        """Run a command in the terminal, then print its exit status there."""
        size = ("-x", "80", "-y", "24")
        script = f"trap : INT; {shlex.join(command)}; echo exit status $?; sleep 60"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-s", "t", *size, "-c", str(folder), "sh", "-c", script)

    def press(self, *keys: str) -> None:
        """Press keys, given by their tmux names."""
        self.tmux("send-keys", "-t", "t", *keys)

    def type(self, text: str) -> None:
        """Type text."""
        self.tmux("send-keys", "-t", "t", "-l", text)

    @property
    def scrolled(self) -> str:
        """Text on the screen and above it."""
        return self.tmux("capture-pane", "-t", "t", "-p", "-S", "-")

    @property
    def screen(self) -> str:
        """Text on the screen."""
        return self.tmux("capture-pane", "-t", "t", "-p")

    def sees(self, *texts: str, within: float = 30) -> None:
        """Wait until the screen shows all texts."""
        deadline = time.monotonic() + within
        while not all(text in self.screen for text in texts):
            assert time.monotonic() < deadline, f"{texts} not in\n{self.screen}"
            time.sleep(0.1)


@contextmanager
def open_terminal(name: str) -> Iterator[Terminal]:
    """Open a terminal whose tmux server has a unique name."""
    assert shutil.which("tmux"), "The test needs tmux: apt-get install tmux"
    opened = Terminal(f"toolroll-{os.getpid()}-{abs(hash(name))}")
    yield opened
    opened.tmux("kill-server")
