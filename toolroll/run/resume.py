"""Track which samples of a run are done, so that an interrupted run can resume.

The records are the source of truth: a sample is done when its record exists. When all samples of a step are done, the
step, its aggregates and its counts for the alarms are appended to the file `.complete`, so that a resumed run reads
only the records of incomplete steps. The file is a cache: an entry counts only if the record files of the step have the
size and modification time that it states, and if it was made with the same `solved_at`. Otherwise the records are read,
and samples whose records are missing are produced again.

A resumed run attempts samples again that failed because of the infrastructure: their records are moved to the directory
`.superseded`, which readers skip.

Invariants:

- A sample that is done is never assigned again; a sample that is not done is always assigned.
- Memory use grows with the number of incomplete steps, not with the length of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from toolroll.records.directory import DUMP_SUFFIX, DumpFile, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.reader import RecordIterator, check_complete, read_lines
from toolroll.records.record import Record
from toolroll.records.stats.alarm_blocks import AlarmBlocks, BlockCounts
from toolroll.run.aggregates import RunAggregates, SampleOutcome

logger = logging.getLogger(__name__)

COMPLETE_STEPS_FILE = ".complete"
SUPERSEDED_DIR = ".superseded"


@dataclass(frozen=True)
class SampleItem:
    """Payload of a run's work item: one sample of one row."""

    row: int
    sample: int
    prompt: dict[str, Any]


class _OpenStep:
    """A step with missing samples."""

    def __init__(self, prompts: int, n: int, solved_at: float) -> None:
        self.done = bytearray(prompts * n)
        self.missing = prompts * n
        self.aggregates = RunAggregates(n, solved_at)
        self.block_counts = BlockCounts(n)


class ResumeState:
    """Completed samples of a run.

    Args:
        directory: The run's `rollout_data_dir`.
        n: Number of samples per prompt.
        prompts_per_step: Number of prompts per step.
        solved_at: Reward from which a trajectory counts as solved.
    """

    def __init__(self, directory: Path, n: int, prompts_per_step: int, solved_at: float = 1.0) -> None:
        self.directory = directory
        self.aggregates = RunAggregates(n, solved_at)
        """Aggregated outcomes of all completed samples."""
        self.alarm_blocks = AlarmBlocks(n)
        """Alarms about all completed samples."""
        self.bad_rows = 0
        """Number of skipped rows."""
        self._n = n
        self._prompts_per_step = prompts_per_step
        self._solved_at = solved_at
        self._complete_steps: set[int] = set()
        self._open_steps: dict[int, _OpenStep] = defaultdict(partial(_OpenStep, prompts_per_step, n, solved_at))

    def step_of(self, row: int) -> int:
        """Return the step of a row."""
        return row // self._prompts_per_step

    def first_row(self) -> int:
        """Return the first row that may be incomplete."""
        return self._prompts_per_step * next(step for step in count() if step not in self._complete_steps)

    def is_done(self, row: int, sample: int) -> bool:
        """Return True if the sample is recorded, or its row is skipped."""
        step = self.step_of(row)
        return step in self._complete_steps or bool(self._open_steps[step].done[self._index(row, sample)])

    def missing_samples(self, row: int) -> list[int]:
        """Return the samples of a row that are not done."""
        return [sample for sample in range(self._n) if not self.is_done(row, sample)]

    def add(self, outcome: SampleOutcome) -> None:
        """Mark a recorded sample as done, unless it already is."""
        if not self.is_done(outcome.row, outcome.sample):
            self.aggregates.add(outcome)
            self.alarm_blocks.add(outcome.row, outcome.alarm_counts)
            step = self._open_steps[self.step_of(outcome.row)]
            step.aggregates.add(outcome)
            step.block_counts.add(outcome.row, outcome.alarm_counts)
            self._mark_done(outcome.row, [outcome.sample])

    def skip_row(self, row: int) -> None:
        """Mark all samples of an invalid row as done."""
        if self.step_of(row) not in self._complete_steps:
            self.bad_rows += 1
            self.alarm_blocks.skip_row(row)
            self._open_steps[self.step_of(row)].block_counts.skip_row(row)
            self._mark_done(row, range(self._n))

    def load(self) -> None:
        """Read the samples that earlier runs have completed."""
        complete_steps = self._read_complete_steps()
        for step in sorted(complete_steps):
            aggregates, block_counts = complete_steps[step]
            self._complete_steps.add(step)
            self.bad_rows += self._prompts_per_step - aggregates.summary()["trajectories"] // self._n
            self.aggregates.merge(aggregates)
            self.alarm_blocks.restore(block_counts)
        for outcome in recorded_outcomes(self.directory, lambda step: step not in self._complete_steps):
            self.add(outcome)

    def _read_complete_steps(self) -> dict[int, tuple[RunAggregates, BlockCounts]]:
        """Return the counts of the complete steps. The records of the others are read."""
        steps = {}
        for entry in _complete_entries(self.directory):
            if entry["tally"]["solved_at"] == self._solved_at:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # of another version
                    block_counts = BlockCounts.from_state(self._n, entry["alarm_blocks"])
                    steps[entry["step"]] = RunAggregates.from_state(entry["tally"]), block_counts
        return steps

    def _index(self, row: int, sample: int) -> int:
        return row % self._prompts_per_step * self._n + sample

    def _mark_done(self, row: int, samples: Sequence[int]) -> None:
        number = self.step_of(row)
        step = self._open_steps[number]
        for sample in samples:
            step.done[self._index(row, sample)] = 1
        step.missing -= len(samples)
        if step.missing <= 0:
            files = _file_states(_record_folders(self.directory), number)
            counts = {"tally": step.aggregates.state(), "alarm_blocks": step.block_counts.state()}
            line = orjson.dumps({"step": number, "files": files, **counts})
            try:
                with (self.directory / COMPLETE_STEPS_FILE).open("ab") as file:
                    file.write(b"\n" + line + b"\n")  # the first newline ends a line that was left truncated
            except OSError as error:  # the next run reads the records of the step instead
                logger.warning("Cannot write %s: %s.", self.directory / COMPLETE_STEPS_FILE, error.strerror)
            self._complete_steps.add(number)
            del self._open_steps[number]


