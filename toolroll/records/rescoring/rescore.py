"""Score recorded trajectories again, many at a time, and write copies of the records with the new scores.

    rescorer = Rescorer({"exact": exact})
    result = await rescorer.run("dumps", "dumps-rescored")

Invariants:

- The records are never changed. A copy differs from its record only in the field `rescored` (`line.py`).
- The copies are in the order of the records. A process that is killed at any moment and started again writes each of
  them exactly once (`output.py`).
- A record that cannot be scored because of an infra fault has the score None, never 0. The next process scores it.
- A record without the rewards of its steps and tools has no total.
- Memory is bounded: at most `MAX_WINDOW_LINES` lines are buffered until they and all lines before them are scored.
- A process that is stopped keeps all finished scores. One that is killed loses the scores of buffered lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from toolroll.errors import BudgetExhausted, ConfigError, InfraFault, ToolrollError
from toolroll.limiter.budget_file import saved_budgets
from toolroll.limiter.limited import declared_limits
from toolroll.records.directory import DumpFile, StrPath, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.reader import MAX_LOGGED_BAD_LINES, READ_BUFFER_BYTES, check_complete, is_too_long, read_lines
from toolroll.records.record import Record
from toolroll.records.rescoring.changes import TOTAL
from toolroll.records.rescoring.line import LineFrame, Scores
from toolroll.records.rescoring.output import KnownScores, RescoredDirectory, RescoredFile
from toolroll.records.rescoring.result import RescoreProgress, RescoreResult
from toolroll.records.restore import restore_trajectory
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.trajectory import INFRA_FINISH_REASONS, Trajectory

logger = logging.getLogger(__name__)

MAX_CONCURRENT_RECORDS = 64
"""Default of the number of records that are scored at the same time."""
MAX_WINDOW_LINES = 1024
MAX_WINDOW_BYTES = 32 * 1024 * 1024
"""Maximum size of the lines that wait for their scores, unless a single line is longer."""
YIELD_INTERVAL_LINES = 256
"""Number of lines after which other tasks of the event loop run."""
MAX_FIRST_FAILURES = 32
"""Number of records, from the start, that may all fail before the re-scoring stops. Records that failed before do not
count."""
REWARD_TIMEOUT_S = 600.0
"""Timeout for one reward function and one record, as in a run."""

OnProgress = Callable[[RescoreProgress], None]


class RescoringFailed(ToolrollError):
    """Raised when a re-scoring stops because every record fails."""


class Rescorer:
    """Scores records with reward functions.

    Args:
        functions: Reward functions by name, as for `RewardRule`.
        rule: If given, the score `total` is the sum of the new scores and the recorded rewards of steps and tools, with
            the weights of this rule.
        concurrency: Maximum number of records that are scored at the same time. The limits of the functions and the
            sandbox apply as well.
        rewards: Description of the functions as JSON, which must be the same to resume; the names by default.

    Raises:
        ConfigError: If there is no function, or a function is named `total`.

    Example:
        ```python
        from toolroll.records.rescoring.rescore import Rescorer

        result = await Rescorer({"exact": exact}).run("dumps", "dumps-rescored")
        print(result.changes.total("exact").improved)
        ```
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        *,
        rule: RewardRule | None = None,
        concurrency: int = MAX_CONCURRENT_RECORDS,
        rewards: Mapping[str, Any] | None = None,
    ) -> None:
        if not functions or TOTAL in functions:
            problem = f"Reserved name {TOTAL!r}" if functions else "No reward functions"
            raise ConfigError(f"rewards: {problem}. Pass reward functions, with other names than {TOTAL!r}.")
        self._scorer = _Scorer(functions, rule)
        self._concurrency = concurrency
        self._rewards = dict.fromkeys(functions) if rewards is None else rewards

    async def run(self, source: StrPath, out: StrPath, on_progress: OnProgress | None = None) -> RescoreResult:
        """Score all records that have no new score yet.

        Args:
            source: The `rollout_data_dir`, or one of its files.
            out: Directory for the copies with new scores.
            on_progress: Called after each line.

        Returns:
            Counts, and the comparison of old and new scores.

        Raises:
            ConfigError: If the source cannot be read, the output directory or its `budgets.json` cannot be used, or
                the records already have a new score of the same name.
            BudgetExhausted: If the budget of a reward function is spent. The amounts of all calls are saved in
                `budgets.json` in the output directory, so that the next call counts them.
            RescoringFailed: If the first records cannot be scored.
            RecordsNotWritten: If the output cannot be written.
        """
        files = dump_files(source)
        with RescoredDirectory(Path(out), Path(source), self._rewards) as directory:
            job = _RescoreJob(self._scorer, self._concurrency, files, on_progress)
            async with saved_budgets(directory.directory, declared_limits()):
                for file in files:
                    await job.rescore_file(file, directory.output(file.path))
            directory.remove_outdated([file.path for file in files])
        return job.result


