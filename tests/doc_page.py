"""A page of documentation as a script: titled blocks are files, console blocks are commands with their output."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line after `$ `, and what the page says that it prints."""

    line: str
    output: str


def files(page: str) -> dict[str, str]:
    """The blocks with a title, by it."""
    return {title: body for _, title, body in BLOCK.findall(page) if title}


def commands(page: str) -> list[Command]:
    """Every command in a console block, in order."""
    found = []
    for kind, _, body in BLOCK.findall(page):
        if kind == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                found.append(Command(line, output))
    return found


def run(command: Command, folder: Path) -> str:
    """What the command prints, with this environment's programs first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    done = subprocess.run(
        ["bash", "-c", command.line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout


def trimmed(text: str) -> list[str]:
    """Lines without what can't be seen at their end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