def _complete_entries(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of the steps whose record files have not changed since they completed."""
    complete, folders = directory / COMPLETE_STEPS_FILE, _record_folders(directory)
    entries = []
    for line in complete.read_bytes().splitlines() if complete.exists() else ():
        with contextlib.suppress(ValueError, LookupError, TypeError):  # truncated by a kill, or of an earlier version
            entry = orjson.loads(line)
            if entry["files"] == _file_states(folders, entry["step"]) and "solved_at" in entry["tally"]:
                entries.append(entry)
    return entries


def _record_folders(directory: Path) -> list[Path]:
    """Return the directory and its subdirectories, which contain the records of workers."""
    with os.scandir(directory) as entries:
        return [directory, *(Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith("."))]


def _file_states(folders: Sequence[Path], step: int) -> dict[str, list[int]]:
    """Return size and modification time of the record files of a step, by path relative to the first folder."""
    states = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            file = folder / f"{step}{DUMP_SUFFIX}"
            stat = file.stat()
            states[str(file.relative_to(folders[0]))] = [stat.st_size, stat.st_mtime_ns]
    return states


def recorded_outcomes(directory: Path, is_wanted: Callable[[int], bool]) -> Iterator[SampleOutcome]:
    """Yield the outcomes of the records in a directory and its subdirectories.

    Args:
        directory: Directory of the records. It may be missing.
        is_wanted: Returns True for the steps to read.
    """
    if not directory.is_dir():
        return
    files = [file for file in dump_files(directory) if file.step is not None and is_wanted(file.step)]
    for record in RecordIterator(files):
        if record.is_native and record.group is not None and record.group.isdecimal() and record.sample is not None:
            yield SampleOutcome.from_record(record, int(record.group))


def has_records(directory: Path, *, failed: bool) -> bool:
    """Return True if a directory or its subdirectories contain records. Those of failed samples count if `failed`."""
    return any(failed or not _is_failed(record) for record in RecordIterator(dump_files(directory)))


def set_aside_failed(directory: Path) -> int:
    """Move the records of failed samples of a run out of the way. No other process may write meanwhile.

    Args:
        directory: The run's `rollout_data_dir`.

    Returns:
        The number of records.

    Raises:
        OSError: If a file cannot be read or written. No record is lost.
    """
    complete = _complete_entries(directory)
    without_failures = {one["step"] for one in complete if "infra" not in one["tally"]["counts"]["outcomes"]}
    files = [file for file in dump_files(directory) if file.step is not None and file.step not in without_failures]
    return sum(_set_aside(file, directory) for file in files)


def _set_aside(file: DumpFile, directory: Path) -> int:
    path = Path(file.path)
    with path.open("rb") as records:
        if not any(map(_has_failed, read_lines(records))):
            return 0
    target = directory / SUPERSEDED_DIR / path.relative_to(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    # First the copy, then the file without the lines: a crash in between leaves them in both.
    moved = _copy_lines(path, target, "ab", _has_failed)
    kept = path.with_name(f".{path.name}.new")
    _copy_lines(path, kept, "wb", lambda line: not _has_failed(line))
    kept.replace(path)
    return moved


def _copy_lines(source: Path, target: Path, mode: str, is_wanted: Callable[[bytes], bool]) -> int:
    """Copy some lines of a file one by one, as the file may be larger than the memory. Return their number."""
    copied = 0
    with source.open("rb") as lines, target.open(mode) as file:
        for line in filter(is_wanted, read_lines(lines)):
            file.write(line)
            copied += 1
        file.flush()
        os.fsync(file.fileno())
    return copied


def _has_failed(line: bytes) -> bool:
    if b'"infra"' not in line:
        return False
    try:
        return _is_failed(Record.parse(check_complete(line)))
    except BadLine:
        return False


def _is_failed(record: Record) -> bool:
    return record.is_native and record.outcome == "infra"
