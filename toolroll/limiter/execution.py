"""Run blocking functions on Ray workers, under the cluster's limit.

    pool = init_execution_pool(num_workers=16, rate_limit=32)
    answer = await pool.execute(fetch, url, timeout=10)

`pool.execute.remote(fetch, url)` returns a Ray reference instead, as the method of a Ray actor does.

Ray serializes the function, so any function works; its exceptions are raised in the caller. Cancelling a call that
waits for a slot removes it from the queue. Cancelling a call whose function runs releases the slot only when the
function ends, as a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from toolroll._internal.cancellation import finish_despite_cancellation
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.token_bucket import MAX_OPEN_CALLS

T = TypeVar("T")

DEFAULT_RESOURCE = "execution"
"""Name of the resource that pools share by default."""

MAX_WORKER_THREADS = 1000
"""Default number of threads of a worker, which start as needed. Equals Ray's default concurrency of an async actor."""


class PoolMode(Enum):
    """How an execution pool runs functions."""

    ThreadMode = 1
    """In threads of one process: for functions that mostly wait."""
    ProcessMode = 2
    """In one process per function: for functions that compute, or that may crash the process."""


class ExecutionWorker:
    """Runs functions in threads, each in a slot. Created as a Ray actor by `init_execution_pool`.

    Args:
        enable_global_rate_limit: Whether to apply `rate_limit`.
        rate_limit: Maximum number of functions that run at the same time, over all workers of the cluster with the same
            resource.
        threads: Maximum number of functions that this worker runs at the same time. The `max_concurrency` of the Ray
            actor also limits them.
        resource: Name of the limited resource.
    """

    def __init__(
        self,
        enable_global_rate_limit: bool = True,
        rate_limit: int = 10,
        *,
        threads: int = MAX_WORKER_THREADS,
        resource: str = DEFAULT_RESOURCE,
    ) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._free_threads = asyncio.Semaphore(threads)
        self._limiter = get_limiter(resource, rate_limit) if enable_global_rate_limit else None

    async def execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking function in a thread, in a slot of the limiter.

        Args:
            fn: Function to run.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The function's result.
        """
        slot = nullcontext() if self._limiter is None else self._limiter.slot()
        # The thread before the slot: a slot that waits for a thread would be unavailable to other workers.
        async with self._free_threads, slot:
            loop = asyncio.get_running_loop()
            return await finish_despite_cancellation(loop.run_in_executor(self._executor, partial(fn, *args, **kwargs)))


class PoolExecute:
    """The method `execute` of a pool, which can be awaited or called with `remote`.

    A copy in another process counts only the calls of that process.

    Args:
        workers: Workers of the pool.
    """

    def __init__(self, workers: list[ActorHandle[ExecutionWorker]]) -> None:
        self._workers = workers
        self._load = [0] * len(workers)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PoolExecute, (self._workers,)

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` on the worker with the fewest running calls.

        Args:
            fn: Function to run. It and its arguments must be serializable by Ray.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            The function's result.

        Raises:
            Exception: Any exception of the function.
        """
        index, reference = self._start(fn, args, kwargs)
        try:
            return cast("T", await reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise error.cause from None
        finally:
            self._finish(index)

    def remote(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> ObjectRef[T]:
        """Start `fn(*args, **kwargs)` on the worker with the fewest running calls.

        Args:
            fn: Function to run. It and its arguments must be serializable by Ray.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            Reference to the result, for `await` or `ray.get`. `ray.cancel` cancels the call.
        """
        index, reference = self._start(fn, args, kwargs)
        reference.future().add_done_callback(lambda _: self._finish(index))
        return cast("ObjectRef[T]", reference)

    def _start(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        """Return the index of the chosen worker and the reference to the result. Increase the load of the worker."""
        with self._lock:
            index = self._load.index(min(self._load))
            self._load[index] += 1
        try:
            # Without the lock: Ray's thread must never wait for a submission.
            return index, cast("Any", self._workers[index]).execute.remote(fn, *args, **kwargs)
        except BaseException:  # for example, an argument cannot be serialized
            self._finish(index)
            raise

    def _finish(self, index: int) -> None:
        with self._lock:  # Ray's thread also calls this
            self._load[index] -= 1


class ExecutionPool:
    """Workers that run blocking functions. Created by `init_execution_pool`.

    Args:
        workers: Workers of the pool.
    """

    def __init__(self, workers: list[ActorHandle[ExecutionWorker]]) -> None:
        self.workers = workers
        self.execute = PoolExecute(workers)
        """Runs a function: `await pool.execute(fn, *args)`, or `pool.execute.remote(fn, *args)` for a reference."""

    def close(self) -> None:
        """Kill the workers and the functions that they run."""
        for worker in self.workers:
            ray.kill(worker)


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: int = 10,
    mode: PoolMode = PoolMode.ThreadMode,
    *,
    resource: str = DEFAULT_RESOURCE,
) -> ExecutionPool:
    """Start a pool of threads or processes that run blocking functions under a limit.

    Args:
        num_workers: Maximum number of functions that this pool runs at the same time.
        enable_global_rate_limit: Whether to apply `rate_limit`.
        rate_limit: Maximum number of functions that run at the same time, over all pools of the cluster with the same
            resource.
        mode: Whether functions run in threads of one process or in separate processes.
        resource: Name of the limited resource.

    Returns:
        The pool. Call its `close` method to stop the workers.
    """
    count, threads = (1, num_workers) if mode is PoolMode.ThreadMode else (num_workers, 1)
    # A function may crash its process. Without a restart, the calls of the dead worker would fail at once, so that it
    # would always be the one with the least load.
    worker = ray.remote(ExecutionWorker).options(num_cpus=0, max_concurrency=MAX_OPEN_CALLS, max_restarts=-1)
    arguments: dict[str, Any] = {"rate_limit": rate_limit, "threads": threads, "resource": resource}
    workers = [worker.remote(enable_global_rate_limit, **arguments) for _ in range(count)]
    return ExecutionPool(cast("list[ActorHandle[ExecutionWorker]]", workers))
