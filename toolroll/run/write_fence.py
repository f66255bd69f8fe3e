"""Fence the record directory of a worker, so that a lost worker cannot write a record that another one writes too.

A worker that was suspended (SIGSTOP, a paused virtual machine) does not know that its lease has expired, and may
continue in the middle of a write. So its permission to write is a file, which the coordinator creates when the worker
registers, and deletes before it assigns the worker's samples to others. Both lock the file (`flock`):

- A worker appends records only while it holds the lock and the file exists.
- The coordinator deletes the file only while it holds the lock.

Invariant: once `fence()` has returned True, the records in the directory never change. A suspended worker that holds
the lock delays only its own samples, until it continues or dies.

The file system must support `flock` between all nodes, as local file systems, NFSv4, CephFS, and Lustre with the mount
option `flock` do. Workers check the open file and not its name, because NFS caches names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from toolroll.rollout.distributed.worker import LeaseExpired

PERMISSION_FILE = ".writable"
FENCE_RETRY_INTERVAL_S = 0.1
"""Interval between attempts to fence a worker that is writing."""


class WritePermission:
    """A worker's permission to write to its record directory.

    Args:
        directory: The worker's record directory.

    Raises:
        LeaseExpired: If the directory is fenced.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._file = os.open(directory / PERMISSION_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LeaseExpired from None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the permission during a write. Raises LeaseExpired if the directory is fenced."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            is_fenced = os.fstat(self._file).st_nlink == 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS: the file was deleted
                raise
            is_fenced = True
        try:
            if is_fenced:
                raise LeaseExpired
            yield
        finally:
            with contextlib.suppress(OSError):  # a deleted file on NFS
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def permit(directory: Path) -> None:
    """Create a worker's record directory with the permission to write. Its name must not have been used before."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PERMISSION_FILE).touch()


def fence(directory: Path) -> bool:
    """Revoke the permission to write to a worker's record directory, and delete the directory if it is empty.

    Returns:
        False if the worker is writing, so that the caller has to try again.
    """
    path = directory / PERMISSION_FILE
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    with contextlib.suppress(OSError):  # it has records
        directory.rmdir()
    return True
