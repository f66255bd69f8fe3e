"""A real sandbox server in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil


@dataclass
class Serving:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]
    greeting: str

    @property
    def tier(self) -> str:
        found = re.search(r"isolation +tier (\w)", self.greeting)
        return found[1] if found else ""

    def processes(self) -> list[psutil.Process]:
        """The server's process, and all below it."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]


@contextlib.contextmanager
def serving(
    *options: str, environment: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
) -> Iterator[Serving]:
    """`toolroll sandbox serve` with these options, until the block ends."""
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
            raise RuntimeError(f"the server ended with {process.wait()}:\n{''.join(lines)}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def wait_until(condition: object, within: float = 10.0) -> bool:
    """Whether a condition becomes true in time."""
    assert callable(condition)
    ends = time.monotonic() + within
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True
