"""Progress: which samples of a run are done, and where a run that was interrupted goes on.

The records are the truth: a sample is done when its line is there. So that a run that goes on needn't read all of them,
each step of which everything is there is noted, with what came of it, in the file `.complete` of its directory; only
the records of the other steps are read. Promises:

- What is done is never handed out again, and what isn't done is.
- What it holds doesn't grow with the run, but with the number of steps that are begun and not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from toolroll.records.directory import dump_files
from toolroll.records.reader import Reading
from toolroll.records.record import Record
from toolroll.run.tally import Outcome, Tally

COMPLETE = ".complete"


@dataclass(frozen=True)
class Sample:
    """One piece of a run: a row of the data, and which of its samples."""

    row: int
    sample: int
    prompt: dict[str, Any]


class _Step:
    """A step that is begun and not complete."""

    def __init__(self, prompts: int, n: int, solved_at: float) -> None:
        self.done = bytearray(prompts * n)
        self.missing = prompts * n
        self.tally = Tally(n, solved_at)


class Progress:
    """What of a run is done.

    Args:
        directory: The run's `rollout_data_dir`.
        n: Samples per prompt.
        prompts_per_step: Prompts per step.
        solved_at: A trajectory with this reward has solved its problem.
    """

    def __init__(self, directory: Path, n: int, prompts_per_step: int, solved_at: float = 1.0) -> None:
        self.directory = directory
        self.tally = Tally(n, solved_at)
        """What came of all that is done."""
        self._n = n
        self._solved_at = solved_at
        self._prompts_per_step = prompts_per_step
        self._complete: set[int] = set()
        self._steps: dict[int, _Step] = {}

    def step_of(self, row: int) -> int:
        """The step that a row belongs to."""
        return row // self._prompts_per_step

    def first_row(self) -> int:
        """Where to begin to read the data: all before it is done."""
        step = 0
        while step in self._complete:
            step += 1
        return step * self._prompts_per_step

    def is_done(self, row: int, sample: int) -> bool:
        """Whether its record is there."""
        step = self.step_of(row)
        if step in self._complete:
            return True
        begun = self._steps.get(step)
        return begun is not None and bool(begun.done[self._place(row, sample)])

    def missing(self, row: int) -> list[int]:
        """The samples of a row that aren't done."""
        return [sample for sample in range(self._n) if not self.is_done(row, sample)]

    def add(self, outcome: Outcome) -> bool:
        """A sample is done, and its record is there. False: it was before."""
        if self.is_done(outcome.row, outcome.sample):
            return False
        number = self.step_of(outcome.row)
        step = self._begun(number)
        step.done[self._place(outcome.row, outcome.sample)] = 1
        step.tally.add(outcome)
        self.tally.add(outcome)
        self._count(number, step, 1)
        return True

    def leave_out(self, row: int) -> None:
        """A row that can't be used: nothing of it is missing."""
        number = self.step_of(row)
        if number not in self._complete:
            step = self._begun(number)
            start = self._place(row, 0)
            step.done[start : start + self._n] = b"\1" * self._n
            self._count(number, step, self._n)

    def read(self) -> None:
        """Find out what an earlier run has done."""
        noted = self.directory / COMPLETE
        if noted.exists():
            for line in noted.read_bytes().splitlines():
                try:
                    said = orjson.loads(line)
                    step, tally = said["step"], Tally.of_state(said["tally"])
                except (ValueError, LookupError, TypeError):
                    continue  # the run was stopped over it: the step is read from its records
                if step not in self._complete:
                    self._complete.add(step)
                    self.tally.merge(tally)
        for outcome in written(self.directory, lambda step: step not in self._complete):
            self.add(outcome)

    def _begun(self, number: int) -> _Step:
        if number not in self._steps:
            self._steps[number] = _Step(self._prompts_per_step, self._n, self._solved_at)
        return self._steps[number]

    def _place(self, row: int, sample: int) -> int:
        return row % self._prompts_per_step * self._n + sample

    def _count(self, number: int, step: _Step, done: int) -> None:
        step.missing -= done
        if step.missing <= 0:
            line = orjson.dumps({"step": number, "tally": step.tally.state()})
            with (self.directory / COMPLETE).open("ab") as noted:
                noted.write(b"\n" + line + b"\n")  # behind what may be half a line
            self._complete.add(number)
            del self._steps[number]


def written(directory: Path, wanted: Callable[[int], bool]) -> Iterator[Outcome]:
    """What the records of a directory, and of those below it, say is done in these steps."""
    if directory.is_dir():
        files = [file for file in dump_files(directory) if file.step is not None and wanted(file.step)]
        yield from _outcomes(Reading(files))


def _outcomes(records: Iterable[Record]) -> Iterator[Outcome]:
    for record in records:
        if record.is_ours and record.group is not None and record.group.isdecimal() and record.sample is not None:
            yield Outcome.of_record(record, int(record.group))
