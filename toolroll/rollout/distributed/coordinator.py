"""Coordinate workers: assign work items, collect results, and reassign the items of lost workers.

`Dispatch` makes the decisions. This module adds the clock, idempotent answers to repeated requests, and the recovery of
lost workers. A coordinator runs in the same process as its worker, or as a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S, Dispatch, Key, LostWorker, Results, WorkItem
from toolroll.rollout.distributed.worker import HEARTBEAT_INTERVAL_S, Assignment

T = TypeVar("T")

logger = logging.getLogger(__name__)

MIN_EXCHANGE_INTERVAL_S = 0.02
"""Minimum interval between two requests from one worker."""
LEASE_CHECK_INTERVAL_S = WORKER_LEASE_S / 10
RECOVERY_RETRY_INTERVAL_S = 5.0
"""Delay before the recovery of a lost worker is tried again, e.g. if its records cannot be read."""
MAX_EXCHANGES_PER_S = 1000
"""Maximum rate of requests from all workers together. An actor can handle several times as many."""


class WorkCoordinator(Generic[T]):
    """Base class of coordinators. Implements the `Coordinator` protocol.

    Subclasses override `record_result()`, and `find_committed()` if workers commit results to a shared place. Lost
    workers are recovered in separate tasks, so that none delays the others.

    Args:
        source: Items to assign.
        workers: Expected number of workers.
        stays_open: Keep idle workers waiting for further items (`add()`) when all items are completed.
    """

    def __init__(self, source: Iterator[WorkItem[T]], *, workers: int = 1, stays_open: bool = False) -> None:
        self.dispatch = Dispatch(source, workers=workers)
        """Assignments of items to workers."""
        self.lost_workers = 0
        """Number of workers that were lost."""
        self._names: set[str] = set()
        self._last_answers: dict[str, tuple[int, Assignment[T]]] = {}
        self._stays_open = stays_open
        self._work_available = asyncio.Event()
        self._lease_monitor: asyncio.Task[None] | None = None
        self._recoveries: set[asyncio.Task[None]] = set()

    def record_result(self, key: Key, result: Any) -> None:
        """Process the result of an item. Called exactly once per item."""
        raise NotImplementedError

    async def find_committed(self, lost: LostWorker[T]) -> Results:
        """Return the items that a lost worker had committed without reporting them, with their results.

        Must make sure that the worker commits no further item. Is repeated after an OSError.
        """
        return []

    async def register(self, worker: str, lease_s: float = WORKER_LEASE_S) -> None:
        """Register a worker under a name that has not been used before. Repeated calls have no effect."""
        if self._lease_monitor is None:
            self._lease_monitor = asyncio.create_task(self._monitor_leases(time.monotonic()))
        if worker not in self._names:  # a copy of the request can arrive after the worker has left
            self._names.add(worker)
            self.dispatch.register(worker, time.monotonic(), lease_s)

    async def exchange(self, worker: str, sequence: int, completed: Results, capacity: int) -> Assignment[T] | None:
        """Record completed items and assign up to `capacity` new ones.

        Args:
            worker: Name of the worker.
            sequence: Number of the request, starting at 1. A request with the same number as the last one gets the
                same answer and is counted once. Copies of older requests are ignored.
            completed: Keys of completed items with their results.
            capacity: Number of further items that the worker can run.

        Returns:
            The assignment, or None if the worker is lost and its items belong to others.
        """
        if not self.dispatch.renew_lease(worker, time.monotonic()):
            return None
        if earlier := self._earlier_answer(worker, sequence):
            return earlier
        for key, result in completed:
            if self.dispatch.complete(worker, key):
                self.record_result(key, result)
        items = self.dispatch.take(worker, capacity, time.monotonic())
        if capacity and not items and not self.dispatch.workers[worker].held and not self._no_more_work:
            with contextlib.suppress(TimeoutError):  # an idle worker waits here, and gets new items immediately
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self._work_available.wait()
            if not self.dispatch.renew_lease(worker, time.monotonic()):
                return None
            if earlier := self._earlier_answer(worker, sequence):
                return earlier
            items = self.dispatch.take(worker, capacity, time.monotonic())
        assignment = self._assignment(items)
        self._last_answers[worker] = sequence, assignment
        return assignment

    async def add(self, items: Iterable[WorkItem[T]]) -> None:
        """Append further items."""
        self.dispatch.add(items)
        self._wake_idle_workers()

    def stop(self) -> None:
        """Assign no more items. The coordinator is finished when all assigned items are completed."""
        self.dispatch.stop()
        self._wake_idle_workers()

    async def deregister(self, worker: str) -> None:
        """Remove a worker. Its items are assigned to others immediately."""
        self.dispatch.deregister(worker)
        self._last_answers.pop(worker, None)
        self._wake_idle_workers()

    async def close(self) -> None:
        """Stop monitoring leases."""
        for task in (self._lease_monitor, *self._recoveries):
            if task is not None:
                task.cancel()

    @property
    def _no_more_work(self) -> bool:
        return self.dispatch.is_finished and not self._stays_open

    def _assignment(self, items: list[WorkItem[T]]) -> Assignment[T]:
        min_interval_s = max(MIN_EXCHANGE_INTERVAL_S, len(self.dispatch.workers) / MAX_EXCHANGES_PER_S)
        return Assignment(items, self._no_more_work, min_interval_s)

    def _earlier_answer(self, worker: str, sequence: int) -> Assignment[T] | None:
        """Return the answer to a request that is a copy of the last one or of an older one, otherwise None.

        No worker waits for the answer to an old request, so that answer contains no items.
        """
        last_sequence, answer = self._last_answers.get(worker, (0, None))
        return answer if sequence == last_sequence else self._assignment([]) if sequence < last_sequence else None

    async def _monitor_leases(self, checked_at: float) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_INTERVAL_S)
            now = time.monotonic()
            # If this process was suspended, requests of the workers are waiting.
            self.dispatch.extend_leases(max(0.0, now - checked_at - LEASE_CHECK_INTERVAL_S), now)
            checked_at = now
            for lost in self.dispatch.expire_leases(now):
                self.lost_workers += 1
                self._last_answers.pop(lost.worker, None)
                logger.warning("Lost worker %s; reassigning up to %d work items.", lost.worker, len(lost.items))
                task = asyncio.create_task(self._recover(lost))
                self._recoveries.add(task)
                task.add_done_callback(self._recoveries.discard)

    async def _recover(self, lost: LostWorker[T]) -> None:
        while True:
            try:
                committed = await self.find_committed(lost)
                break
            except OSError as error:
                logger.warning("Cannot recover worker %s, trying again: %s", lost.worker, error)
                await asyncio.sleep(RECOVERY_RETRY_INTERVAL_S)
        for key, result in committed:
            self.record_result(key, result)
        self.dispatch.settle(lost.worker, [key for key, _ in committed])
        self._wake_idle_workers()

    def _wake_idle_workers(self) -> None:
        self._work_available.set()
        self._work_available = asyncio.Event()
