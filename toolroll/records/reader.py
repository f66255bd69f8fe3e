"""Read the records of dumps in order, one at a time.

    for record in read_records("dumps", steps=range(100, 200)):
        ...

Only one line is in memory at a time. Lines that cannot be read are logged, counted and skipped, so the file of a killed
process can be read up to its last complete line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from toolroll.errors import ConfigError
from toolroll.records.directory import DumpFile, StrPath, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Maximum length of a line. A longer line does not belong to a dump and must not fill the memory."""
READ_BUFFER_BYTES = 512 * 1024
MAX_LOGGED_BAD_LINES = 20
"""Maximum number of unreadable lines that are logged. Further ones are only counted."""


def read_records(directory: StrPath, *, steps: Iterable[int] | None = None) -> RecordIterator:
    """Return the records of a directory by step.

    Args:
        directory: The `rollout_data_dir`, or a single file.
        steps: Steps to read; all by default.

    Returns:
        An iterator, which counts the unreadable lines in `bad_lines`.

    Raises:
        ConfigError: If the directory does not exist or cannot be read.

    Example:
        >>> import tempfile
        >>> from toolroll.records.writer import RecordWriter
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory) as writer:
        ...         writer.append({"output": "42", "score": 1.0}, step=7)
        ...     [(record.step, record.score) for record in read_records(directory)]
        [(7, 1.0)]
    """
    wanted = None if steps is None else steps if isinstance(steps, range) else set(steps)
    return RecordIterator([file for file in dump_files(directory) if wanted is None or file.step in wanted])


class RecordIterator(Iterator[Record]):
    """Iterator over the records of several files.

    Args:
        files: Files to read, in this order.
    """

    def __init__(self, files: Sequence[DumpFile]) -> None:
        self.bad_lines = 0
        """Number of unreadable lines so far."""
        self.bytes_read = 0
        """Number of bytes read so far."""
        self.total_bytes = sum(path.stat().st_size for file in files if (path := Path(file.path)).exists())
        """Size of all files."""
        self._records = self._read(files)

    def __next__(self) -> Record:
        return next(self._records)

    def _read(self, files: Iterable[DumpFile]) -> Iterator[Record]:
        for file in files:
            try:
                opened = Path(file.path).open("rb", READ_BUFFER_BYTES)  # noqa: SIM115 (only opening is in the try block)
            except OSError as error:
                raise ConfigError(f"Cannot read {file.path}: {error.strerror}.") from error
            with opened:
                for number, line in enumerate(read_lines(opened), 1):
                    self.bytes_read += len(line)
                    if not line.isspace() and (record := self._parse(file.path, number, line)):
                        yield record

    def _parse(self, path: str, number: int, line: bytes) -> Record | None:
        try:
            return Record.parse(check_complete(line))
        except BadLine as error:
            self.bad_lines += 1
            if self.bad_lines <= MAX_LOGGED_BAD_LINES:
                logger.warning("%s: skipped line %d: %s", path, number, error)
            if self.bad_lines == MAX_LOGGED_BAD_LINES:
                logger.warning("Further unreadable lines are skipped without being logged.")
            return None


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file from its current position. Too long lines are truncated and lack the newline."""
    while line := file.readline(MAX_LINE_BYTES):
        if is_too_long(line):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield line


def is_too_long(line: bytes) -> bool:
    """Return True if a line from `read_lines` was truncated."""
    return len(line) >= MAX_LINE_BYTES


def check_complete(line: bytes) -> bytes:
    """Return the line.

    Raises:
        BadLine: If the line is incomplete or too long.
    """
    if is_too_long(line):
        raise BadLine(f"Line is longer than {MAX_LINE_BYTES // 1024**2} MB.")
    if not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
        raise BadLine("Incomplete line: it is still being written, or its writer was stopped.")
    return line