class _Scorer:
    """Reward functions, applied to one trajectory."""

    def __init__(self, functions: Mapping[str, RewardFunction], rule: RewardRule | None) -> None:
        self._rules = {name: RewardRule(functions={name: function}) for name, function in functions.items()}
        self._rule = rule
        self.names = (*functions, *(() if rule is None else (TOTAL,)))
        """Names of all scores."""

    def names_for(self, record: Record) -> frozenset[str]:
        """Return the names of the scores that a record can have. All others are None."""
        if record.finish_reason in INFRA_FINISH_REASONS:
            return frozenset()
        lacks_tool_rewards = record.is_native and not record.rewards.get("steps")
        return frozenset(self._rules if lacks_tool_rewards else self.names)

    async def score(
        self, trajectory: Trajectory, names: frozenset[str], known: Scores, on_error: Callable[[str], None]
    ) -> Scores:
        """Return all scores. A function that fails has the score None; `on_error` receives the message."""
        scores: Scores = {}
        for name, rule in self._rules.items():
            try:
                scores[name] = known.get(name)
                if name not in known:
                    scores |= await rule.score(trajectory, REWARD_TIMEOUT_S)
            except BudgetExhausted:
                raise
            except InfraFault as error:
                on_error(str(error))
        if self._rule is not None:
            total = self._rule.total(replace(trajectory.rewards, functions=dict(scores)))
            scores[TOTAL] = total if TOTAL in names else None
        return scores


@dataclass(slots=True)
class _PendingLine:
    """A line of the source on its way to the output."""

    size: int
    frame: LineFrame
    record: Record | None
    """None if the line is copied."""
    names: frozenset[str]
    """Names of the scores that the record can have."""
    is_written: bool
    scores: Scores | asyncio.Task[Scores]


