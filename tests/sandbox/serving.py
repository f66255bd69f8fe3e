"""Start a sandbox server in a separate process, as a user does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

PR_SET_NAME = 15


@dataclass
class Serving:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    startup_output: str

    @property
    def tier(self) -> str:
        found = re.search(r"isolation +tier (\w)", self.startup_output)
        return found[1] if found else ""

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and its descendants."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def fronts(self) -> list[psutil.Process]:
        """Return the processes that handle requests: with several fronts, the first child of each guard, if any."""
        server, fronts = psutil.Process(self.process.pid), []
        for child in server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "front_guard" in " ".join(child.cmdline()):
                    fronts += child.children()[:1]
        return fronts or [server]

    def processes_named(self, name: str) -> list[psutil.Process]:
        """Return the processes of programs that ran `name_process(name)`."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    found.append(process)
        return found


@contextlib.contextmanager
def serving(
    *options: str, environment: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
) -> Iterator[Serving]:
    """Run `toolroll sandbox serve` with these options until the context ends."""
    command = [*wrapper, sys.executable, "-m", "toolroll.cli", "sandbox", "serve", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200", **(environment or {})},
        start_new_session=True,
    )
    assert process.stdout
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"serving on (\S+)", line):
                yield Serving(found[1], process, "".join(lines))
                break
        else:
            raise RuntimeError(f"the server exited with status {process.wait()}:\n{''.join(lines)}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def name_process(name: str) -> str:
    """Return Python code that gives its process a name of at most 15 characters."""
    return f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_NAME}, {name.encode()!r})"


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Return True if a condition becomes true before the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
