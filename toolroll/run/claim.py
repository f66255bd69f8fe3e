"""Claim: a run's directory is its own, while it is at work and for what it is about.

- Two runs are never at work in one directory.
- A run with other data, another `n` or another model never mixes its records with those that are there. One that left
  none, since its model's name was mistyped, say, is in nobody's way.
- Where a run was killed whose workers are processes of their own, these may write for as long as their lease lasts.
  Who goes on with it is told to wait so long (`wait`) before it counts what is there.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import orjson

from toolroll.errors import ConfigError

ABOUT, LOCK = ".run.json", ".lock"


class Claim:
    """Held until it is released, or the process ends.

    Args:
        directory: The run's `rollout_data_dir`. It is made, if it isn't there.
        about: What makes it this run and no other.
        lease: Seconds that this run's workers may write for when nobody hears of them any more.

    Raises ConfigError where another run is at work there, or another's records are.
    """

    def __init__(self, directory: Path, about: dict[str, Any], *, lease: float = 0.0) -> None:
        self._file = _locked(directory)
        try:
            left = os.read(self._file, 32)
            self.wait = float(left) if left else 0.0
            """Seconds after which nobody of an earlier run writes any more."""
            _check(directory, about, may_replace=not self.wait and not _has_records(directory))
            self._write(str(max(lease, self.wait)).encode())
        except BaseException:
            os.close(self._file)
            raise

    def release(self, *, is_over: bool) -> None:
        """Let it go. `is_over`: no worker of this run writes any more."""
        if is_over:
            self._write(b"")
        os.close(self._file)

    def _write(self, text: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)


def _locked(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"The rollout_data_dir {directory} can't be used: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(f"Another run is at work in {directory}. Wait for it, or choose another directory.") from None
    return file


def _has_records(directory: Path) -> bool:
    return any(file.stat().st_size for file in directory.rglob("*.jsonl"))


def _check(directory: Path, about: dict[str, Any], *, may_replace: bool) -> None:
    file = directory / ABOUT
    if may_replace or not file.exists():
        file.write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2))
        return
    before = orjson.loads(file.read_bytes())
    for key, value in about.items():
        if before.get(key) != value:
            raise ConfigError(
                f"{directory} belongs to a run with {key}={before.get(key)!r}, and this one has {value!r}. "
                "Choose another rollout_data_dir, or put it back."
            )
