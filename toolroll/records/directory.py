"""Find dump files: `{directory}/{step}.jsonl`, or `{directory}/{writer}/{step}.jsonl` with several writers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from toolroll.errors import ConfigError

StrPath = str | os.PathLike[str]
DUMP_SUFFIX = ".jsonl"
STEP_NAME = re.compile(r"-?[0-9]{1,18}")


class DumpFile(NamedTuple):
    """One dump file."""

    path: str
    """Path of the file."""
    name: str
    """File name without its suffix."""
    step: int | None
    """Step, or None if the name is not a number."""


def dump_files(directory: StrPath) -> list[DumpFile]:
    """Return the dump files of a directory and of its direct subdirectories.

    Args:
        directory: The directory, or a single file.

    Returns:
        The files by step, then those without a step by name.

    Raises:
        ConfigError: If the directory does not exist or cannot be read.
    """
    path = Path(directory)
    if path.is_file():
        return [_file(str(path))]
    if not path.is_dir():
        raise ConfigError(f"No such directory: {directory}. Pass the rollout_data_dir of the run.")
    try:
        found = [_file(file) for file in _find(path, below=True)]
    except OSError as error:
        raise ConfigError(f"Cannot read {error.filename}: {error.strerror}.") from error
    return sorted(found, key=lambda file: (file.step is None, file.step or 0, file.name, file.path))


def _find(directory: StrPath, *, below: bool) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(DUMP_SUFFIX) and entry.is_file():
                yield entry.path
            elif below and not entry.name.startswith(".") and entry.is_dir():
                yield from _find(entry.path, below=False)


def _file(path: str) -> DumpFile:
    name = os.path.basename(path).removesuffix(DUMP_SUFFIX)  # noqa: PTH119 (faster, for thousands of files)
    return DumpFile(path, name, int(name) if STEP_NAME.fullmatch(name) else None)
