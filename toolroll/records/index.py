"""Shelf: a directory of dumps, which may be large and may grow, looked into without reading it all.

    shelf = Shelf("dumps")
    first = shelf.steps[0]
    first.index(up_to=100)
    first.summary(0), first.record(0)

Listing it costs a look at each file's size. A step is read when it is indexed, as far as is asked, and then a hundred
bytes are kept of each sample (columns.py); a record is read from its place in the file when it is shown.

Rows are the lines that aren't empty, in the order in which they were found: a row's number never changes while its step
isn't begun anew. That happens when a file was replaced, cut short or removed; `version` then goes up. A last line that
is half is a row too: a bad one, until it is whole.

Any thread may call anything here. `index` is what takes time: give it to a thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from math import inf
from pathlib import Path
from typing import BinaryIO

from toolroll.errors import ConfigError
from toolroll.records.columns import Column, Columns
from toolroll.records.directory import DumpFile, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.reader import BUFFER, is_too_long, lines, whole
from toolroll.records.record import Record
from toolroll.records.summary import Bad, Summary

REMEMBERED = 4096
"""Bytes before the place up to which a file is indexed. If they are others later, it is another file."""
AT_ONCE = 256
"""Lines that `scan` indexes at a time, where it comes to the end of the index."""


@dataclass(slots=True)
class _Part:
    """One writer's file of a step."""

    path: str
    inode: int
    size: int
    modified: int
    end: int = 0
    """Up to where whole lines are indexed."""
    seen: int = 0
    """Up to where anything is: a half line is seen, and looked at again when there is more of it."""
    lines: int = 0
    """Up to `end`, empty ones too."""
    half: int | None = None
    """The row of the half line."""
    mark: bytes = b""
    """Of what is right before `end`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is known of a step's rows, until it is begun anew."""

    parts: list[_Part] = field(default_factory=list)
    columns: Columns = field(default_factory=Columns)
    bad: dict[int, Bad] = field(default_factory=dict)

    def place(self, row: int) -> tuple[str, int, int]:
        """The file, and where in it the line begins and how long it is."""
        columns = self.columns
        return self.parts[columns.part[row] or 0].path, columns.start[row] or 0, columns.length[row] or 0


