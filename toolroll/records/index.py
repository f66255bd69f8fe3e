"""Incremental index of a directory of dumps, which may be large and may grow.

    dumps = DumpDirectory("dumps")
    first = dumps.steps[0]
    first.index(up_to=100)
    first.summary(0), first.record(0)

Listing the directory only needs the sizes of the files. `index` reads a step as far as requested and keeps about 100
bytes per sample (columns.py). `record` reads one sample from its position in the file.

Rows are the lines that are not blank, in the order in which they were found. The number of a row does not change unless
the step is reset, which happens when a file was replaced, truncated or removed and increments `version`. An incomplete
last line is an unreadable row until it is complete.

All methods are thread-safe. `index` takes time and should run in a background thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from math import inf
from pathlib import Path
from typing import BinaryIO

from toolroll.errors import ConfigError
from toolroll.records.columns import SummaryColumn, SummaryTable
from toolroll.records.directory import DumpFile, StrPath, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.reader import READ_BUFFER_BYTES, check_complete, is_too_long, read_lines
from toolroll.records.record import Record
from toolroll.records.summary import SampleSummary, UnreadableLine

INDEX_FINGERPRINT_BYTES = 4096
"""Number of bytes before the indexed position whose hash is compared, to detect that a file was rewritten."""
SCAN_BATCH_LINES = 256
"""Number of lines that `scan` indexes at a time when it reaches the end of the index."""


@dataclass(slots=True)
class _StepPart:
    """The file of one writer, with the state of its index."""

    path: str
    inode: int
    size: int
    modified: int
    end: int = 0
    """Position up to which complete lines are indexed."""
    seen: int = 0
    """Position up to which the file was read, including an incomplete line, which is read again when it grows."""
    lines: int = 0
    """Number of lines up to `end`, including blank ones."""
    incomplete_row: int | None = None
    """Row of the incomplete last line."""
    fingerprint: bytes = b""
    """Hash of the bytes before `end`."""


@dataclass(frozen=True, slots=True)
class _IndexedRows:
    """State of a step's rows. Replaced when the step is reset."""

    parts: list[_StepPart] = field(default_factory=list)
    columns: SummaryTable = field(default_factory=SummaryTable)
    bad: dict[int, UnreadableLine] = field(default_factory=dict)

    def location(self, row: int) -> tuple[str, int, int]:
        """Return path, start and length of a row's line."""
        return self.parts[self.columns.part[row]].path, self.columns.start[row], self.columns.length[row]


