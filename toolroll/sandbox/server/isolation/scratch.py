"""Scratch directories for programs without their own file system."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from itertools import count
from pathlib import Path

from toolroll.sandbox.server.job_spec import JobSpec


class ScratchDirectories:
    """Creates and removes scratch directories."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="toolroll-"))
        self.directory.chmod(0o711)
        self._numbers = count()

    def create(self) -> Path:
        """Return a new empty directory."""
        directory = self.directory / str(next(self._numbers))
        directory.mkdir(mode=0o700)
        return directory

    def assign(self, spec: JobSpec) -> None:
        """Create an empty directory for a program, which belongs to the program's user."""
        directory = self.create()
        spec["directory"] = str(directory)
        if "user" in spec:
            os.chown(directory, spec["user"], spec["user"])

    async def release(self, directory: str) -> None:
        """Remove a directory and its content."""
        await asyncio.to_thread(_remove, directory)

    def close(self) -> None:
        """Remove all directories."""
        _remove(str(self.directory))


def _remove(directory: str) -> None:
    # rm handles directories of any depth. A program may have removed the permissions of directories that it created.
    remove = ["/bin/rm", "-rf", "--", directory]
    if subprocess.run(remove, capture_output=True).returncode != 0:
        subprocess.run(["/bin/chmod", "-R", "u+rwX", "--", directory], capture_output=True)
        subprocess.run(remove, capture_output=True)
