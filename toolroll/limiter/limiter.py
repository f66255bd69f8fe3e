"""Limiters: the interface, and the limiter of a single process."""

from __future__ import annotations

from toolroll.limiter.lease import LeasedSlots
from toolroll.limiter.slot_queue import Slot, SlotQueue


class Limiter:
    """Limit on the number of concurrent uses of one resource.

    Get one from `get_limiter`. Waiters are served in FIFO order, across all event loops and threads of the process.

    Args:
        queue: This process's slots.
    """

    def __init__(self, queue: SlotQueue) -> None:
        self._queue = queue

    def slot(self, deadline: float | None = None, hold: float | None = None) -> Slot:
        """Return a slot, which is acquired by `async with`, or by `with` in a thread.

        Args:
            deadline: Time by which the work must be done, on the clock of `time.monotonic()`. Acquiring the slot
                fails at that time.
            hold: Maximum duration of the work, in seconds. If this process dies, its slots become available again
                after that time, as the work may still run elsewhere. Defaults to the time until the deadline.

        Returns:
            A slot that is not acquired yet. Acquiring it raises `SlotTimeout` if no slot is released before the
            deadline, and `LimiterUnavailable` if the cluster's limiter cannot be reached before it.

        Example:
            >>> import time
            >>> limiter = LocalLimiter(2)
            >>> with limiter.slot(deadline=time.monotonic() + 30, hold=10):
            ...     print(limiter.in_use)
            1
        """
        return Slot(self._queue, deadline, hold)

    @property
    def resource(self) -> str:
        """Name of the limited resource."""
        return self._queue.resource

    @property
    def limit(self) -> int:
        """Last known limit, over all processes that share it."""
        return self._queue.lease.limit

    @property
    def in_use(self) -> int:
        """Number of slots in use in this process."""
        return self._queue.in_use

    @property
    def waiting(self) -> int:
        """Number of waiters in this process."""
        return self._queue.waiting

    def close(self) -> None:
        """Return this process's unused slots to the cluster. Call it when no slot is in use."""


class LocalLimiter(Limiter):
    """Limit of a single process. Does not use Ray.

    Args:
        limit: Maximum number of slots in use, at least 1.
        resource: Name of the resource, for messages.

    Raises:
        ValueError: If the limit is less than 1.

    Example:
        >>> import asyncio
        >>> async def main() -> int:
        ...     limiter = LocalLimiter(2)
        ...     async with limiter.slot():
        ...         return limiter.in_use
        >>> asyncio.run(main())
        1
    """

    def __init__(self, limit: int, resource: str = "local") -> None:
        if limit < 1:
            raise ValueError(f"Invalid limit of {resource!r}: {limit}. Expected at least 1.")
        super().__init__(SlotQueue(resource, LeasedSlots.fixed(limit)))

    def set_limit(self, limit: int) -> None:
        """Change the limit.

        Args:
            limit: New limit. 0 grants no more slots. Slots in use beyond the limit are kept until they are released.
        """
        self._queue.resize(limit)
