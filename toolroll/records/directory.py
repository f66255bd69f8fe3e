"""Where dumps are: `{directory}/{step}.jsonl`, and those of several writers in `{directory}/{writer}/{step}.jsonl`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from toolroll.errors import ConfigError

SUFFIX = ".jsonl"
NUMBER = re.compile(r"-?[0-9]{1,18}")


class DumpFile(NamedTuple):
    """One file."""

    path: str
    name: str
    """Without its suffix."""
    step: int | None
    """None where the name is no number."""

    @property
    def order(self) -> tuple[bool, int, str, str]:
        """By step; those without a number last, by name."""
        return self.step is None, self.step or 0, self.name, self.path


def dump_files(directory: str | os.PathLike[str]) -> list[DumpFile]:
    """The files of a directory and of those right below it, by step. A single file is taken as it is."""
    path = Path(directory)
    if path.is_file():
        return [_file(str(path))]
    if not path.is_dir():
        raise ConfigError(f"There is no directory {directory}. Name the one that was given as rollout_data_dir.")
    try:
        found = _find(path, below=True)
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}.") from error
    return sorted(map(_file, found), key=lambda file: file.order)


def _find(directory: str | os.PathLike[str], *, below: bool) -> list[str]:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.is_file():
                found.append(entry.path)
            elif below and not entry.name.startswith(".") and entry.is_dir():
                found += _find(entry.path, below=False)
    return found


def _file(path: str) -> DumpFile:
    name = os.path.basename(path).removesuffix(SUFFIX)  # noqa: PTH119 (a thousand of them, at every look)
    return DumpFile(path, name, int(name) if NUMBER.fullmatch(name) else None)
