"""Reading dumps from first to last, one record at a time.

    for record in read("dumps", steps=range(100, 200)):
        ...

Of a directory of any size no more is held than one line. A line that can't be read is logged, counted and skipped: a
file that a process was killed over reads to its last whole line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from toolroll.errors import ConfigError
from toolroll.records.directory import DumpFile, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record

logger = logging.getLogger(__name__)

LONGEST = 256 * 1024 * 1024
"""Bytes of a line. What is longer is no line of a dump, and must not fill the memory."""
BUFFER = 512 * 1024
"""Bytes that are read at a time: a good many lines."""
NAMED = 20
"""Lines that can't be read and are logged. The others are counted."""


def read(directory: str | os.PathLike[str], *, steps: Iterable[int] | None = None) -> Reading:
    """The records of a directory (or of one file) by step, those of the given steps only if some are given."""
    wanted = None if steps is None else steps if isinstance(steps, range) else set(steps)
    return Reading([file for file in dump_files(directory) if wanted is None or file.step in wanted])


class Reading(Iterator[Record]):
    """Records, as they are read."""

    def __init__(self, files: Iterable[DumpFile]) -> None:
        files = list(files)
        self.bad = 0
        """Lines that could not be read, so far."""
        self.done = 0
        """Bytes that were read, so far."""
        self.size = sum(path.stat().st_size for file in files if (path := Path(file.path)).exists())
        """Bytes that there are to read."""
        self._records = self._read(files)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        return next(self._records)

    def _read(self, files: Iterable[DumpFile]) -> Iterator[Record]:
        for file in files:
            try:
                opened = Path(file.path).open("rb", BUFFER)  # noqa: SIM115 (what is raised while it is open isn't its fault)
            except OSError as error:
                raise ConfigError(f"{file.path} can't be read: {error.strerror}.") from error
            with opened:
                for place, line in enumerate(lines(opened), 1):
                    self.done += len(line)
                    if not line.isspace() and (record := self._parsed(file.path, place, line)):
                        yield record

    def _parsed(self, path: str, place: int, line: bytes) -> Record | None:
        try:
            return Record.parse(whole(line))
        except BadLine as error:
            self.bad += 1
            if self.bad <= NAMED:
                logger.warning("%s, line %d was skipped: %s", path, place, error)
            if self.bad == NAMED:
                logger.warning("Further lines that can't be read are skipped without a word.")
            return None


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, from where it is. Of one that is too long comes the beginning, without an end."""
    while line := file.readline(LONGEST):
        if is_too_long(line):
            while (rest := file.readline(LONGEST)) and not rest.endswith(b"\n"):
                pass
        yield line


def is_too_long(line: bytes) -> bool:
    """Whether it is the beginning of a line that is no line of a dump."""
    return len(line) >= LONGEST


def whole(line: bytes) -> bytes:
    """The line, or BadLine where it was cut short."""
    if is_too_long(line):
        raise BadLine(f"It is longer than {LONGEST // 1024**2} MB.")
    if not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
        raise BadLine("It is half a line: its writer is at it still, or was stopped over it.")
    return line
