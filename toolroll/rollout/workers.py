"""Rollouts on a Ray cluster, for a trainer.

    workers = RolloutWorkers(make_rollout, workers=16)
    trajectories = await workers.generate(prompts, n=8)      # a step
    await workers.abort()                                    # new weights are coming
    await workers.resume()

Work is pulled (dispatch.py), so a worker that is slow or dead holds nothing up: what it had is done elsewhere, and
counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import RayError

from toolroll.rollout.board import WorkBoard
from toolroll.rollout.crew import Crew, WorkersFailed, actor_here, last_line, number_of_nodes
from toolroll.rollout.dispatch import Key, Piece
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.rollout.worker import Orders


@dataclass(frozen=True)
class _Sample:
    """What a trainer's worker is given."""

    prompt: Any
    group: str
    sample: int


class _TrainerHands:
    """Trajectories, and nothing but that."""

    def __init__(self, make: Callable[[], Rollout]) -> None:
        self.rollout = make()

    async def carry_out(self, work: _Sample) -> Trajectory:
        return await self.rollout.sample(work.prompt, group=work.group, sample=work.sample)

    async def commit(self, worker: str, work: _Sample, trajectory: Trajectory) -> Trajectory:
        return trajectory

    async def close(self) -> None:
        await self.rollout.__aexit__()


class _TrainerBoard:
    """The board of a trainer's workers, as an actor. It stays open from step to step."""

    def __init__(self, workers: int) -> None:
        self._ended: list[tuple[Key, Trajectory]] = []
        self._news = asyncio.Event()
        self._board: WorkBoard[_Sample] = WorkBoard(iter(()), self._heed, workers=workers, stays_open=True)
        self._watching: asyncio.Task[None] | None = None

    async def join(self, worker: str) -> None:
        self._watching = self._watching or asyncio.create_task(self._board.watch())
        await self._board.join(worker)

    async def exchange(
        self, worker: str, number: int, done: list[tuple[Key, Any]], want: int
    ) -> Orders[_Sample] | None:
        return await self._board.exchange(worker, number, done, want)

    async def leave(self, worker: str) -> None:
        await self._board.leave(worker)

    async def add(self, pieces: list[Piece[_Sample]]) -> None:
        self._board.add(pieces)

    async def collect(self) -> list[tuple[Key, Trajectory]]:
        """What has ended since, as soon as there is something."""
        await self._news.wait()
        self._news.clear()
        ended, self._ended = self._ended, []
        return ended

    def _heed(self, key: Key, trajectory: Any) -> None:
        self._ended.append((key, trajectory))
        self._news.set()


class RolloutWorkers:
    """A trainer's rollouts, on the Ray cluster that this process is connected to.

    Args:
        make: Makes a rollout, in each worker's process. It is pickled, by value where it is a script's own function.
        workers: How many processes. By default one for each node.
        max_in_flight: Trajectories at once, in each.
    """

    def __init__(self, make: Callable[[], Rollout], *, workers: int | None = None, max_in_flight: int = 1024) -> None:
        workers = workers or number_of_nodes()
        self._board: Any = actor_here(_TrainerBoard).remote(workers)
        hands = partial(_TrainerHands, make)
        self._crew = Crew(self._board, hands, workers=workers, capacity=max_in_flight, name="rollout")
        self._working: asyncio.Task[None] | None = None
        self._steps = 0

    async def generate(self, prompts: Iterable[Any], n: int = 1) -> list[Trajectory]:
        """A step: `n` trajectories for each prompt, in the order of the prompts."""
        found = {(one.group, one.sample): one async for one in self.run(prompts, n)}
        return [found[key] for key in sorted(found, key=lambda key: (int(key[0]), key[1]))]

    async def run(self, prompts: Iterable[Any], n: int = 1) -> AsyncIterator[Trajectory]:
        """The same as they end. One step at a time."""
        self._working = self._working or asyncio.create_task(self._crew.work())
        self._steps += 1
        pieces = [
            Piece((self._steps, row, sample), _Sample(prompt, str(row), sample))
            for row, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        missing = {piece.key for piece in pieces}
        await self._board.add.remote(pieces)
        while missing:
            for key, trajectory in await self._collect():
                if key in missing:  # and not of a step that nobody waits for any more
                    missing.discard(key)
                    yield trajectory

    async def abort(self) -> None:
        """Stop all generations on all workers, as the weights are about to change, and wait until they have stopped.

        What was sampled is kept. Nothing new is generated before `resume`.
        """
        await self._crew.abort()

    async def resume(self) -> None:
        """Let all go on from where they were."""
        await self._crew.resume()

    async def close(self) -> None:
        """End the workers."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        self._crew.end()
        ray.kill(self._board)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()

    async def _collect(self) -> list[tuple[Key, Trajectory]]:
        """What has ended; or the error that ended the workers."""
        assert self._working is not None
        collecting = asyncio.ensure_future(_result(self._board.collect.remote()))
        try:
            await asyncio.wait({collecting, self._working}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                self._working.result()
            return await collecting
        except RayError as error:  # what has ended and wasn't collected yet is gone with it
            raise WorkersFailed(f"The process that hands out the work died: {last_line(error)}") from error
        finally:
            collecting.cancel()


async def _result(reference: Any) -> list[tuple[Key, Trajectory]]:
    ended: list[tuple[Key, Trajectory]] = await reference
    return ended
