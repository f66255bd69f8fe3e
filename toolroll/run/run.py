"""Run a whole data set, in this process or on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from toolroll._internal.ray_cluster import NoCluster, connect, start_local
from toolroll.errors import RecordsNotWritten, RunFailed
from toolroll.limiter.registry import get_limiter
from toolroll.rollout.distributed.dispatch import NO_LEASE_S
from toolroll.rollout.distributed.worker import COORDINATOR_RETRY_INTERVAL_S, Worker
from toolroll.rollout.progress import RolloutProgress
from toolroll.run.config import RunConfig
from toolroll.run.retry import set_aside_failed
from toolroll.run.run_coordinator import RunCoordinator, lock_directory
from toolroll.run.sample_worker import SampleWorker, sandbox_tools
from toolroll.run.status import RunSnapshot

FAILURE_CHECK_INTERVAL_S = 0.5
"""Interval at which `wait` checks whether the run makes sense to continue."""


class Run:
    """A run over a data set: samples every prompt `n` times and records each trajectory exactly once.

    Entering the async context manager starts the run; leaving it stops the run. A run that was stopped or killed
    resumes from its records when it is started again with the same config.

    Args:
        config: Configuration of the run.

    Attributes:
        retried: Number of samples that failed in an earlier run and are attempted again.

    Raises:
        ConfigError: On entering, if the data, the engine, the tools or the run's directory cannot be used.

    Example:
        ```python
        from toolroll import Run, RunConfig

        async with Run(RunConfig.load("run.yaml")) as run:
            await run.wait()
        print((await run.status()).aggregates["pass_at_k"])
        ```
    """

    _backend: _LocalBackend | _RayBackend
    _running: asyncio.Task[None]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.retried = 0
        self._final_status: RunSnapshot | None = None

    async def __aenter__(self) -> Self:
        if self.config.retry == "infra":
            self.retried = await asyncio.to_thread(_set_aside_failed, self.config)
        self._backend = _LocalBackend(self.config) if self.config.cluster is None else _RayBackend(self.config)
        self._running = asyncio.create_task(self._backend.workers.run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        try:
            self._final_status = await self._backend.status()
        finally:
            await self._backend.close()

    async def wait(self) -> None:
        """Wait until all trajectories are recorded.

        Raises:
            RunFailed: If the first trajectories all failed with the same error.
            WorkersFailed: If workers on a cluster failed with an error that a restart would not fix.
            Exception: Any other error that stopped the run, e.g. OSError if the disk is full.
        """
        while not self._running.done():
            await asyncio.wait([self._running], timeout=FAILURE_CHECK_INTERVAL_S)
            failure = (await self.status()).failure
            if failure is not None:
                raise RunFailed(failure)
        await self._running

    async def status(self) -> RunSnapshot:
        """Return the current status of the run, or its final status if it has ended.

        Returns:
            A snapshot of progress, workers, slots in use and aggregated outcomes.

        Raises:
            WorkersFailed: If the coordinator on a cluster died and could not be restarted.
        """
        return self._final_status or await self._backend.status()


class _LocalBackend:
    """Runs the coordinator and one worker in this process."""

    def __init__(self, config: RunConfig) -> None:
        self._limits = _resource_limits(config)
        self._runner = SampleWorker(config, separate_directories=False)
        # The coordinator is created last, because it locks the run's directory.
        self._coordinator = RunCoordinator(config, workers=1, in_process=True)
        execute, commit = self._runner.execute, self._runner.commit
        capacity = config.max_in_flight
        self.workers = Worker(self._coordinator, execute, commit, capacity=capacity, name="here", lease_s=NO_LEASE_S)

    async def status(self) -> RunSnapshot:
        limiters = [get_limiter(resource, limit) for resource, limit in self._limits.items()]
        status = _with_progress(await self._coordinator.status(), self._runner.rollout.progress())
        return _with_slots(status, ((one.in_use, one.limit) for one in limiters))

    async def close(self) -> None:
        await self._runner.close()
        await self._coordinator.close()


class _RayBackend:
    """Runs the coordinator as an actor on this node, and workers on all nodes."""

    def __init__(self, config: RunConfig) -> None:
        self._owns_connection = _connect(str(config.cluster))
        import ray

        from toolroll.rollout.distributed.worker_pool import WorkerPool, count_nodes, local_actor

        self._ray: Any = ray
        self._limits = _resource_limits(config)
        workers = config.workers or count_nodes()
        # The coordinator can be restarted: its state is derived from the records.
        coordinator_class = local_actor(RunCoordinator, max_restarts=-1)
        self._coordinator: Any = coordinator_class.remote(config, workers)
        self._last_status: RunSnapshot | None = None
        make_runner = partial(SampleWorker, config, separate_directories=True, import_paths=list(sys.path))
        self.workers = WorkerPool(
            self._coordinator, make_runner, workers=workers, capacity=config.max_in_flight, name="worker"
        )

    async def status(self) -> RunSnapshot:
        from toolroll.rollout.distributed.worker_pool import WorkersFailed, last_line

        while True:
            try:
                self._last_status = await self._coordinator.status.remote()
            except self._ray.exceptions.ActorDiedError as error:
                raise WorkersFailed(f"The coordinator of the run died: {last_line(error)}") from error
            except self._ray.exceptions.RayError:
                pass  # the coordinator is being restarted
            if self._last_status is not None:
                status = _with_progress(self._last_status, await self.workers.progress())
                return _with_slots(status, await asyncio.to_thread(self._slots))
            await asyncio.sleep(COORDINATOR_RETRY_INTERVAL_S)

    async def close(self) -> None:
        self.workers.kill()
        with contextlib.suppress(self._ray.exceptions.RayError):  # then the next run waits until the leases expire
            await self._coordinator.close.remote()
        self._ray.kill(self._coordinator)
        if self._owns_connection:
            self._ray.shutdown()

    def _slots(self) -> list[tuple[int, int]]:
        """Return slots in use and limit of each resource. A resource that was never used has no limiter yet."""
        from toolroll.limiter.token_bucket import limiter_status

        slots = []
        for resource in self._limits:
            with contextlib.suppress(ValueError, self._ray.exceptions.RayError):
                status = limiter_status(resource, timeout=1.0)
                slots.append((status.in_use, status.limit))
        return slots


def _set_aside_failed(config: RunConfig) -> int:
    """Make the samples that failed in an earlier run missing, so that they are attempted again."""
    if not Path(config.rollout_data_dir).is_dir():
        return 0
    lock = lock_directory(config)
    try:
        return set_aside_failed(Path(config.rollout_data_dir))
    except OSError as error:
        raise RecordsNotWritten.because(error, config.rollout_data_dir) from error
    finally:
        lock.release()


def _connect(address: str) -> bool:
    """Connect to a cluster, starting one if `auto` finds none. Return False if this process was already connected."""
    try:
        return connect(address)
    except NoCluster:
        if address != "auto" or "RAY_ADDRESS" in os.environ:
            raise
    start_local(num_cpus=os.cpu_count() or 1)
    return True


def _resource_limits(config: RunConfig) -> dict[str, int]:
    return {tool.resource: tool.settings.rate_limit for tool in sandbox_tools(config)}


def _with_progress(status: RunSnapshot, progress: RolloutProgress) -> RunSnapshot:
    """Return the status with what the running trajectories have done. A restarted worker has forgotten its counts."""
    return replace(
        status,
        tokens=max(status.tokens, progress.tokens),
        calls=max(status.calls, progress.calls),
        unreachable=progress.unreachable,
    )


def _with_slots(status: RunSnapshot, slots: Iterable[tuple[int, int]]) -> RunSnapshot:
    """Return the status with the slots of all resources added up."""
    known = list(slots)
    if not known:
        return status
    return replace(status, in_flight=sum(used for used, _ in known), limit=sum(limit for _, limit in known))
