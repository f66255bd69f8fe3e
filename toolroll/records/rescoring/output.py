"""Output files of re-scoring, which can be resumed after a kill at any moment.

The output of `{step}.jsonl` is written to `.{step}.jsonl.part`, in the order of the source, and renamed when it is
complete. A later process compares both files with the source line by line, and scores only what they lack:

- Lines of the part are kept up to the first one that does not match the source or lacks a score. The rest is cut off.
- Scores of a complete file from before are reused. The file is written again only if a line lacks a score, or if the
  source has changed.
- From the first line of a file that was not kept, its scores are found by the content of the line, wherever it is. They
  need about 300 bytes of memory per line. A process that is killed loses those of the part that it has not written
  again.

Invariant: a complete file has one line for each line of the source, in the same order. The remains of a killed process
cannot break it, because no line is kept without comparing it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import orjson

from toolroll.errors import ConfigError, RecordsNotWritten
from toolroll.records.directory import DUMP_SUFFIX, StrPath
from toolroll.records.image_directory import IMAGES_NAME
from toolroll.records.reader import MAX_LINE_BYTES
from toolroll.records.rescoring.line import SCORES_START, LineFrame, Scores

IDENTITY_FILE = ".rescore.json"
LOCK_FILE = ".lock"
PART_SUFFIX = ".part"
WRITE_BUFFER_BYTES = 256 * 1024
COPY_BUFFER_BYTES = 1024 * 1024


class KnownScores(NamedTuple):
    """Scores that an earlier process has written for a line of the source."""

    scores: Scores
    """The known scores, without those that are None. Empty if there are none."""
    is_written: bool
    """Whether the output has the line already."""
    has_failed: bool = False
    """Whether an earlier process could not compute a score."""


class RescoredDirectory:
    """Output directory of a re-scoring, locked for this process. Use it as a context manager.

    Args:
        directory: The output directory. It is created if necessary.
        source: The directory of the records that are re-scored, or one of its files.
        rewards: Description of the reward functions by name.

    Raises:
        ConfigError: If the directory overlaps with the source, contains other files, belongs to a re-scoring of other
            records or with other functions, or is in use.
    """

    def __init__(self, directory: Path, source: Path, rewards: Mapping[str, Any]) -> None:
        self.directory = directory
        self._is_single_file = source.is_file()
        self._base = source.parent if self._is_single_file else source
        _check_apart(directory.resolve(), self._base.resolve())
        self._resources = ExitStack()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._check_contents()
            self._lock()
            self._check_identity({"source": str(self._base.resolve()), "rewards": dict(rewards)})
            images = self._base / IMAGES_NAME
            if images.is_dir() and not (directory / IMAGES_NAME).exists():
                (directory / IMAGES_NAME).symlink_to(images.resolve())
        except OSError as error:
            self._resources.close()
            raise ConfigError(f"Cannot use the output directory {directory}: {error.strerror}.") from error
        except ConfigError:
            self._resources.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def output(self, source_file: StrPath) -> RescoredFile:
        """Return the output of a record file of the source."""
        return RescoredFile(self.directory / Path(source_file).relative_to(self._base))

    def remove_outdated(self, source_files: Sequence[StrPath]) -> None:
        """Delete the outputs of files that were removed or renamed, whose records would be there twice.

        Does nothing if the source is a single file, or has no files, for example because its disk is not mounted.

        Args:
            source_files: All record files of the source.

        Raises:
            RecordsNotWritten: If a file cannot be deleted.
        """
        if self._is_single_file or not source_files:
            return
        outputs = [RescoredFile.paths(self.directory / Path(file).relative_to(self._base)) for file in source_files]
        kept = {path for paths in outputs for path in paths}
        for pattern in (f"*{DUMP_SUFFIX}", f".*{DUMP_SUFFIX}{PART_SUFFIX}"):
            for path in [*self.directory.glob(pattern), *self.directory.glob(f"*/{pattern}")]:
                if path not in kept and not path.parent.is_symlink():  # the images are those of the source
                    try:
                        path.unlink()
                    except OSError as error:
                        raise RecordsNotWritten.because(error, path) from error

    def _check_contents(self) -> None:
        names = {path.name for path in self.directory.iterdir()}
        others = names - {LOCK_FILE, f"{IDENTITY_FILE}.new"}
        if others and IDENTITY_FILE not in names:
            problem = f"The output directory {self.directory} is not empty: it has {min(others)!r}"
            raise ConfigError(f"{problem}. Choose another --out.")

    def _lock(self) -> None:
        file = self._resources.enter_context((self.directory / LOCK_FILE).open("ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"Another process is writing to {self.directory}. Wait until it ends, or choose another --out."
            raise ConfigError(problem) from None

    def _check_identity(self, identity: dict[str, Any]) -> None:
        file = self.directory / IDENTITY_FILE
        if not file.exists():
            complete = file.with_name(f"{file.name}.new")
            complete.write_bytes(orjson.dumps(identity, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            complete.replace(file)
            return
        try:
            existing = dict(orjson.loads(file.read_bytes()))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file} is damaged: {error}. Choose another --out.") from error
        for key, value in identity.items():
            if existing.get(key) != value:
                raise ConfigError(
                    f"{self.directory} has the scores of {key}={existing.get(key)!r}, but this command has "
                    f"{key}={value!r}. Choose another --out."
                )


class RescoredFile:
    """Output of one record file. For each line of the source, call `known`, and `write` unless it is written already.

    Args:
        path: Path of the complete file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._part_path = self.paths(path)
        self._resources = ExitStack()
        self._complete = self._open_earlier(path)
        self._unfinished = self._open_earlier(self._part_path)
        self._part: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.flush()
        finally:
            with suppress(OSError):  # closing writes what flush() could not
                self._resources.close()

    @staticmethod
    def paths(path: Path) -> tuple[Path, Path]:
        """Return the paths of the complete and of the unfinished file."""
        return path, path.with_name(f".{path.name}{PART_SUFFIX}")

    def known(self, frame: LineFrame, names: frozenset[str]) -> KnownScores:
        """Return what is known of the next line of the source.

        Args:
            frame: The line.
            names: Names of the scores that the line needs. A line that lacks one is written again.
        """
        complete = None if self._complete is None else self._complete.next_scores(frame)
        if self._part is None and self._unfinished is not None:
            if (scores := self._unfinished.next_scores(frame, names)) is not None:
                return KnownScores(_without_none(scores), is_written=True)
            self._open_part(self._unfinished.end)
        if self._part is None:
            if complete is not None and names <= _without_none(complete).keys():
                return KnownScores(_without_none(complete), is_written=True)
            self._copy_complete(0 if self._complete is None else self._complete.last_start)
        moved = [earlier.moved_scores(frame) for earlier in (self._complete, self._unfinished) if earlier is not None]
        known: Scores = {}
        for scores in (complete or {}, *moved):
            known |= {name: score for name, score in scores.items() if known.get(name) is None}
        return KnownScores(_without_none(known), is_written=False, has_failed=None in known.values())

    def write(self, line: bytes) -> None:
        """Write the next line.

        Raises:
            RecordsNotWritten: If the line cannot be written.
        """
        assert self._part is not None, "known() opens the file before the first line"
        try:
            self._part.write(line)
        except OSError as error:
            raise RecordsNotWritten.because(error, self._part_path) from error

    def flush(self) -> None:
        """Write what is buffered, so that it survives the death of the process."""
        if self._part is not None and not self._part.closed:
            try:
                self._part.flush()
            except OSError as error:
                raise RecordsNotWritten.because(error, self._part_path) from error

    def finish(self) -> None:
        """Complete the file after the last line of the source."""
        if self._part is None and self._unfinished is not None:
            self._open_part(self._unfinished.end)
        elif self._part is None:
            if self._complete is not None and self._complete.is_at_end:
                return
            self._copy_complete(0 if self._complete is None else self._complete.end)
        self.flush()
        self._part_path.replace(self._path)

    def _open_earlier(self, path: Path) -> _EarlierLines | None:
        return _EarlierLines(self._resources.enter_context(path.open("rb"))) if path.exists() else None

    def _open_part(self, size: int) -> None:
        """Open the part to continue after the first `size` bytes."""
        try:
            self._part_path.parent.mkdir(parents=True, exist_ok=True)
            self._part_path.touch()
            self._part = self._resources.enter_context(self._part_path.open("r+b", WRITE_BUFFER_BYTES))
            self._part.truncate(size)
            self._part.seek(size)
        except OSError as error:
            raise RecordsNotWritten.because(error, self._part_path) from error

    def _copy_complete(self, size: int) -> None:
        """Start the part with the first `size` bytes of the complete file."""
        self._open_part(0)
        if size:
            with self._path.open("rb") as file:
                while size and (block := file.read(min(size, COPY_BUFFER_BYTES))):
                    self.write(block)
                    size -= len(block)


