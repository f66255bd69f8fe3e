"""Crew: the worker processes of one board, on a Ray cluster, kept at work.

Each is a process with an event loop and thousands of trajectories of its own. One that dies is begun anew by Ray, on
another node if its own is gone; what it had is the board's to give to others (dispatch.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from toolroll.errors import ToolrollError
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.dispatch import Key
from toolroll.rollout.metrics import WorkerMetrics
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.rollout.worker import BoardUnreachable, Orders, Worker

logger = logging.getLogger(__name__)

CONCURRENCY = 1_000_000
"""Calls that an actor has open: Ray's own default is 1,000, and a board has one open for each worker."""
RESTART_PAUSE = 1.0
"""Seconds before a worker that died is given work again."""


class WorkersFailed(ToolrollError):
    """The workers ended with an error that would come again, e.g. a rollout that can't be made."""


class Hands(Protocol):
    """What a worker does with a piece. Made in the worker's own process."""

    rollout: Rollout

    async def carry_out(self, work: Any) -> Trajectory:
        """Make the trajectory."""
        ...

    async def commit(self, worker: str, work: Any, trajectory: Trajectory) -> Any:
        """Make it count. What it gives is told to the board."""
        ...

    async def close(self) -> None:
        """Let everything go."""
        ...


class RayBoard:
    """A board in an actor, as a worker sees it."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    async def join(self, worker: str) -> None:
        """Begin, under a name that nobody had before."""
        await self._ask(self._actor.join, worker)

    async def exchange(self, worker: str, number: int, done: list[tuple[Key, Any]], want: int) -> Orders[Any] | None:
        """Tell what was done, and ask for more."""
        orders: Orders[Any] | None = await self._ask(self._actor.exchange, worker, number, done, want)
        return orders

    async def leave(self, worker: str) -> None:
        """Say goodbye."""
        await self._ask(self._actor.leave, worker)

    async def _ask(self, method: Any, *told: Any) -> Any:
        try:
            return await method.remote(*told)
        except RayError as error:
            raise BoardUnreachable(f"{type(error).__name__}: {error}") from error


class WorkerProcess:
    """A worker, as an actor. Ray may run it twice, after the first has died."""

    def __init__(self, make: Callable[[], Hands], capacity: int, name: str) -> None:
        self._hands = make()
        self._capacity = capacity
        self._name = name
        self._metrics = WorkerMetrics()

    async def work(self, board: ActorHandle[Any]) -> None:
        """Work until there is nothing left."""
        worker = Worker(RayBoard(board), self._carry_out, self._hands.commit, capacity=self._capacity, name=self._name)
        with rare_full_collections():
            await worker.run()
        await self._hands.close()

    async def abort(self) -> None:
        """Stop all generations, and wait until they have stopped."""
        await self._hands.rollout.abort()

    async def resume(self) -> None:
        """Let all go on from where they were."""
        self._hands.rollout.resume()

    async def _carry_out(self, work: Any) -> Trajectory:
        self._metrics.begun()
        trajectory = None
        try:
            trajectory = await self._hands.carry_out(work)
            return trajectory
        finally:
            self._metrics.ended(trajectory)


class Crew:
    """The worker processes of one board, kept at work."""

    def __init__(
        self, board: ActorHandle[Any], make: Callable[[], Hands], *, workers: int, capacity: int, name: str
    ) -> None:
        self.size = workers
        self._board = board
        options = {"num_cpus": 1, "max_restarts": -1, "max_concurrency": CONCURRENCY, "scheduling_strategy": "SPREAD"}
        remote = cast("Any", ray.remote(WorkerProcess).options(**options))
        self._actors: list[Any] = [remote.remote(make, capacity, f"{name}-{number}") for number in range(workers)]
        self._paused = False

    async def work(self) -> None:
        """Until there is nothing left. Raises WorkersFailed where a worker ended with an error of its own."""
        tasks = [asyncio.create_task(self._keep_at_work(actor)) for actor in self._actors]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self) -> None:
        """Stop all generations on all workers, and wait until they have stopped."""
        self._paused = True
        await self._tell_all("abort")

    async def resume(self) -> None:
        """Let all go on from where they were."""
        self._paused = False
        await self._tell_all("resume")

    def end(self) -> None:
        """End the processes."""
        for actor in self._actors:
            ray.kill(actor)

    async def _keep_at_work(self, actor: Any) -> None:
        while True:
            try:
                if self._paused:  # a process that was begun anew doesn't know
                    await actor.abort.remote()
                await actor.work.remote(self._board)
                return
            except RayTaskError as error:
                raise WorkersFailed(f"A worker could not go on: {last_line(error.cause)}") from error
            except RayError as error:  # it was killed, the machine ran out of memory, its node is gone, …
                if isinstance(error, RayActorError) and error.actor_init_failed:
                    raise WorkersFailed(f"A worker could not begin: {last_line(error)}") from error
                logger.warning("a worker died, and is begun anew: %s", last_line(error))
                await asyncio.sleep(RESTART_PAUSE)

    async def _tell_all(self, method: str) -> None:
        told = await asyncio.gather(
            *(getattr(actor, method).remote() for actor in self._actors), return_exceptions=True
        )
        for error in told:
            is_dead = isinstance(error, RayError) and not isinstance(error, RayTaskError)  # it generates nothing
            if isinstance(error, BaseException) and not is_dead:
                raise error


def number_of_nodes() -> int:
    """Of the cluster that this process is connected to."""
    nodes: list[dict[str, Any]] = cast("Any", ray).nodes()
    return max(1, len([node for node in nodes if node["Alive"]]))


def actor_here(kind: type, *, max_restarts: int = 0) -> Any:
    """An actor of this class on this node, and ended with this process: it has what the process needs to go on."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return cast("Any", ray.remote(kind)).options(
        num_cpus=0, max_concurrency=CONCURRENCY, scheduling_strategy=here, max_restarts=max_restarts
    )


def last_line(error: BaseException) -> str:
    """What an error of Ray's comes down to: it has the stack in it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
