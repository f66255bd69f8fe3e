"""Generate trajectories for a trainer on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError

from toolroll.rollout.distributed.coordinator import WorkCoordinator
from toolroll.rollout.distributed.dispatch import Key, WorkItem
from toolroll.rollout.distributed.worker_pool import WorkerPool, WorkersFailed, count_nodes, last_line, local_actor
from toolroll.rollout.rollout import Rollout, cancel_all
from toolroll.rollout.trajectory import Trajectory


class _TrainerSample(NamedTuple):
    """Payload of a trainer's work item."""

    prompt: Any
    group: str
    sample: int


class _TrainerSampleRunner:
    """Produces trajectories and returns them to the coordinator."""

    def __init__(self, make_rollout: Callable[[], Rollout]) -> None:
        self.rollout = make_rollout()

    async def execute(self, payload: _TrainerSample) -> Trajectory:
        return await self.rollout.sample(payload.prompt, group=payload.group, sample=payload.sample)

    async def commit(self, worker: str, payload: _TrainerSample, trajectory: Trajectory) -> Trajectory:
        return trajectory

    async def close(self) -> None:
        await self.rollout.aclose()


class _TrainerCoordinator(WorkCoordinator[_TrainerSample]):
    """Ray actor that coordinates a trainer's workers. It stays open between steps."""

    def __init__(self, workers: int) -> None:
        super().__init__(iter(()), workers=workers, stays_open=True)
        self._step = 0
        self._ended: list[tuple[Key, Trajectory]] = []
        self._any_ended = asyncio.Event()

    def record_result(self, key: Key, result: Any) -> None:
        self._ended.append((key, result))
        self._any_ended.set()

    async def start_step(self, step: int, items: list[WorkItem[_TrainerSample]]) -> None:
        """Append the items of a step. Calls of `collect()` for earlier steps return nothing from now on."""
        self._step = step
        self._any_ended.set()
        await self.add(items)

    async def collect(self, step: int) -> list[tuple[Key, Trajectory]]:
        """Wait until a trajectory has ended or a step starts, and return those ended since the last call.

        If its caller is cancelled, a call continues to wait here. It must not take the trajectories of the next step.
        """
        await self._any_ended.wait()
        if step < self._step:
            return []
        self._any_ended.clear()
        ended, self._ended = self._ended, []
        return ended


class RolloutWorkers:
    """Generates trajectories for a trainer, in worker processes on the connected Ray cluster.

    Workers pull their work, so a slow worker delays only its own trajectories. The trajectories of a worker that dies
    are produced by others; each is returned once. Use as an async context manager, or call `close()`.

    Args:
        make_rollout: Creates the rollout in each worker process. It is pickled; a function of the main script is
            pickled by value.
        workers: Number of worker processes. Default: one per node.
        max_in_flight: Maximum number of concurrent trajectories per worker.

    Example:
        ```python
        async with RolloutWorkers(make_rollout, workers=16) as workers:
            trajectories = await workers.generate(prompts, n=8)  # one training step
            await workers.abort()  # before the weights change
            await workers.resume()
        ```
    """

    def __init__(
        self, make_rollout: Callable[[], Rollout], *, workers: int | None = None, max_in_flight: int = 1024
    ) -> None:
        workers = workers or count_nodes()
        self._coordinator: Any = local_actor(_TrainerCoordinator).remote(workers)
        make_runner = partial(_TrainerSampleRunner, make_rollout)
        self._pool = WorkerPool(self._coordinator, make_runner, workers=workers, capacity=max_in_flight, name="rollout")
        self._running: asyncio.Task[None] | None = None
        self._step = 0

    async def generate(self, prompts: Iterable[Any], n: int = 1) -> list[Trajectory]:
        """Generate the trajectories of one training step.

        Args:
            prompts: Prompts, as for `Rollout.run()`.
            n: Number of trajectories per prompt.

        Returns:
            The trajectories, ordered by prompt and sample.

        Raises:
            WorkersFailed: If a worker failed with an error that a restart would not fix, or the coordinator died.
        """
        ended = [pair async for pair in self._run(prompts, n)]
        return [trajectory for _, trajectory in sorted(ended, key=itemgetter(0))]

    async def run(self, prompts: Iterable[Any], n: int = 1) -> AsyncIterator[Trajectory]:
        """Generate the trajectories of one training step, yielding each as it ends.

        Only one step can run at a time.

        Args:
            prompts: Prompts, as for `Rollout.run()`.
            n: Number of trajectories per prompt.

        Yields:
            The trajectories, in the order in which they end.

        Raises:
            WorkersFailed: If a worker failed with an error that a restart would not fix, or the coordinator died.
        """
        async for _, trajectory in self._run(prompts, n):
            yield trajectory

    async def abort(self) -> None:
        """Stop all generations on all workers before the weights change, and wait until they have stopped.

        Sampled tokens are kept. Nothing is generated until `resume()` is called.
        """
        await self._pool.abort()

    async def resume(self) -> None:
        """Continue the generations that `abort()` stopped."""
        await self._pool.resume()

    async def close(self) -> None:
        """Stop the workers, which release the tools of running trajectories, and the coordinator."""
        if self._running is not None:
            await cancel_all([self._running])
        try:
            await self._pool.stop()
        finally:
            ray.kill(self._coordinator)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _run(self, prompts: Iterable[Any], n: int) -> AsyncIterator[tuple[Any, Trajectory]]:
        """Yield each trajectory of a step with its key, by which prompts and samples are ordered."""
        self._running = self._running or asyncio.create_task(self._pool.run())
        self._step += 1
        items = [
            WorkItem((self._step, row, sample), _TrainerSample(prompt, str(row), sample))
            for row, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        missing = {item.key for item in items}
        await self._coordinator.start_step.remote(self._step, items)
        while missing:
            for key, trajectory in await self._collect():
                if key in missing:  # else it belongs to an earlier step that was abandoned
                    missing.discard(key)
                    yield key, trajectory

    async def _collect(self) -> list[tuple[Key, Trajectory]]:
        """Return the trajectories that have ended. Raises the error of the workers if they failed."""
        assert self._running is not None
        collecting: asyncio.Task[Any] = asyncio.ensure_future(self._coordinator.collect.remote(self._step))
        try:
            await asyncio.wait({collecting, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                self._running.result()
            ended: list[tuple[Key, Trajectory]] = await collecting
            return ended
        except RayError as error:  # trajectories that were not collected yet are lost with it
            raise WorkersFailed(f"The coordinator of the workers died: {last_line(error)}") from error
        finally:
            collecting.cancel()
