"""Directories that belong to one process, and that others remove after it was killed.

The owner holds a lock on its directory. A directory without a lock is abandoned. A lock works between containers too,
unlike a process id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from pathlib import Path


class OwnedDirectory:
    """A directory for temporary files. Creating one removes the abandoned ones of the same purpose and user.

    Args:
        purpose: Part of the directory's name.
    """

    path: Path

    def __init__(self, purpose: str) -> None:
        prefix = f"toolroll-{purpose}-"
        for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if directory.lstat().st_uid == os.geteuid():
                    _remove_if_abandoned(directory)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
            try:
                self._lock = lock(self.path)
                return
            except (BlockingIOError, FileNotFoundError):  # a starting process took it for an abandoned one
                continue

    def remove(self) -> None:
        """Remove the directory and its content."""
        remove_tree(str(self.path))
        os.close(self._lock)


def lock(directory: Path) -> int:
    """Open and lock a directory. The lock ends when the descriptor is closed or this process ends.

    Raises:
        BlockingIOError: If another process holds the lock.
        FileNotFoundError: If another process has removed the directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_tree(directory: str) -> None:
    """Remove a directory and its content, of any depth."""
    # A program may have removed the permissions of directories that it created.
    remove = ["/bin/rm", "-rf", "--", directory]
    if subprocess.run(remove, capture_output=True).returncode != 0:
        subprocess.run(["/bin/chmod", "-R", "u+rwX", "--", directory], capture_output=True)
        subprocess.run(remove, capture_output=True)


def _remove_if_abandoned(directory: Path) -> None:
    descriptor = lock(directory)
    try:
        remove_tree(str(directory))
    finally:
        os.close(descriptor)
