"""Lock the directory of a run.

Invariants:

- At most one run is active in a directory. The lock is on the directory itself, so deleting a file does not release it.
  NFS cannot lock directories, so the file `.lock` is locked too.
- Records of runs with different data, `n` or model never mix in a directory. A run that left no records, or only those
  of failed samples, e.g. because its model name was misspelled, does not reserve the directory.
- No worker of an earlier run can write any more: all its directories are fenced (`write_fence.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Any

import orjson

from toolroll.errors import ConfigError
from toolroll.run.resume import has_records
from toolroll.run.write_fence import FENCE_RETRY_INTERVAL_S, PERMISSION_FILE, fence

logger = logging.getLogger(__name__)

RUN_IDENTITY_FILE = ".run.json"
RUN_LOCK_FILE = ".lock"


class RunLock:
    """Lock on the directory of a run. Held until it is released or the process ends.

    Args:
        directory: The run's `rollout_data_dir`. It is created if necessary.
        identity: Settings that all runs in the directory must share.
        keeps_failed: Count the records of failed samples, because the run does not attempt these samples again.

    Raises:
        ConfigError: If another run is active in the directory, or it contains records of a different run.
    """

    def __init__(self, directory: Path, identity: dict[str, Any], *, keeps_failed: bool = True) -> None:
        self._locks = contextlib.ExitStack()
        _lock(directory, self._locks)
        try:
            for permission in directory.glob(f"*/{PERMISSION_FILE}"):
                _fence(permission.parent)
            _check_identity(directory, identity, may_replace=not has_records(directory, failed=keeps_failed))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        self._locks.close()


def _lock(directory: Path, locks: contextlib.ExitStack) -> None:
    """Lock a directory and its lock file until `locks` is closed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        locks.callback(os.close, opened[0])
        opened.append(os.open(directory / RUN_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        locks.callback(os.close, opened[1])
    except OSError as error:
        locks.close()
        raise ConfigError(f"Cannot use rollout_data_dir {directory}: {error.strerror}.") from error
    for file in opened:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locks.close()
            problem = f"Another run is active in {directory}. Wait until it ends, or choose another rollout_data_dir."
            raise ConfigError(problem) from None
        except OSError as error:
            if file == opened[0]:
                continue  # NFS
            locks.close()
            problem = f"Cannot lock {directory}: {error.strerror}. Use a file system that supports flock."
            raise ConfigError(problem) from error


def _fence(worker_directory: Path) -> None:
    """Fence a worker of an earlier run. Blocks on purpose while it writes: nothing else may happen before."""
    if not fence(worker_directory):
        logger.warning("Waiting for a worker of an earlier run, which is writing to %s.", worker_directory)
        while not fence(worker_directory):
            time.sleep(FENCE_RETRY_INTERVAL_S)


def _check_identity(directory: Path, identity: dict[str, Any], *, may_replace: bool) -> None:
    file = directory / RUN_IDENTITY_FILE
    if may_replace or not file.exists():
        try:
            complete = file.with_name(f"{file.name}.new")  # a full disk must not leave a part of the file
            complete.write_bytes(orjson.dumps(identity, option=orjson.OPT_INDENT_2))
            complete.replace(file)
        except OSError as error:
            raise ConfigError(f"Cannot use rollout_data_dir {directory}: {error.strerror}.") from error
        return
    existing = orjson.loads(file.read_bytes())
    for key, value in identity.items():
        if existing.get(key) != value:
            raise ConfigError(
                f"{directory} belongs to a run with {key}={existing.get(key)!r}, but this run has {key}={value!r}. "
                "Choose another rollout_data_dir, or restore the setting."
            )
