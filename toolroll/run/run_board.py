"""RunBoard: hands out the samples of a run, and knows what is done. In one process with the worker, or as an actor.

It reads the data and what an earlier run has left. What a lost worker had written by then is read from its records, so
that nothing is done twice. All that it knows is in the data and the records: an actor that died can be begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolroll.rollout.board import WorkBoard
from toolroll.rollout.dispatch import Key, Lost, Piece
from toolroll.rollout.worker import Orders
from toolroll.run.claim import Claim
from toolroll.run.config import RunConfig
from toolroll.run.data import Rows
from toolroll.run.progress import Progress, Sample, written
from toolroll.run.row_files import BadRow
from toolroll.run.status import Status
from toolroll.run.tally import Outcome

logger = logging.getLogger(__name__)


class RunBoard:
    """One run's board.

    Args:
        config: The run.
        workers: How many are expected.
        lease: Seconds that workers may go on for when this process has died.
    """

    def __init__(self, config: RunConfig, workers: int, *, lease: float = 0.0) -> None:
        self._config = config
        self._lease = lease
        self._rows = Rows(config.data)
        directory = Path(config.rollout_data_dir)
        about = {
            "data": self._rows.fingerprint(),
            "n": config.n,
            "prompts_per_step": config.prompts_per_step,
            "model": config.model or config.engine.model,
        }
        self._claim = Claim(directory, about, lease=lease)
        if self._claim.wait:
            logger.info("an earlier run here was killed: its workers may write for %g s more", self._claim.wait)
            time.sleep(self._claim.wait)  # nobody is served before
        self._progress = Progress(directory, config.n, config.prompts_per_step, config.rewards.solved_at)
        self._progress.read()
        tally = self._progress.tally
        self._before = tally.done, tally.sampled, tally.calls
        self._began: float | None = None
        """When the first piece was handed out."""
        self._rows_length = self._rows.known_length()
        self._bad_rows = 0
        self._board: WorkBoard[Sample] = WorkBoard(self._pieces(), self._heed, self._done_by, workers=workers)
        self._watching: asyncio.Task[None] | None = None

    async def join(self, worker: str) -> None:
        """Begin, under a name that nobody had before."""
        self._watching = self._watching or asyncio.create_task(self._board.watch())
        await self._board.join(worker)

    async def exchange(self, worker: str, number: int, done: list[tuple[Key, Any]], want: int) -> Orders[Sample] | None:
        """What was done, and what is to do."""
        return await self._board.exchange(worker, number, done, want)

    async def leave(self, worker: str) -> None:
        """Say goodbye."""
        await self._board.leave(worker)

    async def status(self) -> Status:
        """How the run stands."""
        tally = self._progress.tally
        resumed, sampled, calls = self._before
        total = None if self._rows_length is None else self._rows_length * self._config.n
        done, running = tally.done, self._board.in_hand
        unusable = self._bad_rows * self._config.n
        return Status(
            done=done,
            running=running,
            queued=None if total is None else max(0, total - done - running - unusable),
            total=None if total is None else total - unusable,
            tokens=tally.sampled - sampled,
            calls=tally.calls - calls,
            in_flight=None,
            limit=None,
            workers=self._board.workers,
            lost_workers=self._board.lost,
            seconds=0.0 if self._began is None else time.monotonic() - self._began,
            resumed=resumed,
            bad_rows=self._bad_rows,
            tally=tally.figures(),
        )

    async def close(self) -> None:
        """Let the directory go."""
        if self._watching is not None:
            self._watching.cancel()
        self._claim.release(is_over=not self._lease or self._board.is_over)

    def _pieces(self) -> Iterator[Piece[Sample]]:
        """What isn't done, in the data's order."""
        for found in self._rows.rows(self._progress.first_row()):
            if isinstance(found, BadRow):
                self._bad_rows += 1
                self._progress.leave_out(found.number)
                logger.warning("row %d of the data can't be used: %s", found.number, found.why)
                continue
            row, prompt = found
            self._began = self._began or time.monotonic()
            for sample in self._progress.missing(row):
                yield Piece((row, sample), Sample(row, sample, prompt))

    def _heed(self, key: Key, outcome: Any) -> None:
        self._progress.add(outcome)

    async def _done_by(self, lost: Lost[Sample]) -> list[tuple[Key, Outcome]]:
        """What a lost worker had written, of what it had."""
        had = {(piece.work.row, piece.work.sample) for piece in lost.pieces}
        steps = {self._progress.step_of(row) for row, _ in had}
        directory = Path(self._config.rollout_data_dir) / lost.worker
        found = await asyncio.to_thread(lambda: list(written(directory, steps.__contains__)))
        return [((one.row, one.sample), one) for one in found if (one.row, one.sample) in had]
