"""A directory, and as root a user, for each program that has no file system of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

_FIRST_USER = 961_000_000
"""User numbers that no machine gives to anybody: below it the ranges of login.defs and subuid, above it the end."""


class Scratch:
    """Makes and removes them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="toolroll-"))
        self.directory.chmod(0o711)
        self._spare: list[int] = []
        self._made = 0

    def take(self) -> tuple[str, int | None]:
        """An empty directory, and the user that it belongs to; None for whoever runs the server."""
        if self._spare:
            number = self._spare.pop()
        else:
            number = self._made
            self._made += 1
        directory = self.directory / str(number)
        directory.mkdir(mode=0o700)
        if os.geteuid() != 0:
            return str(directory), None
        os.chown(directory, _FIRST_USER + number, _FIRST_USER + number)
        return str(directory), _FIRST_USER + number

    async def give_back(self, directory: str, *, use_again: bool) -> None:
        """Remove a directory with all that is in it, and have it and its user used again, or not."""
        await asyncio.to_thread(_remove, directory)
        if use_again:
            self._spare.append(int(Path(directory).name))

    def close(self) -> None:
        """Remove everything."""
        _remove(str(self.directory))


def _remove(directory: str) -> None:
    """By programs that take directories of any depth; a second time where a program had closed its own to itself."""
    if subprocess.run(["/bin/rm", "-rf", "--", directory], capture_output=True).returncode != 0:
        subprocess.run(["/bin/chmod", "-R", "u+rwX", "--", directory], capture_output=True)
        subprocess.run(["/bin/rm", "-rf", "--", directory], capture_output=True)
