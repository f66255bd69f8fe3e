"""Track which samples of a run are done, so that an interrupted run can resume.

The records are the source of truth: a sample is done when its record exists. When all samples of a step are done, the
step and its aggregates are appended to the file `.complete`, so that a resumed run reads only the records of incomplete
steps. The file is a cache: an entry counts only if the record files of the step have the size and modification time
that it states. Otherwise the records are read, and samples whose records are missing are produced again.

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

from toolroll.records.directory import DUMP_SUFFIX, dump_files
from toolroll.records.reader import RecordIterator
from toolroll.run.aggregates import RunAggregates, SampleOutcome

logger = logging.getLogger(__name__)

COMPLETE_STEPS_FILE = ".complete"


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
        self._n = n
        self._prompts_per_step = prompts_per_step
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
            self._open_steps[self.step_of(outcome.row)].aggregates.add(outcome)
            self._mark_done(outcome.row, [outcome.sample])

    def skip_row(self, row: int) -> None:
        """Mark all samples of an invalid row as done."""
        if self.step_of(row) not in self._complete_steps:
            self._mark_done(row, range(self._n))

    def load(self) -> None:
        """Read the samples that earlier runs have completed."""
        for step, aggregates in self._read_complete_steps().items():
            self._complete_steps.add(step)
            self.aggregates.merge(aggregates)
        for outcome in recorded_outcomes(self.directory, lambda step: step not in self._complete_steps):
            self.add(outcome)

    def _read_complete_steps(self) -> dict[int, RunAggregates]:
        """Return the aggregates of the steps whose record files have not changed since they were completed."""
        complete = self.directory / COMPLETE_STEPS_FILE
        entries: dict[int, tuple[Any, RunAggregates]] = {}
        for line in complete.read_bytes().splitlines() if complete.exists() else ():
            try:
                entry = orjson.loads(line)
                entries[entry["step"]] = entry["files"], RunAggregates.from_state(entry["tally"])
            except (ValueError, LookupError, TypeError):
                continue  # a truncated line of a killed run: the records of the step are read instead
        folders = _record_folders(self.directory)
        return {step: found for step, (files, found) in entries.items() if files == _file_states(folders, step)}

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
            line = orjson.dumps({"step": number, "files": files, "tally": step.aggregates.state()})
            try:
                with (self.directory / COMPLETE_STEPS_FILE).open("ab") as file:
                    file.write(b"\n" + line + b"\n")  # the first newline ends a line that was left truncated
            except OSError as error:  # the next run reads the records of the step instead
                logger.warning("Cannot write %s: %s.", self.directory / COMPLETE_STEPS_FILE, error.strerror)
            self._complete_steps.add(number)
            del self._open_steps[number]


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
