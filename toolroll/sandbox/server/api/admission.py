"""Bounded FIFO admission queue.

Invariants:

- At most `capacity` requests run and at most `max_waiting` wait.
- Requests are admitted in order of arrival.
- A request that arrives when the queue is full is rejected at once, with an estimate of when to retry.
- A request is never run after its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

MAX_RETRY_AFTER_S = 60


class QueueFull(Exception):
    """Raised when a request arrives and the queue is full. `retry_after` is the delay before a retry, in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The queue of the sandbox is full. Retry after {retry_after} s.")
        self.retry_after = retry_after


class DeadlineExceeded(Exception):
    """Raised when the deadline of a request passes before the request is admitted."""

    def __init__(self, late_by_s: float) -> None:
        super().__init__(
            f"The deadline of the request passed {late_by_s:.3f} s ago by the server's clock. The program was not run."
        )


class AdmissionQueue:
    """Bounded FIFO admission queue.

    Args:
        capacity: Maximum number of requests that run at the same time.
        max_waiting: Maximum number of requests that wait.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.running = 0
        self.mean_run_time_s = 0.1
        """Moving average of the run time, from which `retry_after` is estimated."""
        self._admitted_or_waiting = 0
        self._slots = asyncio.Semaphore(capacity)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return self._admitted_or_waiting - self.running

    def raise_if_full(self) -> None:
        """Raise QueueFull if another request can neither run nor wait."""
        if self._admitted_or_waiting >= self.capacity + self.max_waiting:
            raise QueueFull(self.retry_after())

    def retry_after(self) -> int:
        """Return the estimated time until the queue is half as long, in seconds."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.waiting / 2 * self.mean_run_time_s / self.capacity)))

    @contextlib.asynccontextmanager
    async def admit(self, deadline: float | None) -> AsyncIterator[float]:
        """Wait for admission and hold it for the duration of the context.

        Args:
            deadline: Unix time after which the request is not run; None for no deadline.

        Yields:
            The time that the request waited, in seconds.

        Raises:
            QueueFull: If the queue is full.
            DeadlineExceeded: If the deadline passes before the request is admitted.
        """
        arrived = time.monotonic()
        _raise_if_expired(deadline)
        self.raise_if_full()
        self._admitted_or_waiting += 1
        try:
            await self._acquire_slot(deadline)
            self.running += 1
            try:
                _raise_if_expired(deadline)
                started = time.monotonic()
                yield started - arrived
                self.mean_run_time_s += 0.05 * (time.monotonic() - started - self.mean_run_time_s)
            finally:
                self.running -= 1
                self._slots.release()
        finally:
            self._admitted_or_waiting -= 1

    async def _acquire_slot(self, deadline: float | None) -> None:
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.time()):
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded(0.0) from None


def _raise_if_expired(deadline: float | None) -> None:
    if deadline is not None and (late_by_s := time.time() - deadline) > 0:
        raise DeadlineExceeded(late_by_s)
