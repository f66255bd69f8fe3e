"""The MCP servers that the tests and benchmarks start."""

from __future__ import annotations

import subprocess
import time
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
SETUP_TIMEOUT_S = 900


@cache
def installed() -> dict[str, Path]:
    """Return what `.ci/mcp` prints: the directory of the servers of npm, and the Python with those of PyPI."""
    made = subprocess.run([ROOT / ".ci/mcp"], stdout=subprocess.PIPE, text=True, check=True, timeout=SETUP_TIMEOUT_S)
    return {name: Path(path) for name, _, path in (line.partition("=") for line in made.stdout.splitlines())}


def server_program(name: str) -> str:
    """Return the path of a server of npm."""
    return str(installed()["node"] / name)


def processes_with(text: str) -> list[psutil.Process]:
    """Return the processes whose command line contains a text, except for zombies."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if not is_zombie and any(text in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def wait_until_gone(text: str, timeout_s: float) -> list[psutil.Process]:
    """Wait until no process has a text in its command line. Return those that remain."""
    deadline = time.monotonic() + timeout_s
    while (remaining := processes_with(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining
