"""Read rows from data files.

Supported are JSON lines (`.jsonl`, also `.gz` and `.zst`), Parquet, Arrow, and data sets that `datasets` saved to disk.
Files are read in batches, so memory use does not depend on their size. Skipped rows are not decoded: Parquet and Arrow
rows are skipped by the files' metadata, JSON rows by counting lines.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.json_line import BadLine, decode
from toolroll.records.reader import check_complete, is_too_long, read_lines

READ_BLOCK_BYTES = 1 << 20
"""Size of the read buffers."""
DECODE_BATCH_ROWS = 256
"""Number of Parquet or Arrow rows to decode at once. A row may contain a long conversation."""
MAX_COUNTED_FILE_BYTES = 256 << 20
"""Maximum size of a file whose lines are counted in advance, which takes about 0.1 s."""
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
UNCOMPRESSED_SUFFIXES = (*JSON_LINES_SUFFIXES, ".parquet", ".arrow")
COMPRESSED_SUFFIXES = tuple(suffix + ending for suffix in JSON_LINES_SUFFIXES for ending in (".gz", ".zst"))
DATA_FILE_SUFFIXES = UNCOMPRESSED_SUFFIXES + COMPRESSED_SUFFIXES


class BadRow(NamedTuple):
    """A row that cannot be used."""

    number: int
    reason: str


Row = dict[str, Any]
NumberedRow = tuple[int, Row]
RowIterator = Generator[NumberedRow | BadRow, None, int]
"""Yields rows with their numbers. Returns the number of the first row after the file."""


class RowFile:
    """Base class of data files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, first: int, start: int) -> RowIterator:
        """Yield the rows from number `start` on. The first row of the file has number `first`."""
        raise NotImplementedError

    def known_length(self) -> int | None:
        """Return the number of rows, or None if counting them would be expensive."""
        raise NotImplementedError

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"data.path: Cannot read {self.path}: {str(error).splitlines()[0]}")


def find_row_files(path: str) -> list[RowFile]:
    """Return the data file at a path, or all data files below a directory in the order of their paths.

    Raises:
        ConfigError: If the path does not exist, or the format is not supported.
    """
    location = Path(path)
    if location.is_file():
        return [_open_row_file(location)]
    if not location.is_dir():
        raise ConfigError(f"data.path: File or directory not found: {path}.")
    if (location / "dataset_dict.json").is_file():
        return _find_only_split(location)
    if (location / "state.json").is_file():
        return _find_saved_data_set(location)
    found = (file for file in location.rglob("*") if file.name.endswith(DATA_FILE_SUFFIXES) and file.is_file())
    files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(location).parts))
    if not files:
        raise ConfigError(f"data.path: No data files in {path}. Supported: {', '.join(UNCOMPRESSED_SUFFIXES)}.")
    return [_open_row_file(file) for file in files]


def _open_row_file(path: Path) -> RowFile:
    if path.suffix == ".parquet":
        return ParquetFile(path)
    if path.suffix == ".arrow":
        return ArrowFile(path)
    if path.suffix == ".json":
        with path.open("rb") as file:
            if file.read(READ_BLOCK_BYTES).lstrip().startswith(b"["):
                raise ConfigError(f"data.path: {path} is a JSON list. Convert it to JSON lines: jq -c '.[]' {path}")
    if path.name.endswith(DATA_FILE_SUFFIXES):
        return LinesFile(path)
    raise ConfigError(f"data.path: Unknown format of {path}. Supported: {', '.join(UNCOMPRESSED_SUFFIXES)}.")


def _find_only_split(directory: Path) -> list[RowFile]:
    splits = list(orjson.loads((directory / "dataset_dict.json").read_bytes()).get("splits", []))
    if len(splits) != 1:
        paths = ", ".join(str(directory / split) for split in splits)
        raise ConfigError(f"data.path: {directory} has several splits. Choose one of: {paths}.")
    return _find_saved_data_set(directory / splits[0])


def _find_saved_data_set(directory: Path) -> list[RowFile]:
    """Return the files that `datasets` saved. Other Arrow files in the directory are its caches."""
    try:
        entries = orjson.loads((directory / "state.json").read_bytes())["_data_files"]
        return [ArrowFile(directory / entry["filename"]) for entry in entries]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"data.path: {directory} is not a complete saved data set: {error!r}.") from error


