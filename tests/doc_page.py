"""Reads a documentation page: titled blocks are files, console blocks contain commands and their output."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command after `$ `, and the output that the page shows."""

    line: str
    output: str


def files(page: str) -> dict[str, str]:
    """Return the blocks that have a title, by title."""
    return {title: body for _, title, body in BLOCK.findall(page) if title}


def commands(page: str) -> list[Command]:
    """Return the commands of all console blocks, in order."""
    found = []
    for language, _, body in BLOCK.findall(page):
        if language == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                found.append(Command(line, output))
    return found


def run(command: Command, directory: Path) -> str:
    """Run a command with the programs of this environment first on the PATH, and return its stdout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    completed = subprocess.run(
        ["bash", "-c", command.line], cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    return completed.stdout


def trimmed(text: str) -> list[str]:
    """Return the lines without trailing white space."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
