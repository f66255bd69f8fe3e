"""Run the work items of one process.

    worker = Worker(coordinator, execute, commit, capacity=1024)
    await worker.run()

The worker runs up to `capacity` items concurrently. `execute` computes the result of an item and may take any time.
`commit` makes the result permanent, e.g. by writing it to disk; its return value is reported to the coordinator.

Invariants:

- `commit` is called only while the worker's lease on the item is valid. An item is committed once or abandoned. The
  process may be suspended before `commit` takes effect, so `commit` raises `LeaseExpired` if the worker is lost.
- A worker whose lease has expired, or which was too late to commit an item, abandons all its items, which are assigned
  to others, and registers again under a new name. If an item blocked the event loop for longer than the lease, the next
  lease is long enough for it, up to `MAX_WORKER_LEASE_S`. Otherwise no worker could ever commit that item.
- A request to the coordinator is repeated until it is answered, and counts once.
- Any other exception of `execute` or `commit`, including CancelledError, stops the worker: it would affect every item.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

from toolroll.errors import ToolrollError
from toolroll.rollout.distributed.dispatch import (
    MAX_WORKER_LEASE_S,
    NO_LEASE_S,
    WORKER_LEASE_S,
    Results,
    WorkerLease,
    WorkItem,
)

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = WORKER_LEASE_S / 5
"""Interval between heartbeats of an idle worker."""
COORDINATOR_RETRY_INTERVAL_S = 0.5
"""Delay before a failed request to the coordinator is repeated."""
DEREGISTER_TIMEOUT_S = 5.0
"""Timeout for deregistration. If it fails, the worker's lease expires."""


@dataclass(frozen=True)
class Assignment(Generic[T]):
    """The coordinator's answer to a worker."""

    items: list[WorkItem[T]]
    """New items to run."""
    is_finished: bool
    """True if there will be no more items."""
    min_interval_s: float
    """Minimum time until the worker's next request."""


class CoordinatorUnreachable(Exception):
    """Raised when the coordinator did not answer. It may have processed the request."""


class LeaseExpired(Exception):
    """Raised when the coordinator cannot be reached, or has declared this worker lost. `commit` may raise it."""


class ItemCancelled(ToolrollError):
    """Raised when `execute` or `commit` raised CancelledError, although the worker did not cancel the item."""


class Coordinator(Protocol[T]):
    """Assigns work items to workers and collects their results."""

    async def register(self, worker: str, lease_s: float) -> None:
        """Register a worker under a name that has not been used before.

        Args:
            worker: Name of the worker.
            lease_s: Time without a request after which the worker is lost.

        Raises:
            CoordinatorUnreachable: If the coordinator did not answer.
        """

    async def exchange(self, worker: str, sequence: int, completed: Results, capacity: int) -> Assignment[T] | None:
        """Report completed items and request new ones.

        Args:
            worker: Name of the worker.
            sequence: Number of the request, starting at 1. A request with the same number as the last one gets the
                same answer and is counted once. Copies of older requests are ignored.
            completed: Keys of completed items with their results.
            capacity: Number of further items that the worker can run.

        Returns:
            The assignment, or None if the worker is lost and its items belong to others.

        Raises:
            CoordinatorUnreachable: If the coordinator did not answer.
        """

    async def deregister(self, worker: str) -> None:
        """Remove a worker. Its items are assigned to others immediately.

        Raises:
            CoordinatorUnreachable: If the coordinator did not answer.
        """


@dataclass(frozen=True)
class Worker(Generic[T]):
    """Runs work items, up to `capacity` of them concurrently.

    Args:
        coordinator: Assigns the items.
        execute: Computes the result of an item from its payload.
        commit: Makes a result permanent. Called with the worker's current name, the payload and the result.
        capacity: Maximum number of concurrent items.
        name: Prefix of the worker's name.
        lease_s: Time without a request after which the coordinator declares the worker lost; `NO_LEASE_S` for a worker
            in the process of its coordinator.
    """

    coordinator: Coordinator[T]
    execute: Callable[[T], Awaitable[Any]]
    commit: Callable[[str, T, Any], Awaitable[Any]]
    _: KW_ONLY
    capacity: int
    name: str = "worker"
    lease_s: float = WORKER_LEASE_S

    async def run(self) -> None:
        """Run items until the coordinator has no more."""
        lease_s = self.lease_s
        while True:
            name = f"{self.name}-{uuid4().hex[:8]}"
            session = _WorkerSession(self, name, lease_s)
            try:
                return await session.run()
            except LeaseExpired:
                lease_s = max(lease_s, min(2 * session.longest_wait_s, MAX_WORKER_LEASE_S))
                logger.warning("The lease of %s expired; abandoning its work items and registering again.", name)


