"""The limiter of the original design, for comparison: a semaphore in a Ray actor, asked twice per execution.

Written anew from the published description, with its ways kept: the release is registered before the acquire, the actor
has one name, no lifetime of its own, and lives in the namespace of the job that made it.
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
"""One thread in which all wait in turn, and ten in which places are given back."""


class Semaphore:
    """Counts what is in flight. Ray makes the actor of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._semaphore = threading.Semaphore(limit)

    @ray.method(concurrency_group="acquire")
    def acquire(self) -> None:
        """Wait for a place."""
        self._semaphore.acquire()
        self.count += 1

    @ray.method(concurrency_group="release")
    def release(self) -> None:
        """Give a place back."""
        self._semaphore.release()
        self.count -= 1

    def current(self) -> tuple[int, int]:
        """How many there are, and of how many."""
        return self.count, self.limit


def semaphore(name: str | None, limit: int, **options: Any) -> Any:
    """The actor of that name in this job's namespace, made if it isn't there."""
    remote: Any = ray.remote
    made = remote(concurrency_groups=GROUPS, num_cpus=0)(Semaphore)
    return made.options(name=name, get_if_exists=name is not None, **options).remote(limit)


class AsyncSemaphore:
    """The obvious repair: an async actor, in which waiting takes no thread."""

    def __init__(self, limit: int) -> None:
        self._semaphore = asyncio.Semaphore(limit)

    async def acquire(self) -> None:
        """Wait for a place."""
        await self._semaphore.acquire()

    async def release(self) -> None:
        """Give a place back."""
        self._semaphore.release()


class Worker:
    """Runs functions, each between an acquire and a release."""

    def __init__(self, name: str, limit: int) -> None:
        self._semaphore = semaphore(name, limit)

    def execute(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run the function; None if it fails."""
        with ExitStack() as stack:
            stack.callback(self._semaphore.release.remote)
            ray.get(self._semaphore.acquire.remote())
            try:
                return fn(*args)
            except Exception as error:
                logger.warning("failed: %s", error)
        return None
