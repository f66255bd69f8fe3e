"""RowFiles: rows out of files, whatever their format.

JSON lines (`.jsonl`, also `.gz` and `.zst`), Parquet, Arrow, and what `datasets` saves to disk, which is Arrow. A file
is read a batch at a time and holds no more than that in memory, whatever its size. Rows that aren't wanted aren't
decoded: those of Parquet and Arrow are stepped over by what their metadata say, those of JSON by counting lines.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import orjson

from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.json_line import BadLine, decode
from toolroll.records.reader import is_too_long, lines, whole

BLOCK = 1 << 20
"""Bytes that are read at once where lines are only counted."""
BATCH = 256
"""Rows of Parquet or Arrow that are decoded at once. A row may be a long conversation."""
CHEAP = 256 << 20
"""Bytes of a file whose lines are counted only to know how many there are: a tenth of a second."""
LINES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*LINES, ".parquet", ".arrow", *(f"{suffix}{packed}" for suffix in LINES for packed in (".gz", ".zst")))


class BadRow(NamedTuple):
    """A row that can't be used."""

    number: int
    why: str


Row = dict[str, Any]
Read = Generator[tuple[int, Row] | BadRow, None, int]
"""Rows with their numbers in the file, from 0; in the end, how many rows the file has."""


class RowFile(Protocol):
    """One file of rows."""

    path: Path

    def rows(self, start: int = 0) -> Read:
        """The rows from number `start` on."""
        ...

    def known_length(self) -> int | None:
        """How many rows there are, where that is cheap to know."""
        ...


def find(path: str) -> list[RowFile]:
    """The file of this name, or those in the directory of this name and below it, sorted. Raises ConfigError."""
    place = Path(path)
    if place.is_file():
        return [_file(place)]
    if not place.is_dir():
        raise ConfigError(f"data.path: there is no file or directory {path}.")
    if (place / "dataset_dict.json").is_file():
        return _only_split(place)
    if (place / "state.json").is_file():
        return _saved(place)
    below = (file for file in place.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    files = sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(place).parts))
    if not files:
        raise ConfigError(f"data.path: {path} has no file that ends with {', '.join(SUFFIXES[:5])}.")
    return [_file(file) for file in files]


def _file(path: Path) -> RowFile:
    if path.suffix == ".parquet":
        return ParquetFile(path)
    if path.suffix == ".arrow":
        return ArrowFile(path)
    if path.suffix == ".json":
        with path.open("rb") as file:
            if file.read(BLOCK).lstrip().startswith(b"["):
                raise ConfigError(f"data.path: {path} is one list. Put a row in each line: jq -c '.[]' {path}")
    if path.name.endswith(SUFFIXES):
        return LinesFile(path)
    raise ConfigError(f"data.path: what is in {path}? The name of its format is missing: {', '.join(SUFFIXES[:5])}.")


def _only_split(place: Path) -> list[RowFile]:
    """The data set of a directory of splits: which one is the user's to say, unless there is only one."""
    splits = list(orjson.loads((place / "dataset_dict.json").read_bytes()).get("splits", []))
    if len(splits) != 1:
        named = ", ".join(str(place / split) for split in splits)
        raise ConfigError(f"data.path: {place} is a data set of several splits. Name one of them: {named}.")
    return _saved(place / splits[0])


def _saved(place: Path) -> list[RowFile]:
    """What `datasets` saved here. Other Arrow files beside these are its caches."""
    try:
        named = orjson.loads((place / "state.json").read_bytes())["_data_files"]
        return [ArrowFile(place / entry["filename"]) for entry in named]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"data.path: {place} is no data set that was saved whole: {error!r}.") from error


