"""Limiters: the interface, and the limiter of a single process."""

from __future__ import annotations

from collections.abc import Mapping

from toolroll.limiter.ledger.lease import LeasedSlots
from toolroll.limiter.ledger.policy import REQUESTS, checked_cost
from toolroll.limiter.slot import Slot
from toolroll.limiter.slot_queue import SlotQueue

ONE_REQUEST = {REQUESTS: 1.0}
"""Cost of any work."""


class Limiter:
    """Limits of one resource: concurrent uses, rates and budgets.

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
        return Slot(self._queue, deadline, hold, ONE_REQUEST)

    def acquire(
        self, cost: Mapping[str, float] | None = None, *, deadline: float | None = None, hold: float | None = None
    ) -> Slot:
        """Return a slot for work that has a cost, which is acquired by `async with`, or by `with` in a thread.

        Args:
            cost: Estimated cost of the work by unit, for example `{"tokens": 1200}`. Units without a rate and a budget
                are ignored. Work costs one request, unless `requests` (or `calls`) states another number.
                `Slot.correct` sets the true cost when it is known.
            deadline: Time by which the work must be done, on the clock of `time.monotonic()`. Acquiring the slot
                fails at that time.
            hold: Maximum duration of the work, in seconds. Defaults to the time until the deadline. See `slot`.

        Returns:
            A slot that is not acquired yet. Acquiring it raises `SlotTimeout` if the limits do not allow the work
            before the deadline, `BudgetExhausted` if a budget does not suffice, and `LimiterUnavailable` if the
            cluster's limiter cannot be reached.

        Raises:
            ValueError: If an amount is negative or not finite.

        Example:
            >>> limiter = LocalLimiter(2)
            >>> with limiter.acquire(cost={"tokens": 1200}) as slot:
            ...     slot.correct(tokens=1180)
        """
        return Slot(self._queue, deadline, hold, {**ONE_REQUEST, **checked_cost(self.resource, cost or {})})

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

    @property
    def spent(self) -> dict[str, float]:
        """What all processes have spent of each budget, by unit, as last known."""
        return self._queue.spent_by_all()

    def fetch_spent(self) -> dict[str, float]:
        """Return what all processes have spent of each budget, as the limiter of the cluster knows it now.

        Returns:
            Amounts by unit; those that were last known if the limiter cannot be reached.
        """
        return self.spent

    def restore_spent(self, spent: Mapping[str, float]) -> None:
        """Make sure that at least these amounts of budgets count as spent, for example by an earlier run.

        Args:
            spent: Amounts by unit. Units without a budget are ignored.
        """

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
