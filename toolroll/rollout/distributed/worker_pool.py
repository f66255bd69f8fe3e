"""Run the worker processes of one coordinator on a Ray cluster.

Each worker is a process with its own event loop, which runs up to thousands of trajectories. Ray restarts a worker that
dies, on another node if necessary; the coordinator assigns its work items to others (`dispatch.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import reduce
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from toolroll.errors import ToolrollError
from toolroll.limiter.registry import close_limiters
from toolroll.rollout.distributed.dispatch import Results
from toolroll.rollout.distributed.worker import DEREGISTER_TIMEOUT_S, Assignment, CoordinatorUnreachable, Worker
from toolroll.rollout.gc_tuning import infrequent_full_gc
from toolroll.rollout.progress import RolloutProgress
from toolroll.rollout.rollout import Rollout, cancel_all
from toolroll.rollout.trajectory import Trajectory
from toolroll.tools.instance import RELEASE_TIMEOUT_S

logger = logging.getLogger(__name__)

ACTOR_MAX_CONCURRENCY = 1_000_000
"""Maximum number of concurrent calls of an actor: a coordinator has one per worker. Ray's default is 1,000."""
PROGRESS_TIMEOUT_S = 1.0
"""Timeout for a worker to state its progress."""
RESTART_BACKOFF_S = 1.0
"""Delay before work is sent to a restarted worker."""
STOP_TIMEOUT_S = RELEASE_TIMEOUT_S + DEREGISTER_TIMEOUT_S
"""Timeout for the workers to stop, before their processes are killed."""


class WorkersFailed(ToolrollError):
    """Raised when workers fail with an error that a restart would not fix, e.g. if creating the rollout fails."""


class SampleRunner(Protocol):
    """Produces and commits trajectories. Created in the process of each worker."""

    rollout: Rollout

    async def execute(self, payload: Any) -> Trajectory:
        """Produce the trajectory of a work item."""

    async def commit(self, worker: str, payload: Any, trajectory: Trajectory) -> Any:
        """Make the trajectory permanent, and return the result to report to the coordinator."""

    async def close(self) -> None:
        """Release all resources."""