class StepFile:
    """One step: its samples, by row."""

    def __init__(self, name: str, step: int | None) -> None:
        self.name = name
        self.step = step
        self.version = 0
        """Goes up when the step was begun anew, and all rows are others."""
        self._rows = _Rows()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows.columns)

    def __repr__(self) -> str:
        return f"<StepFile {self.name}: {len(self)} rows of {self.size} bytes>"

    @property
    def size(self) -> int:
        """Bytes, as of the last look at the directory."""
        return sum(part.size for part in self._rows.parts)

    @property
    def paths(self) -> list[Path]:
        """Its files, one for each writer."""
        return [Path(part.path) for part in self._rows.parts]

    @property
    def is_indexed(self) -> bool:
        """Whether all that was there at the last look at the directory has its row."""
        return all(part.seen >= part.size for part in self._rows.parts)

    @property
    def bad(self) -> int:
        """Rows that can't be read, so far."""
        return len(self._rows.bad)

    def index(self, up_to: int | None = None, seconds: float | None = None) -> bool:
        """Index on: so many more lines at the most, for so long at the most. Whether the end was reached."""
        left, stop = inf if up_to is None else up_to, inf if seconds is None else time.monotonic() + seconds
        with self._lock:
            for number, part in enumerate(self._rows.parts):
                if left > 0 and part.seen < part.size:
                    left = self._index_part(number, part, left, stop)
            return self.is_indexed

    def summary(self, row: int) -> Summary | Bad:
        """What a list shows of a row."""
        rows = self._rows
        return rows.bad.get(row) or rows.columns.summary(row)

    def column(self, name: str) -> Column:
        """One field of Summary, for all rows that are indexed: `column("score")[row]`."""
        return self._rows.columns[name]

    def record(self, row: int) -> Record:
        """The sample itself, read from the disk. Raises BadLine where it can't be read."""
        return Record.parse(whole(self.raw(row)))

    def raw(self, row: int) -> bytes:
        """The line as it is on the disk. Raises BadLine where the file is gone."""
        path, start, length = self._rows.place(row)
        try:
            with Path(path).open("rb") as file:
                return _read_at(file, start, length)
        except OSError as error:
            raise BadLine(f"{path} can't be read: {error.strerror}.") from error

    def scan(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """The rows from `start` on, each with its line as it is on the disk. What isn't indexed yet is, on the way.

        Ends at the end, and where the step was begun anew.
        """
        rows, row = self._rows, start
        while rows is self._rows:
            if row >= len(rows.columns) and self.index(up_to=AT_ONCE) and row >= len(rows.columns):
                return
            until = len(rows.columns)
            for part, some in groupby(range(row, until), key=rows.columns.part.__getitem__):
                yield from _lines_at(rows, rows.parts[part or 0].path, some)
            row = max(row, until)

    def _index_part(self, number: int, part: _Part, left: float, stop: float) -> float:
        """Index on in one file; how many lines may be indexed after that."""
        try:
            with Path(part.path).open("rb", BUFFER) as file:
                file.seek(part.end)
                before = part.end
                for line in lines(file):
                    left -= self._index_line(number, part, line, file.tell())
                    if left <= 0 or time.monotonic() > stop:
                        left = 0
                        break
                else:
                    part.seen = max(file.tell(), part.size)
                if part.end > before:
                    part.mark = _mark(file, part.end)
        except OSError:  # gone; the next look at the directory says so
            part.seen = part.size
        return left

    def _index_line(self, number: int, part: _Part, line: bytes, end: int) -> bool:
        """Give a line its row. Whether it has one."""
        rows, row, start = self._rows, part.half, part.end
        ended = line.endswith(b"\n") or is_too_long(line)
        if ended:
            part.end, part.lines, part.half = end, part.lines + 1, None
        part.seen = end
        if row is None and line.isspace():
            return False
        new = row is None
        row = len(rows.columns) if row is None else row
        if not ended:
            part.half = row
        summary: Summary | None = None
        try:
            summary = Record.parse(whole(line)).summary()
            rows.bad.pop(row, None)
        except BadLine as error:
            rows.bad[row] = Bad(part.path, part.lines + (not ended), str(error))
        if new:
            rows.columns.append(number, start, len(line), summary)
        else:
            rows.columns.set(row, len(line), summary)
        return True

    def _look(self, found: list[tuple[str, os.stat_result]]) -> bool:
        """Take in what is on the disk now. Whether anything changed."""
        with self._lock:
            stats, changed = dict(found), False
            if any(part.path not in stats or _is_another(part, stats[part.path]) for part in self._rows.parts):
                self._rows, changed = _Rows(), True
                self.version += 1
            known = {part.path: part for part in self._rows.parts}
            for path, stat in found:
                part = known.get(path)
                if part is None:
                    self._rows.parts.append(_Part(path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
                    changed = True
                elif (part.size, part.modified) != (stat.st_size, stat.st_mtime_ns):
                    part.size, part.modified = stat.st_size, stat.st_mtime_ns
                    changed = True
            return changed


class Shelf:
    """A directory of dumps, or one file of it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._steps: dict[str, StepFile] = {}
        self._looking = threading.Lock()
        self._take_in(dump_files(self.directory))

    @property
    def steps(self) -> list[StepFile]:
        """By step; those whose name is no number last, by name. The files of several writers are one step."""
        return list(self._steps.values())

    def refresh(self) -> bool:
        """Look at the directory again. Whether anything changed: files added, grown, replaced, gone."""
        with self._looking:
            try:
                return self._take_in(dump_files(self.directory))
            except ConfigError:
                return self._take_in([])

    def _take_in(self, files: list[DumpFile]) -> bool:
        found: dict[str, list[tuple[str, os.stat_result]]] = {}
        steps: dict[str, StepFile] = {}
        for file in files:
            try:
                stat = os.stat(file.path)  # noqa: PTH116 (a thousand of them, at every look)
            except OSError:  # gone since it was listed
                continue
            found.setdefault(file.name, []).append((file.path, stat))
            if file.name not in steps:
                known = self._steps.get(file.name)
                steps[file.name] = StepFile(file.name, file.step) if known is None else known
        changed = steps.keys() != self._steps.keys()
        for name, step in steps.items():
            changed |= step._look(found[name])
        self._steps = steps
        return changed


def _is_another(part: _Part, stat: os.stat_result) -> bool:
    """Whether a file is no more the one that was indexed."""
    if part.inode != stat.st_ino or stat.st_size < part.seen:
        return True
    if part.end == 0 or (part.size, part.modified) == (stat.st_size, stat.st_mtime_ns):
        return False
    try:
        with Path(part.path).open("rb") as file:
            return _mark(file, part.end) != part.mark
    except OSError:
        return True


def _lines_at(rows: _Rows, path: str, some: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """The lines of these rows, which are all in one file."""
    try:
        with Path(path).open("rb") as file:
            for row in some:
                _, start, length = rows.place(row)
                yield row, _read_at(file, start, length)
    except OSError:  # gone; the next look at the directory says so
        return


def _mark(file: BinaryIO, end: int) -> bytes:
    start = max(0, end - REMEMBERED)
    return blake2b(_read_at(file, start, end - start), digest_size=16).digest()


def _read_at(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
