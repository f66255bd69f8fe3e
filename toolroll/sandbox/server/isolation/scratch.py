"""Scratch directories for programs without their own file system."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from pathlib import Path

from toolroll.sandbox.server.isolation.owned_directory import OwnedDirectory, remove_tree
from toolroll.sandbox.server.job_spec import JobSpec


class ScratchDirectories:
    """Creates and removes scratch directories."""

    def __init__(self) -> None:
        self._owned = OwnedDirectory("scratch")
        self.directory = self._owned.path
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
        await asyncio.to_thread(remove_tree, directory)

    def close(self) -> None:
        """Remove all directories."""
        self._owned.remove()