class _WorkerSession(Generic[T]):
    """A worker under one name, until all work is finished or its lease expires."""

    def __init__(self, worker: Worker[T], name: str, lease_s: float) -> None:
        self.longest_wait_s = 0.0
        """Longest time between an answer and the next request. Exceeds the heartbeat interval if an item blocks the
        event loop, or if the process is suspended."""
        self._worker = worker
        self._name = name
        self._sequence = 0
        self._lease_s = lease_s
        self._lease = WorkerLease(time.monotonic(), lease_s)
        self._running: set[asyncio.Task[None]] = set()
        self._committing: set[asyncio.Task[None]] = set()
        self._completed: Results = []
        self._item_ended = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Run items until all work is finished. Raises LeaseExpired, and any exception of an item."""
        try:
            await self._request(lambda: self._worker.coordinator.register(self._name, self._lease_s))
            while not await self._exchange():
                if self._error is not None:
                    raise self._error
        finally:
            await self._shut_down()

    async def _exchange(self) -> bool:
        """Report completed items, start new ones, and wait for the next exchange. Return True if all is finished."""
        self._item_ended.clear()
        reported = list(self._completed)
        self._sequence += 1
        sequence, capacity = self._sequence, self._worker.capacity - len(self._running)
        assignment = await self._request(
            lambda: self._worker.coordinator.exchange(self._name, sequence, reported, capacity)
        )
        if assignment is None:
            raise LeaseExpired
        del self._completed[: len(reported)]  # only now: if the request is cancelled, they are reported at shutdown
        for item in assignment.items:
            task = asyncio.create_task(self._run_item(item), name=f"Work item {item.key}")
            self._running.add(task)
            task.add_done_callback(self._on_item_ended)
        if assignment.is_finished and not self._running and not self._completed:
            return True
        answered_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(HEARTBEAT_INTERVAL_S, assignment.min_interval_s)):
                await asyncio.sleep(assignment.min_interval_s)
                await self._item_ended.wait()
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - answered_at)
        return False

    async def _request(self, send: Callable[[], Awaitable[R]]) -> R:
        """Repeat a request until it is answered or the lease expires."""
        while True:
            sent_at = time.monotonic()
            try:
                async with asyncio.timeout(None if self._worker.lease_s == NO_LEASE_S else self._worker.lease_s):
                    answer = await send()
            except (CoordinatorUnreachable, TimeoutError) as error:
                logger.debug("%s cannot reach the coordinator: %s", self._name, error)
                if not self._lease.is_valid(time.monotonic()):
                    raise LeaseExpired from None
                await asyncio.sleep(COORDINATOR_RETRY_INTERVAL_S)
            else:
                self._lease.renew(sent_at)
                return answer

    async def _run_item(self, item: WorkItem[T]) -> None:
        result = await self._worker.execute(item.payload)
        if not self._lease.is_valid(time.monotonic()):
            # Ends the session, even if the coordinator has not noticed: it would wait for the result of this item.
            raise LeaseExpired
        task = asyncio.current_task()
        assert task is not None
        self._committing.add(task)
        self._completed.append((item.key, await self._worker.commit(self._name, item.payload, result)))

    def _on_item_ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._committing.discard(task)
        error: BaseException | None
        if task.cancelled():  # while the worker shuts down, this error is ignored
            error = ItemCancelled(f"{task.get_name()}: It raised CancelledError. Check the reward functions and tools.")
        else:
            error = task.exception()
        self._error = self._error or error
        self._item_ended.set()

    async def _shut_down(self) -> None:
        """Cancel running items and deregister.

        Commits are awaited and reported first: the coordinator must know of them before it reassigns the items.
        """
        running = list(self._running)
        for task in self._running - self._committing:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(CoordinatorUnreachable, TimeoutError):
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                if self._completed:
                    await self._worker.coordinator.exchange(self._name, self._sequence + 1, self._completed, 0)
                await self._worker.coordinator.deregister(self._name)
