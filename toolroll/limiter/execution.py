"""A pool that runs blocking functions under the limit, in a process of its own or in many.

    pool = init_execution_pool(num_workers=16, rate_limit=32)
    answer = await pool.execute(fetch, url, timeout=10)

The function is sent by Ray, so it may be any function. Its exception comes back as itself. A call that is cancelled
while it waits takes nothing with it; one that is cancelled while its function runs keeps its slot until the function
has ended, as a thread can't be stopped and what runs must be counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from toolroll.limiter.limiter import get_limiter
from toolroll.limiter.token_bucket import MAX_OPEN_CALLS

T = TypeVar("T")


class PoolMode(Enum):
    """Where the functions run."""

    ThreadMode = 1
    """All in one process, each in a thread: for functions that mostly wait."""
    ProcessMode = 2
    """Each in a process that runs nothing else meanwhile: for functions that compute, or that may crash it."""


class ExecutionWorker:
    """Runs functions in threads, each under a slot. Ray makes actors of it; see `init_execution_pool`."""

    def __init__(self, threads: int, resource: str, rate_limit: int | None) -> None:
        self._threads = ThreadPoolExecutor(threads)
        self._free = asyncio.Semaphore(threads)
        self._limiter = None if rate_limit is None else get_limiter(resource, rate_limit)

    async def execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the function and give back what it returns."""
        async with AsyncExitStack() as stack:
            # A thread first: a slot that waits for a thread would be kept from those who could use it.
            await stack.enter_async_context(self._free)
            if self._limiter is not None:
                await stack.enter_async_context(self._limiter.slot())
            running = asyncio.get_running_loop().run_in_executor(self._threads, partial(fn, *args, **kwargs))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                raise


class ExecutionPool:
    """Workers, and the calls that are under way on them."""

    def __init__(self, workers: list[ActorHandle[ExecutionWorker]]) -> None:
        self.workers = workers
        self._load = [0] * len(workers)

    async def execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` on the pool. What it raises is raised here."""
        number = self._load.index(min(self._load))
        self._load[number] += 1
        execute = cast("Any", self.workers[number]).execute
        reference = execute.remote(fn, *args, **kwargs)
        try:
            return cast("T", await reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise error.cause from None
        finally:
            self._load[number] -= 1

    def close(self) -> None:
        """End the workers, whatever they run."""
        for worker in self.workers:
            ray.kill(worker)


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: int = 10,
    mode: PoolMode = PoolMode.ThreadMode,
    *,
    resource: str = "execution",
) -> ExecutionPool:
    """A pool of `num_workers` threads or processes, with no more than `rate_limit` functions running over the cluster.

    Args:
        num_workers: How many functions this pool runs at once.
        enable_global_rate_limit: Whether the limit holds at all.
        rate_limit: How many run at once over all pools of the cluster that name the same resource.
        mode: Threads of one process, or processes.
        resource: What is limited.
    """
    count, threads = (1, num_workers) if mode is PoolMode.ThreadMode else (num_workers, 1)
    worker = ray.remote(ExecutionWorker).options(num_cpus=0, max_concurrency=MAX_OPEN_CALLS)
    limit = rate_limit if enable_global_rate_limit else None
    workers = [cast("ActorHandle[ExecutionWorker]", worker.remote(threads, resource, limit)) for _ in range(count)]
    return ExecutionPool(workers)