class RayCoordinator:
    """Client of a coordinator that runs as a Ray actor. Implements the `Coordinator` protocol."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    async def register(self, worker: str, lease_s: float) -> None:
        """Register a worker."""
        await self._call(self._actor.register, worker, lease_s)

    async def exchange(self, worker: str, sequence: int, completed: Results, capacity: int) -> Assignment[Any] | None:
        """Report completed items and request new ones."""
        answer: Assignment[Any] | None = await self._call(self._actor.exchange, worker, sequence, completed, capacity)
        return answer

    async def deregister(self, worker: str) -> None:
        """Remove a worker."""
        await self._call(self._actor.deregister, worker)

    async def _call(self, method: Any, *args: Any) -> Any:
        try:
            return await method.remote(*args)
        except RayTaskError:  # an exception of the coordinator, which would be raised again
            raise
        except RayError as error:
            raise CoordinatorUnreachable(f"{type(error).__name__}: {error}") from error


class WorkerMetrics:
    """Metrics of one worker process, exported through Ray to Prometheus with the labels of its node and process."""

    def __init__(self) -> None:
        self._trajectories: Any = Counter(
            "toolroll_trajectories", "Finished trajectories.", tag_keys=("finish_reason", "outcome")
        )
        self._tokens: Any = Counter("toolroll_sampled_tokens", "Tokens sampled by the engine.")
        self._calls: Any = Counter("toolroll_tool_calls", "Tool calls.", tag_keys=("tool", "fault"))
        self._running_gauge: Any = Gauge("toolroll_trajectories_running", "Trajectories in progress.")
        self._running = 0

    async def track(self, running: Awaitable[Trajectory]) -> Trajectory:
        """Await a trajectory, and count it as running until then. A cancelled trajectory is not counted further."""
        self._running += 1
        self._running_gauge.set(self._running)
        try:
            trajectory = await running
        finally:
            self._running -= 1
            self._running_gauge.set(self._running)
        tags = {"finish_reason": str(trajectory.finish_reason), "outcome": trajectory.outcome}
        self._trajectories.inc(1, tags=tags)
        if sampled := sum(turn.tokens for turn in trajectory.turns):
            self._tokens.inc(sampled)
        for call in trajectory.calls:
            # A failed call may name any tool. Leave its name out: the model must not be able to create series.
            tool = str(call.tool) if call.fault is None else ""
            self._calls.inc(1, tags={"tool": tool, "fault": str(call.fault or "")})
        return trajectory


class WorkerProcess:
    """Ray actor that runs one worker. Ray may restart it after it dies."""

    def __init__(self, make_runner: Callable[[], SampleRunner], capacity: int, name: str) -> None:
        self._runner = make_runner()
        self._capacity = capacity
        self._name = name
        self._metrics = WorkerMetrics()
        self._running: asyncio.Task[None] | None = None

    async def run(self, coordinator: ActorHandle[Any]) -> None:
        """Run items until the coordinator has no more, or until `stop()`."""
        self._running = asyncio.create_task(self._run(coordinator))
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    async def stop(self) -> None:
        """Cancel the running items, and wait until their tools and all other resources are released."""
        if self._running is not None:
            await cancel_all([self._running])

    async def _run(self, coordinator: ActorHandle[Any]) -> None:
        worker = Worker(
            RayCoordinator(coordinator), self._execute, self._runner.commit, capacity=self._capacity, name=self._name
        )
        try:
            with infrequent_full_gc():
                await worker.run()
        finally:
            await self._runner.close()
            await asyncio.to_thread(close_limiters)

    async def progress(self) -> RolloutProgress:
        """Return what the trajectories of this process have done so far."""
        return self._runner.rollout.progress()

    async def abort(self) -> None:
        """Stop all generations, and wait until they have stopped."""
        await self._runner.rollout.abort()

    async def resume(self) -> None:
        """Continue the generations that `abort()` stopped."""
        self._runner.rollout.resume()

    async def _execute(self, payload: Any) -> Trajectory:
        return await self._metrics.track(self._runner.execute(payload))


class WorkerPool:
    """The worker processes of one coordinator.

    Args:
        coordinator: Actor handle of the coordinator.
        make_runner: Creates the sample runner in each worker process.
        workers: Number of processes.
        capacity: Maximum number of concurrent trajectories per process.
        name: Prefix of the workers' names.
    """

    def __init__(
        self,
        coordinator: ActorHandle[Any],
        make_runner: Callable[[], SampleRunner],
        *,
        workers: int,
        capacity: int,
        name: str,
    ) -> None:
        self._coordinator = coordinator
        remote = cast("Any", ray.remote(WorkerProcess)).options(
            num_cpus=1, max_restarts=-1, max_concurrency=ACTOR_MAX_CONCURRENCY, scheduling_strategy="SPREAD"
        )
        self._actors: list[Any] = [remote.remote(make_runner, capacity, f"{name}-{index}") for index in range(workers)]
        self._aborted = False
        self._started: set[Any] = set()
        """Actors whose processes have started."""
        self._progress: dict[Any, RolloutProgress] = {}
        """Last known progress, by actor."""

    async def progress(self) -> RolloutProgress:
        """Return the sum of the workers' progress. Of a worker that does not answer in time, the last known counts."""

        async def ask(actor: Any) -> None:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(PROGRESS_TIMEOUT_S):
                    self._progress[actor] = await actor.progress.remote()

        await asyncio.gather(*map(ask, self._actors))
        return reduce(RolloutProgress.merged, self._progress.values(), RolloutProgress())

    async def run(self) -> None:
        """Keep the workers running until all work is finished.

        Raises:
            WorkersFailed: If a worker raised an exception or could not be created. A worker that died is restarted.
        """
        tasks = [asyncio.create_task(self._keep_running(actor)) for actor in self._actors]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)

    async def abort(self) -> None:
        """Stop all generations on all workers, and wait until they have stopped."""
        self._aborted = True
        await self._call_all("abort")

    async def resume(self) -> None:
        """Continue the generations that `abort()` stopped."""
        self._aborted = False
        await self._call_all("resume")

    async def stop(self) -> None:
        """Stop the workers, so that they release their tools, and end their processes."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*(actor.stop.remote() for actor in self._started), return_exceptions=True)
        except TimeoutError:
            logger.warning("Workers did not stop within %g s and are killed.", STOP_TIMEOUT_S)
        finally:
            for actor in self._actors:
                ray.kill(actor)

    async def _keep_running(self, actor: Any) -> None:
        while True:
            try:
                await actor.progress.remote()
                self._started.add(actor)
                if self._aborted:  # a restarted process has lost this state
                    await actor.abort.remote()
                await actor.run.remote(self._coordinator)
                return
            except RayTaskError as error:
                raise WorkersFailed(f"A worker failed: {last_line(error.cause)}") from error
            except RayError as error:  # e.g. the process was killed, ran out of memory, or its node died
                if isinstance(error, RayActorError) and error.actor_init_failed:
                    raise WorkersFailed(f"A worker could not be started: {last_line(error)}") from error
                self._started.discard(actor)
                logger.warning("A worker died and is being restarted: %s", last_line(error))
                await asyncio.sleep(RESTART_BACKOFF_S)

    async def _call_all(self, method: str) -> None:
        results = await asyncio.gather(
            *(getattr(actor, method).remote() for actor in self._actors), return_exceptions=True
        )
        for result in results:
            worker_died = isinstance(result, RayError) and not isinstance(result, RayTaskError)
            if isinstance(result, BaseException) and not worker_died:  # a dead worker generates nothing
                raise result


def count_nodes() -> int:
    """Return the number of live nodes in the connected Ray cluster, at least 1."""
    nodes: list[dict[str, Any]] = cast("Any", ray).nodes()
    return max(1, len([node for node in nodes if node["Alive"]]))


def local_actor(actor_class: type, *, max_restarts: int = 0) -> Any:
    """Return a remote class whose actors run on this node, so that they live and die with the node of the caller."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return cast("Any", ray.remote(actor_class)).options(
        num_cpus=0, max_concurrency=ACTOR_MAX_CONCURRENCY, scheduling_strategy=this_node, max_restarts=max_restarts
    )


def last_line(error: BaseException) -> str:
    """Return the last line of an error message. Messages of RayError contain the remote traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