class LinesFile:
    """JSON objects, one in a line. Blank lines are rows that can't be used, except at the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, start: int = 0) -> Read:
        """The rows from number `start` on."""
        with self._open() as file:
            first, length, rest = _skip(file, start)
            for number, line in enumerate(_joined(rest, file), first):
                if not line.isspace():
                    yield from (BadRow(blank, "The line is blank.") for blank in range(max(start, length), number))
                    yield _parsed(number, line)
                    length = number + 1
            return length

    def known_length(self) -> int | None:
        """How many lines there are, where that is cheap to know."""
        if self.path.suffix in (".gz", ".zst") or self.path.stat().st_size > CHEAP:
            return None
        with self._open() as file:
            return _skip(file, 1 << 62)[1]

    def _open(self) -> BinaryIO:
        if self.path.suffix == ".gz":
            return gzip.open(self.path, "rb")  # type: ignore[return-value]  # typeshed: it has what is used here
        if self.path.suffix == ".zst":
            return io.BufferedReader(_pyarrow().input_stream(str(self.path), compression="zstd"), BLOCK)
        return self.path.open("rb", BLOCK)


def _skip(file: BinaryIO, wanted: int) -> tuple[int, int, bytes]:
    """Step over lines.

    Over how many; how many there were up to the last that isn't blank; what was read beyond them.
    """
    ended = length = 0
    while ended < wanted and (block := file.read(BLOCK)):
        newlines, rest = block.count(b"\n"), b""
        if ended + newlines >= wanted:
            newlines, place = wanted - ended, 0
            for _ in range(newlines):
                place = block.index(b"\n", place) + 1
            block, rest = block[:place], block[place:]
        if text := block.rstrip():
            length = ended + newlines - block.count(b"\n", len(text)) + 1
        ended += newlines
        if ended == wanted:
            return ended, length, rest
    return ended, length, b""


def _joined(beginning: bytes, file: BinaryIO) -> Iterator[bytes]:
    """The lines of what was read already, and of the rest of the file."""
    whole_lines, _, half = beginning.rpartition(b"\n")
    if whole_lines or beginning.startswith(b"\n"):
        yield from io.BytesIO(whole_lines + b"\n")
    if half:
        yield half + next(lines(file), b"")
    yield from lines(file)


def _parsed(number: int, line: bytes) -> tuple[int, Row] | BadRow:
    try:
        if is_too_long(line):
            whole(line)
        return number, decode(line)
    except BadLine as error:
        return BadRow(number, str(error))


class ParquetFile:
    """Parquet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, start: int = 0) -> Read:
        """The rows from number `start` on. Groups of rows before it are not read."""
        with self._open() as file:
            first, groups = 0, list(range(file.num_row_groups))
            while groups and first + (size := file.metadata.row_group(groups[0]).num_rows) <= start:
                first += size
                groups.pop(0)
            if groups:
                yield from _decoded(file.iter_batches(BATCH, groups, use_threads=False), first, start)
            return int(file.metadata.num_rows)

    def known_length(self) -> int | None:
        """How many rows there are: the file says so."""
        with self._open() as file:
            return int(file.metadata.num_rows)

    def _open(self) -> Any:
        _pyarrow()
        from pyarrow import ArrowException, parquet

        try:
            return parquet.ParquetFile(self.path, memory_map=True, buffer_size=BLOCK, pre_buffer=False)
        except ArrowException as error:
            raise ConfigError(f"data.path: {self.path} can't be read: {str(error).splitlines()[0]}") from error


class ArrowFile:
    """Arrow, as a stream (which is what `datasets` writes) or as a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, start: int = 0) -> Read:
        """The rows from number `start` on. The file is mapped: batches before it are not read."""
        first = 0
        for batch in self._batches():
            if first + batch.num_rows > start:
                yield from _decoded(_slices(batch), first, start)
            first += batch.num_rows
        return first

    def known_length(self) -> int | None:
        """How many rows there are, by the heads of the batches."""
        return sum(int(batch.num_rows) for batch in self._batches())

    def _batches(self) -> Iterator[Any]:
        pyarrow = _pyarrow()
        from pyarrow import ipc

        try:
            with pyarrow.memory_map(str(self.path)) as mapped:
                if mapped.read(6) == b"ARROW1":
                    with ipc.open_file(mapped) as file:
                        yield from (file.get_batch(number) for number in range(file.num_record_batches))
                else:
                    mapped.seek(0)
                    with ipc.open_stream(mapped) as stream:
                        yield from stream
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"data.path: {self.path} can't be read: {str(error).splitlines()[0]}") from error


def _slices(batch: Any) -> Iterator[Any]:
    return (batch.slice(place, BATCH) for place in range(0, batch.num_rows, BATCH))


def _decoded(batches: Iterator[Any], first: int, start: int) -> Iterator[tuple[int, Row]]:
    """The rows of batches, the first of which begins with row `first`, from row `start` on."""
    for batch in batches:
        skipped = min(max(start - first, 0), batch.num_rows)
        yield from enumerate(batch.slice(skipped).to_pylist(), first + skipped)
        first += batch.num_rows


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra("pyarrow", "records") from error
    return pyarrow