class LinesFile(RowFile):
    """JSON lines: one object per line. Blank lines are bad rows, except at the end of the file."""

    def rows(self, first: int, start: int) -> RowIterator:
        """Yield the rows from number `start` on. The first row of the file has number `first`."""
        with self._open() as file:
            skipped, length = _skip_blocks(file, start - first)
            end = first + length
            for number, line in enumerate(read_lines(file), first + skipped):
                if line.isspace():
                    continue
                if number >= start:
                    yield from (BadRow(blank, "The line is blank.") for blank in range(max(start, end), number))
                    yield _parse_line(number, line)
                end = number + 1
        return end

    def known_length(self) -> int | None:
        """Return the number of lines, or None if the file is compressed or large."""
        if self.path.name.endswith(COMPRESSED_SUFFIXES) or self.path.stat().st_size > MAX_COUNTED_FILE_BYTES:
            return None
        with self._open() as file:
            return _skip_blocks(file, 1 << 62)[1]

    def _open(self) -> io.BufferedReader:
        if self.path.suffix == ".gz":
            raw: Any = gzip.GzipFile(self.path)
        elif self.path.suffix == ".zst":
            raw = _import_pyarrow().input_stream(str(self.path), compression="zstd")
        else:
            raw = io.FileIO(self.path)
        return io.BufferedReader(raw, READ_BLOCK_BYTES)


def _skip_blocks(file: io.BufferedReader, start: int) -> tuple[int, int]:
    """Skip the blocks that end before line number `start`, counted from 0.

    Returns:
        The number of the line at which the file is now, and the number of lines up to the last one that is not blank.
    """
    number = length = 0
    while (block := file.peek(1)) and number + (newlines := block.count(b"\n")) < start:
        if text := block.rstrip():
            length = number + newlines - block.count(b"\n", len(text)) + 1
        number += newlines
        file.read(len(block))
    return number, length


def _parse_line(number: int, line: bytes) -> NumberedRow | BadRow:
    try:
        if is_too_long(line):
            check_complete(line)
        return number, decode(line)
    except BadLine as error:
        return BadRow(number, str(error))


class ParquetFile(RowFile):
    """Parquet file."""

    def rows(self, first: int, start: int) -> RowIterator:
        """Yield the rows from number `start` on. Row groups before it are not read."""
        with self._open() as file:
            end, groups = first + int(file.metadata.num_rows), list(range(file.num_row_groups))
            while groups and first + (size := file.metadata.row_group(groups[0]).num_rows) <= start:
                first += size
                groups.pop(0)
            if groups:
                batches = file.iter_batches(DECODE_BATCH_ROWS, groups, use_threads=False)
                yield from _decode_batches(batches, first, start)
        return end

    def known_length(self) -> int | None:
        """Return the number of rows, which the file's metadata contains."""
        with self._open() as file:
            return int(file.metadata.num_rows)

    def _open(self) -> Any:
        _import_pyarrow()
        from pyarrow import ArrowException, parquet

        try:
            return parquet.ParquetFile(self.path, memory_map=True, buffer_size=READ_BLOCK_BYTES, pre_buffer=False)
        except ArrowException as error:
            raise self._unreadable(error) from error


class ArrowFile(RowFile):
    """Arrow data in the stream format, which `datasets` writes, or in the file format."""

    def rows(self, first: int, start: int) -> RowIterator:
        """Yield the rows from number `start` on. The file is memory-mapped: batches before it are not read."""
        for batch in self._batches():
            if first + batch.num_rows > start:
                slices = (batch.slice(at, DECODE_BATCH_ROWS) for at in range(0, batch.num_rows, DECODE_BATCH_ROWS))
                yield from _decode_batches(slices, first, start)
            first += batch.num_rows
        return first

    def known_length(self) -> int | None:
        """Return the number of rows, which the headers of the batches contain."""
        return sum(int(batch.num_rows) for batch in self._batches())

    def _batches(self) -> Iterator[Any]:
        pyarrow = _import_pyarrow()
        from pyarrow import ipc

        try:
            with pyarrow.memory_map(str(self.path)) as mapped:
                if mapped.read(6) == b"ARROW1":
                    with ipc.open_file(mapped) as file:
                        yield from (file.get_batch(index) for index in range(file.num_record_batches))
                else:
                    mapped.seek(0)
                    with ipc.open_stream(mapped) as stream:
                        yield from stream
        except (pyarrow.ArrowException, OSError) as error:
            raise self._unreadable(error) from error


def _decode_batches(batches: Iterator[Any], first: int, start: int) -> Iterator[NumberedRow]:
    """Yield the rows from number `start` on. The first batch starts with row number `first`."""
    for batch in batches:
        skipped = min(max(start - first, 0), batch.num_rows)
        yield from enumerate(batch.slice(skipped).to_pylist(), first + skipped)
        first += batch.num_rows


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra("pyarrow", "records") from error
    return pyarrow
