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
from toolroll.limiter.budget_file import BUDGET_SAVE_INTERVAL_S, BudgetFile
from toolroll.limiter.registry import close_limiters, get_limiter, limiter_slots
from toolroll.rollout.distributed.dispatch import NO_LEASE_S
from toolroll.rollout.distributed.worker import COORDINATOR_RETRY_INTERVAL_S, Worker
from toolroll.rollout.progress import RolloutProgress
from toolroll.run.budgets import budget_limits
from toolroll.run.config import RunConfig
from toolroll.run.data import PromptRows
from toolroll.run.reporting.reporter import REPORT_INTERVAL_S, RunReporter
from toolroll.run.resume import set_aside_failed
from toolroll.run.run_coordinator import RunCoordinator, lock_directory, mcp_identity
from toolroll.run.sample_worker import SampleWorker, load_tools, sandbox_tools
from toolroll.run.status import RunSnapshot
from toolroll.tools.cache.backend import stop_cluster_store
from toolroll.tools.cache.tool_calls import cache_files

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
        started_cluster: Whether the run has started the Ray cluster that it uses, and stops it at the end.

    Raises:
        ConfigError: On entering, if the data, the engine, the tools, the run's directory or its `budgets.json` cannot
            be used.

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
    _budgets: BudgetFile
    _saving_budgets: asyncio.Task[None]
    _reporter: RunReporter
    _reporting: asyncio.Task[None] | None = None

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.retried = 0
        self.started_cluster = False
        self._final_status: RunSnapshot | None = None

    async def __aenter__(self) -> Self:
        if self.config.retry == "infra":
            self.retried = await asyncio.to_thread(_set_aside_failed, self.config)
        self._backend = _LocalBackend(self.config) if self.config.cluster is None else _RayBackend(self.config)
        self.started_cluster = self._backend.started_cluster
        try:
            # After the backend, which locks the directory: another run may still have been spending.
            self._budgets = BudgetFile(Path(self.config.rollout_data_dir))
            try:
                await asyncio.to_thread(self._budgets.restore, budget_limits(self.config))
                self._reporter = RunReporter(self.config)
            except BaseException:
                await asyncio.to_thread(self._budgets.close)
                raise
        except BaseException:
            await self._backend.close()
            raise
        self._saving_budgets = asyncio.create_task(self._save_budgets())
        self._running = asyncio.create_task(self._backend.workers.run())
        if self._reporter.is_active:
            self._reporting = asyncio.create_task(self._report())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = [task for task in (self._running, self._saving_budgets, self._reporting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            try:
                await self._backend.stop_workers()
            finally:
                await asyncio.to_thread(self._budgets.close)  # when nothing is spent any more
            self._final_status = await self.status()
            self._reporter.report(self._final_status)
        finally:
            try:
                await self._backend.close()
            finally:
                await self._reporter.close()

    async def wait(self) -> None:
        """Wait until all trajectories are recorded, or until a budget is spent and the running ones have ended.

        `status().exhausted` states whether a budget is spent.

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
        if self._final_status is not None:
            return self._final_status
        status = await self._backend.status()
        return replace(status, spent=await asyncio.to_thread(self._budgets.spent))

    async def _save_budgets(self) -> None:
        while True:
            await asyncio.sleep(BUDGET_SAVE_INTERVAL_S)
            await asyncio.to_thread(self._budgets.save)

    async def _report(self) -> None:
        while True:
            self._reporter.report(await self.status())
            await asyncio.sleep(REPORT_INTERVAL_S)


class _LocalBackend:
    """Runs the coordinator and one worker in this process."""

    started_cluster = False

    def __init__(self, config: RunConfig) -> None:
        self._limits = _resource_limits(config)
        self._runner = SampleWorker(config, separate_directories=False, data_hash=PromptRows(config.data).fingerprint())
        # The coordinator is created last, because it locks the run's directory.
        self._coordinator = RunCoordinator(config, workers=1, in_process=True)
        execute, commit = self._runner.execute, self._runner.commit
        capacity = config.max_in_flight
        self.workers = Worker(self._coordinator, execute, commit, capacity=capacity, name="here", lease_s=NO_LEASE_S)

    async def status(self) -> RunSnapshot:
        limiters = [get_limiter(resource, limit) for resource, limit in self._limits.items()]
        status = _with_progress(await self._coordinator.status(), self._runner.rollout.progress())
        return _with_slots(replace(status, slots=limiter_slots()), ((one.in_use, one.limit) for one in limiters))

    async def stop_workers(self) -> None:
        """Do nothing: the worker has stopped with its `run()`."""

    async def close(self) -> None:
        await self._runner.close()
        await self._coordinator.close()


class _RayBackend:
    """Runs the coordinator as an actor on this node, and workers on all nodes."""

    def __init__(self, config: RunConfig) -> None:
        self._owns_connection, self.started_cluster = _connect(str(config.cluster))
        import ray

        from toolroll.rollout.distributed.worker_pool import WorkerPool, count_nodes, local_actor

        self._ray: Any = ray
        self._limits = _resource_limits(config)
        workers = config.workers or count_nodes()
        # The coordinator can be restarted: its state is derived from the records.
        coordinator_class = local_actor(RunCoordinator, max_restarts=-1)
        self._coordinator: Any = coordinator_class.remote(config, workers)
        self._last_status: RunSnapshot | None = None
        tools = load_tools(config)
        self._cache_files = cache_files(tools, run_directory=Path(config.rollout_data_dir))
        make_runner = partial(
            SampleWorker,
            config,
            separate_directories=True,
            import_paths=list(sys.path),
            data_hash=PromptRows(config.data).fingerprint(),
            mcp_identity=mcp_identity(tools),
        )
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

    async def stop_workers(self) -> None:
        """Stop the workers, which return the credit that they have not spent."""
        await self.workers.progress()  # the last one that can be known
        await self.workers.stop()

    async def close(self) -> None:
        await self.workers.stop()
        with contextlib.suppress(self._ray.exceptions.RayError):  # then the next run waits until the leases expire
            await self._coordinator.close.remote()
        self._ray.kill(self._coordinator)
        for path in self._cache_files:
            stop_cluster_store(path)
        if self._owns_connection:
            await asyncio.to_thread(close_limiters)
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


def _connect(address: str) -> tuple[bool, bool]:
    """Connect to a cluster, starting one if `auto` finds none.

    Returns:
        Whether this call connected the process, and whether it started the cluster.
    """
    try:
        return connect(address), False
    except NoCluster:
        if address != "auto" or "RAY_ADDRESS" in os.environ:
            raise
    start_local(num_cpus=os.cpu_count() or 1)
    return True, True


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