class _RescoreJob:
    """The state of one call of `Rescorer.run`."""

    def __init__(
        self, scorer: _Scorer, concurrency: int, files: list[DumpFile], on_progress: OnProgress | None
    ) -> None:
        self.result = RescoreResult()
        self._scorer = scorer
        self._slots = asyncio.Semaphore(concurrency)
        self._on_progress = on_progress
        self._total_bytes = sum(Path(file.path).stat().st_size for file in files)
        self._bytes_done = 0
        self._started = 0
        """Number of records that have been started, except for those that failed in an earlier process."""
        self._first_failures: int | None = 0
        """Number of failures from the start, or None after a success."""

    async def rescore_file(self, file: DumpFile, output: RescoredFile) -> None:
        """Write the output of one file."""
        window: deque[_PendingLine] = deque()
        window_bytes = 0
        with output:
            try:
                for number, (raw, record) in enumerate(self._read(file)):
                    if number % YIELD_INTERVAL_LINES == 0:  # a line whose scores are known waits for nothing
                        await asyncio.sleep(0)
                    window.append(self._start(raw, record, output))
                    window_bytes += len(raw)
                    while len(window) >= MAX_WINDOW_LINES or window_bytes >= MAX_WINDOW_BYTES:
                        window_bytes -= await self._end_first(window, output)
                while window:
                    await self._end_first(window, output)
                output.finish()
            finally:
                await self._abandon(window, output)

    def _read(self, file: DumpFile) -> Iterator[tuple[bytes, Record | None]]:
        """Yield the lines of a file with their records. Incomplete lines are skipped."""
        with _open(file.path) as opened:
            for number, line in enumerate(read_lines(opened), 1):
                record = None
                if not line.isspace():
                    try:
                        record = Record.parse(check_complete(line))
                    except BadLine as error:
                        self.result.bad_lines += 1
                        if self.result.bad_lines <= MAX_LOGGED_BAD_LINES:
                            logger.warning("%s: line %d is not scored: %s", file.path, number, error)
                        if is_too_long(line) or not line.endswith(b"\n"):
                            continue
                yield line, record

    def _start(self, raw: bytes, record: Record | None, output: RescoredFile) -> _PendingLine:
        """Start to score a line, unless its scores are known."""
        if record is None:
            frame, names = LineFrame.copied(raw), frozenset[str]()
            return _PendingLine(len(raw), frame, None, names, output.known(frame, names).is_written, {})
        frame, names = LineFrame.of_record(raw, record, self._scorer.names), self._scorer.names_for(record)
        known = output.known(frame, names)
        scores: Scores | asyncio.Task[Scores]
        if known.is_written or names <= known.scores.keys():
            self.result.reused += bool(names) and names <= known.scores.keys()
            scores = {name: known.scores.get(name) if name in names else None for name in self._scorer.names}
        else:
            scores = asyncio.create_task(self._score(record, names, known))
        return _PendingLine(len(raw), frame, record, names, known.is_written, scores)

    async def _score(self, record: Record, names: frozenset[str], known: KnownScores) -> Scores:
        ordinal = self._started
        self._started += not known.has_failed
        async with self._slots:
            errors: list[str] = []
            try:
                trajectory = restore_trajectory(record)
                trajectory.outcome, trajectory.error = "ok", None  # the conversation is complete
                scores = await self._scorer.score(trajectory, names, known.scores, errors.append)
            except BadLine as bad:
                errors.append(str(bad))
                scores = dict.fromkeys(self._scorer.names)
        for error in errors:
            self.result.add_error(error)
        if not known.has_failed:  # it may never succeed, which must not keep others from being scored
            self._count_first_failures(ordinal, errors)
        return scores

    def _count_first_failures(self, ordinal: int, errors: list[str]) -> None:
        if not errors:
            self._first_failures = None
        elif self._first_failures is not None and ordinal < MAX_FIRST_FAILURES:  # later ones may fail faster
            self._first_failures += 1
            if self._first_failures >= MAX_FIRST_FAILURES:
                problem = f"The first {self._first_failures} records could not be scored: {errors[0]}"
                raise RescoringFailed(f"{problem} Fix it and run the same command again.")

    async def _end_first(self, window: deque[_PendingLine], output: RescoredFile) -> int:
        """Wait for the scores of the first line and write it. Return its size."""
        line = window[0]
        if isinstance(line.scores, asyncio.Task):
            if not line.scores.done():
                output.flush()
            line.scores = await line.scores
        self._write(window.popleft(), line.scores, output)
        return line.size

    def _write(self, line: _PendingLine, scores: Scores, output: RescoredFile) -> None:
        if not line.is_written:
            output.write(line.frame.join(scores))
        result = self.result
        if line.record is not None:
            is_unscored = any(scores[name] is None for name in line.names)
            result.records += 1
            result.incomplete += len(line.names) < len(scores) and not is_unscored
            result.unscored += is_unscored
            result.changes.add(line.record, scores)
        self._bytes_done += line.size
        if self._on_progress is not None:
            self._on_progress(RescoreProgress(result.records, result.unscored, self._bytes_done, self._total_bytes))

    async def _abandon(self, window: deque[_PendingLine], output: RescoredFile) -> None:
        """Write the lines whose scores are known, and cancel the others.

        The next process finds the scores of lines that are written before an earlier one, which was cancelled.
        """
        tasks = [line.scores for line in window if isinstance(line.scores, asyncio.Task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while window:
            line = window.popleft()
            if isinstance(line.scores, asyncio.Task):
                if line.scores.cancelled() or line.scores.exception() is not None:
                    continue
                line.scores = line.scores.result()
            self._write(line, line.scores, output)


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb", READ_BUFFER_BYTES)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