class _EarlierLines:
    """Lines of a file that an earlier process wrote, read along with those of the source."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._matches = True
        self._moved: dict[bytes, list[bytes]] = {}
        """Scores in the lines from the first one that did not match, by the hash of the rest of the line."""
        self.end = 0
        """Position after the last line that matched."""
        self.last_start = 0
        """Position of the last line that was compared: those before it matched."""

    def next_scores(self, frame: LineFrame, names: frozenset[str] = frozenset()) -> Scores | None:
        """Return the scores of the next line, or None if it or a line before it does not match.

        Args:
            frame: The line of the source.
            names: Names of the scores that a line must have to match.
        """
        if not self._matches:
            return None
        self.last_start = self.end
        line = self._file.readline(MAX_LINE_BYTES)
        scores = frame.scores_in(line)
        if scores is None or not names <= _without_none(scores).keys():
            self._matches = False
            self._index_rest(line)
        else:
            self.end += len(line)
        return scores if self._matches else None

    def moved_scores(self, frame: LineFrame) -> Scores:
        """Return the scores of a line that has moved, once for each copy of the line. Empty if there is none."""
        tails = self._moved.get(_hash(frame.head))
        return (frame.scores_in(frame.head + SCORES_START + tails.pop(0)) or {}) if tails else {}

    def _index_rest(self, line: bytes) -> None:
        while line:
            head, start, tail = line.rpartition(SCORES_START)
            if start:
                self._moved.setdefault(_hash(head), []).append(tail)
            line = self._file.readline(MAX_LINE_BYTES)

    @property
    def is_at_end(self) -> bool:
        """Whether all lines of the file matched."""
        return self._matches and not self._file.read(1)


def _hash(head: bytes) -> bytes:
    return blake2b(head, digest_size=16).digest()


def _without_none(scores: Scores) -> Scores:
    return {name: score for name, score in scores.items() if score is not None}


def _check_apart(directory: Path, base: Path) -> None:
    if directory == base or directory in base.parents or base in directory.parents:
        problem = f"The output directory {directory} overlaps with the records in {base}"
        raise ConfigError(f"{problem}. Choose another --out, because records are never changed.")
