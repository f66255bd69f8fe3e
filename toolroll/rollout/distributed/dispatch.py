"""Assign work items from a source to workers that pull them.

This module is pure: it does no I/O, and callers pass the current time. A worker regularly reports its completed items
and its free capacity, and gets at most that number of items. No item waits in a worker's queue, so a slow worker delays
only the items that it is running.

Invariants:

- Items are assigned in the order of the source. Items of a lost worker are assigned again before new ones.
- An item is assigned to one worker at a time and is counted once. A report from a worker that no longer holds the item
  is rejected.
- A worker is lost if it has not been heard from for the duration of its lease. It may still be running behind a network
  partition, but it starts no commit after `COMMIT_FRACTION_OF_LEASE` of the lease since its last successful request
  (`WorkerLease`). A worker that is suspended during a commit can be late, so `settle()` must be called only when it
  cannot commit any more.
- Once the source is exhausted, no worker holds more than its share of the remaining items.
- The source is read only as far as needed, plus at most `MAX_READ_AHEAD_ITEMS` items to detect its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

WORKER_LEASE_S = 10.0
"""Time without a request after which a worker in another process is lost."""
MAX_WORKER_LEASE_S = 60 * WORKER_LEASE_S
"""Maximum lease of a worker whose items block its event loop, so that it cannot send requests."""
NO_LEASE_S = math.inf
"""Lease of a worker in the process of its coordinator. They can only die together, so the worker is never lost, even if
the process is suspended or its event loop is blocked."""
MAX_READ_AHEAD_ITEMS = 10_000
"""Maximum number of items to read ahead in order to detect the end of the source."""
COMMIT_FRACTION_OF_LEASE = 0.9
"""Fraction of the lease during which a worker may commit. The rest allows for clocks that run at different speeds."""

Key = Hashable
Results = list[tuple[Key, Any]]
"""Keys of completed items with their results."""
T = TypeVar("T")


@dataclass(frozen=True)
class WorkItem(Generic[T]):
    """A unit of work.

    Attributes:
        key: Identifies the item; unique among all items of a source.
        payload: Input of the worker.
    """

    key: Key
    payload: T


@dataclass(frozen=True)
class LostWorker(Generic[T]):
    """A lost worker and its pending items. Call `Dispatch.settle()` with the items that it had already committed."""

    worker: str
    items: list[WorkItem[T]]


@dataclass
class WorkerState(Generic[T]):
    """A registered worker."""

    last_heard: float
    lease_s: float
    """Time without a request after which the worker is lost."""
    held: dict[Key, WorkItem[T]] = field(default_factory=dict)
    """Items that are assigned to the worker, by key."""


class Dispatch(Generic[T]):
    """Assigns the items of a source to workers.

    Args:
        source: Items to assign.
        workers: Expected number of workers. Determines the share of each worker at the end of the source.

    Attributes:
        workers: State of the registered workers, by name.
        assigned: Number of items that workers hold.

    Example:
        >>> dispatch = Dispatch(iter([WorkItem(1, "one"), WorkItem(2, "two")]))
        >>> dispatch.register("a", now=0.0)
        >>> [item.payload for item in dispatch.take("a", 2, now=0.0)]
        ['one', 'two']
        >>> dispatch.complete("a", 1), dispatch.complete("a", 1), dispatch.is_finished
        (True, False, False)
    """

    def __init__(self, source: Iterator[WorkItem[T]], *, workers: int = 1) -> None:
        self.workers: dict[str, WorkerState[T]] = {}
        self.assigned = 0
        self._source = source
        self._expected_workers = workers
        self._pending: deque[WorkItem[T]] = deque()
        """Unassigned items: those of lost workers, then those read ahead."""
        self._source_exhausted = False
        self._is_stopped = False
        self._unsettled: dict[str, list[WorkItem[T]]] = {}

    @property
    def is_finished(self) -> bool:
        """True if all items are completed or, after `stop()`, all assigned items."""
        no_more_items = self._is_stopped or (self._source_exhausted and not self._pending)
        return no_more_items and not (self._unsettled or self.assigned)

    def add(self, items: Iterable[WorkItem[T]]) -> None:
        """Append items to those that are waiting to be assigned."""
        self._pending.extend(items)

    def stop(self) -> None:
        """Assign no more items. Items that workers hold can still be completed."""
        self._is_stopped = True

    def register(self, worker: str, now: float, lease_s: float = WORKER_LEASE_S) -> None:
        """Add a worker. Its name must not have been used before."""
        self.workers[worker] = WorkerState(now, lease_s)

    def renew_lease(self, worker: str, now: float) -> bool:
        """Renew the lease of a worker, and return False if the worker is lost and must register under a new name."""
        if worker not in self.workers:
            return False
        self.workers[worker].last_heard = now
        return True

    def take(self, worker: str, max_items: int, now: float) -> list[WorkItem[T]]:
        """Assign up to `max_items` items to a worker and return them. A lost worker gets none."""
        if not self.renew_lease(worker, now) or self._is_stopped:
            return []
        held = self.workers[worker].held
        self._read_ahead(max_items)
        if self._source_exhausted:
            share = -(-(len(self._pending) + self.assigned) // self._worker_count())  # rounded up
            max_items = min(max_items, share - len(held))
        taken = [self._pending.popleft() for _ in range(min(max_items, len(self._pending)))]
        held.update((item.key, item) for item in taken)
        self.assigned += len(taken)
        return taken

    def complete(self, worker: str, key: Key) -> bool:
        """Mark an item as completed, and return False if the worker does not hold it, so its result must not count."""
        if worker not in self.workers or self.workers[worker].held.pop(key, None) is None:
            return False
        self.assigned -= 1
        return True

    def deregister(self, worker: str) -> None:
        """Remove a worker. Its items are assigned to others."""
        if state := self.workers.pop(worker, None):
            self._pending.extendleft(reversed(state.held.values()))
            self.assigned -= len(state.held)

    def expire_leases(self, now: float) -> list[LostWorker[T]]:
        """Remove the workers whose lease has expired and return them. Their items wait for `settle()`."""
        expired = [name for name, state in self.workers.items() if now - state.last_heard > state.lease_s]
        lost = [LostWorker(name, list(self.workers.pop(name).held.values())) for name in expired]
        self._unsettled |= {worker.worker: worker.items for worker in lost}
        self.assigned -= sum(len(worker.items) for worker in lost)
        return lost

    def extend_leases(self, seconds: float, now: float) -> None:
        """Extend all leases, after a time in which no request could be received."""
        for state in self.workers.values():
            state.last_heard = min(now, state.last_heard + seconds)

    def settle(self, worker: str, committed: Iterable[Key]) -> None:
        """Reassign the items of a lost worker, except those that it had committed."""
        committed = set(committed)
        unfinished = [item for item in self._unsettled.pop(worker, []) if item.key not in committed]
        self._pending.extendleft(reversed(unfinished))

    def _worker_count(self) -> int:
        return max(self._expected_workers, len(self.workers))

    def _read_ahead(self, max_items: int) -> None:
        """Read enough items for all workers, so that the end is known before one worker takes all that is left."""
        enough = max(max_items, min(max_items * self._worker_count(), MAX_READ_AHEAD_ITEMS))
        if not self._source_exhausted:
            self._pending.extend(islice(self._source, max(0, enough - len(self._pending))))
            self._source_exhausted = len(self._pending) < enough


class WorkerLease:
    """A worker's view of its lease: whether it may still commit results.

    Args:
        sent_at: Time at which the worker sent its first request.
        lease_s: Time without a request after which the worker is lost.
    """

    def __init__(self, sent_at: float, lease_s: float = WORKER_LEASE_S) -> None:
        self._last_sent_at = sent_at
        self._lease_s = lease_s

    def renew(self, sent_at: float) -> None:
        """Extend the lease after a successful request that was sent at `sent_at`."""
        self._last_sent_at = max(self._last_sent_at, sent_at)

    def is_valid(self, now: float) -> bool:
        """Return True if the worker may commit at time `now`."""
        return now < self._last_sent_at + self._lease_s * COMMIT_FRACTION_OF_LEASE