class StepFile:
    """The samples of one step, by row."""

    def __init__(self, name: str, step: int | None) -> None:
        self.name = name
        self.step = step
        self.version = 0
        """Number of resets. After a reset, row numbers refer to other samples."""
        self._rows = _IndexedRows()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows.columns)

    def __repr__(self) -> str:
        return f"<StepFile {self.name}: {len(self)} rows of {self.size} bytes>"

    @property
    def size(self) -> int:
        """Size of the files in bytes, at the last refresh."""
        return sum(part.size for part in self._rows.parts)

    @property
    def paths(self) -> list[Path]:
        """Paths of the files, one for each writer."""
        return [Path(part.path) for part in self._rows.parts]

    @property
    def is_indexed(self) -> bool:
        """Whether all lines that existed at the last refresh are indexed."""
        return all(part.seen >= part.size for part in self._rows.parts)

    @property
    def bad_rows(self) -> int:
        """Number of unreadable rows so far."""
        return len(self._rows.bad)

    def index(self, up_to: int | None = None, seconds: float | None = None) -> bool:
        """Index more lines.

        Args:
            up_to: Maximum number of lines to index.
            seconds: Maximum time to spend.

        Returns:
            True if all lines are indexed.
        """
        remaining = inf if up_to is None else up_to
        deadline = inf if seconds is None else time.monotonic() + seconds
        with self._lock:
            for number, part in enumerate(self._rows.parts):
                if remaining > 0 and part.seen < part.size:
                    remaining = self._index_part(number, part, remaining, deadline)
            return self.is_indexed

    def summary(self, row: int) -> SampleSummary | UnreadableLine:
        """Return the summary of a row, or the problem of an unreadable one."""
        rows = self._rows
        return rows.bad.get(row) or rows.columns.summary(row)

    def column(self, name: str) -> SummaryColumn:
        """Return one field of `SampleSummary` for all indexed rows: `column("score")[row]`."""
        return self._rows.columns[name]

    def record(self, row: int) -> Record:
        """Read a sample from disk.

        Raises:
            BadLine: If the line cannot be read.
        """
        return Record.parse(check_complete(self.raw(row)))

    def raw(self, row: int) -> bytes:
        """Return the line of a row as it is on disk.

        Raises:
            BadLine: If the file cannot be read.
        """
        path, start, length = self._rows.location(row)
        try:
            with Path(path).open("rb") as file:
                return _read_at(file, start, length)
        except OSError as error:
            raise BadLine(f"Cannot read {path}: {error.strerror}.") from error

    def scan(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the rows from `start` with their lines as they are on disk, indexing further lines if necessary.

        Stops at the end, or when the step is reset.
        """
        rows, row = self._rows, start
        while rows is self._rows:
            if row >= len(rows.columns) and self.index(up_to=SCAN_BATCH_LINES) and row >= len(rows.columns):
                return
            end = len(rows.columns)
            for part, part_rows in groupby(range(row, end), key=lambda row: rows.columns.part[row]):
                yield from _read_rows(rows, rows.parts[part].path, part_rows)
            row = max(row, end)

    def _index_part(self, number: int, part: _StepPart, remaining: float, deadline: float) -> float:
        """Index more lines of one file. Return the number of lines that may be indexed afterwards."""
        try:
            with Path(part.path).open("rb", READ_BUFFER_BYTES) as file:
                file.seek(part.end)
                before = part.end
                for line in read_lines(file):
                    remaining -= self._index_line(number, part, line, file.tell())
                    if remaining <= 0 or time.monotonic() > deadline:
                        remaining = 0
                        break
                else:
                    part.seen = max(file.tell(), part.size)
                if part.end > before:
                    part.fingerprint = _fingerprint(file, part.end)
        except OSError:  # removed, which the next refresh detects
            part.seen = part.size
        return remaining

    def _index_line(self, number: int, part: _StepPart, line: bytes, end: int) -> bool:
        """Add or replace the row of a line. Return False for a blank line, which has none."""
        rows, row, start = self._rows, part.incomplete_row, part.end
        complete = line.endswith(b"\n") or is_too_long(line)
        if complete:
            part.end, part.lines, part.incomplete_row = end, part.lines + 1, None
        part.seen = end
        if row is None:
            if line.isspace():
                return False
            row = len(rows.columns)
        if not complete:
            part.incomplete_row = row
        summary: SampleSummary | None = None
        try:
            summary = Record.parse(check_complete(line)).summary()
            rows.bad.pop(row, None)
        except BadLine as error:
            rows.bad[row] = UnreadableLine(part.path, part.lines + (not complete), str(error))
        rows.columns.put(row, number, start, len(line), summary)
        return True

    def _update(self, found: dict[str, os.stat_result]) -> bool:
        """Compare with the files that are on disk now, by path. Return True if anything changed."""
        with self._lock:
            changed = False
            if any(part.path not in found or _was_rewritten(part, found[part.path]) for part in self._rows.parts):
                self._rows, changed = _IndexedRows(), True
                self.version += 1
            known = {part.path: part for part in self._rows.parts}
            for path, stat in found.items():
                part = known.get(path)
                if part is None:
                    self._rows.parts.append(_StepPart(path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
                    changed = True
                elif (part.size, part.modified) != (stat.st_size, stat.st_mtime_ns):
                    part.size, part.modified = stat.st_size, stat.st_mtime_ns
                    changed = True
            return changed


class DumpDirectory:
    """Index of a directory of dumps, or of a single file.

    Args:
        directory: The `rollout_data_dir`, or one file of it.

    Raises:
        ConfigError: If the directory does not exist or cannot be read.
    """

    def __init__(self, directory: StrPath) -> None:
        self.directory = Path(directory)
        self._steps: dict[str, StepFile] = {}
        self._refresh_lock = threading.Lock()
        self._update_steps(dump_files(self.directory))

    @property
    def steps(self) -> list[StepFile]:
        """Steps in order, then files whose name is not a number. Files of several writers form one step."""
        return list(self._steps.values())

    def refresh(self) -> bool:
        """Look for added, grown, replaced and removed files. Return True if anything changed."""
        with self._refresh_lock:
            try:
                return self._update_steps(dump_files(self.directory))
            except ConfigError:
                return self._update_steps([])

    def _update_steps(self, files: list[DumpFile]) -> bool:
        found: dict[tuple[str, int | None], dict[str, os.stat_result]] = {}
        for file in files:
            with suppress(OSError):  # removed since it was listed
                stat = os.stat(file.path)  # noqa: PTH116 (faster, for thousands of files)
                found.setdefault((file.name, file.step), {})[file.path] = stat
        steps = {name: self._steps[name] if name in self._steps else StepFile(name, step) for name, step in found}
        changed = steps.keys() != self._steps.keys()
        for (name, _), stats in found.items():
            changed |= steps[name]._update(stats)
        self._steps = steps
        return changed


def _was_rewritten(part: _StepPart, stat: os.stat_result) -> bool:
    """Return True if a file is not the one that was indexed, or was truncated or rewritten."""
    if part.inode != stat.st_ino or stat.st_size < part.seen:
        return True
    if part.end == 0 or (part.size, part.modified) == (stat.st_size, stat.st_mtime_ns):
        return False
    with suppress(OSError), Path(part.path).open("rb") as file:
        return _fingerprint(file, part.end) != part.fingerprint
    return True


def _read_rows(rows: _IndexedRows, path: str, wanted: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of rows that are all in one file."""
    with suppress(OSError), Path(path).open("rb") as file:  # a removed file is detected by the next refresh
        for row in wanted:
            _, start, length = rows.location(row)
            yield row, _read_at(file, start, length)


def _fingerprint(file: BinaryIO, end: int) -> bytes:
    start = max(0, end - INDEX_FINGERPRINT_BYTES)
    return blake2b(_read_at(file, start, end - start), digest_size=16).digest()


def _read_at(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
