"""Limiter of the original design, for comparison: a semaphore in a Ray actor, with two remote calls per execution.

Reimplemented from the published description, including its faults: the release is registered before the acquire, and
the actor is not detached and is in the namespace of the job that created it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import ray

logger = logging.getLogger(__name__)


GROUPS = {"acquire": 1, "release": 10}
"""Threads of the actor: all waiters share one, releases have ten."""


class Semaphore:
    """Counts running executions. Created as a Ray actor."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._semaphore = threading.Semaphore(limit)

    @ray.method(concurrency_group="acquire")
    def acquire(self) -> None:
        """Wait for a slot."""
        self._semaphore.acquire()
        self.count += 1

    @ray.method(concurrency_group="release")
    def release(self) -> None:
        """Release a slot."""
        self._semaphore.release()
        self.count -= 1

    def current(self) -> tuple[int, int]:
        """Return the number of slots in use and the limit."""
        return self.count, self.limit


def semaphore(name: str | None, limit: int, **options: Any) -> Any:
    """Return the actor of that name in this job's namespace, creating it if necessary."""
    remote: Any = ray.remote
    actor = remote(concurrency_groups=GROUPS, num_cpus=0)(Semaphore)
    return actor.options(name=name, get_if_exists=name is not None, **options).remote(limit)


class AsyncSemaphore:
    """Variant as an async actor, in which waiters occupy no threads."""

    def __init__(self, limit: int) -> None:
        self._semaphore = asyncio.Semaphore(limit)

    async def acquire(self) -> None:
        """Wait for a slot."""
        await self._semaphore.acquire()

    async def release(self) -> None:
        """Release a slot."""
        self._semaphore.release()


class Worker:
    """Runs functions, each between an acquire and a release."""

    def __init__(self, name: str, limit: int) -> None:
        self._semaphore = semaphore(name, limit)

    def execute(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a function and return its result, or None if it fails."""
        with ExitStack() as stack:
            stack.callback(self._semaphore.release.remote)
            ray.get(self._semaphore.acquire.remote())
            try:
                return fn(*args)
            except Exception as error:
                logger.warning("function failed: %s", error)
        return None
