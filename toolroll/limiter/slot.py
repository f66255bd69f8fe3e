"""A slot of a limiter: permission to do one piece of work, for coroutines and threads.

Invariant: a slot is released once, whether its block ends, fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf

from toolroll.errors import BudgetExhausted, LimiterUnavailable, SlotTimeout
from toolroll.limiter.ledger.credit import NO_AMOUNTS, Amounts
from toolroll.limiter.ledger.feedback import Rejection, rejection_of
from toolroll.limiter.ledger.policy import checked_cost
from toolroll.limiter.slot_queue import SUCCESS, Outcome, SlotQueue, Waiter

DEFAULT_HOLD_S = 60.0
"""Assumed maximum duration of work if neither `deadline` nor `hold` is given."""

DEADLINE_TOLERANCE_S = 0.01
"""Time before a deadline in which a cancellation counts as a timeout."""


class Slot:
    """Permission to do one piece of work under a limit. Created by `Limiter.acquire`.

    Use it as a context manager: `async with` in a coroutine, `with` in a thread. For work that outlives the block that
    started it, call `acquire` and `release`.

    An exception that leaves the context manager counts as a rejection by the resource if it is a TimeoutError or a
    ConnectionError, or if it has an HTTP status that means overload, such as 429 or 503.

    Example:
        >>> from toolroll import LocalLimiter
        >>> async def main() -> int:
        ...     limiter = LocalLimiter(2)
        ...     slot = limiter.slot()
        ...     await slot.acquire()
        ...     try:
        ...         return limiter.in_use
        ...     finally:
        ...         slot.release()
        >>> asyncio.run(main())
        1
    """

    __slots__ = ("_cost", "_deadline", "_granted", "_hold", "_queue", "_rejection", "_waiter", "waited")

    def __init__(
        self, queue: SlotQueue, deadline: float | None, hold: float | None, cost: Amounts = NO_AMOUNTS
    ) -> None:
        self._queue = queue
        self._deadline = deadline
        self._hold = hold
        self._cost = cost
        self._waiter: Waiter | None = None
        self._granted: Waiter | None = None
        """The request that got the slot, also after its release."""
        self._rejection: Rejection | None = None
        self.waited = 0.0
        """Time spent in the queue, in seconds."""

    @property
    def number(self) -> int:
        """Number of the slot, counted in the order in which this process grants them; 0 if it is not acquired."""
        return (self._waiter and self._waiter.key) or 0

    @property
    def granted_at(self) -> float:
        """Time at which the slot was granted, on the clock of `time.monotonic()`."""
        return self._waiter.granted_at if self._waiter else -inf

    @property
    def expires_at(self) -> float:
        """Time by which the work must have ended, on the clock of `time.monotonic()`: `hold` seconds after the grant.

        The cluster may grant the slot to another process afterwards. A process that was suspended may use its slot
        late, so send this time with each request, and let the server reject requests that would end later.
        """
        return self._waiter.expires_at if self._waiter else -inf

    @property
    def lease(self) -> str | None:
        """Token of the lease by which the slot was granted, for servers that fence the leases of dead processes.

        None if the slot is not acquired, or if the limit is that of a single process.
        """
        return self._waiter.lease if self._waiter else None

    async def acquire(self) -> None:
        """Wait for the slot in a coroutine.

        If the caller is cancelled, the slot is not acquired.

        Raises:
            SlotTimeout: If no slot was released before the deadline, or if the deadline has already passed.
            LimiterUnavailable: If the lease has expired and the limiter could not be reached before the deadline.
            BudgetExhausted: If a budget does not suffice for the cost of the work.
            RuntimeError: If the slot is already acquired or being acquired.
        """
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        woken: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> None:
            if threading.get_ident() == thread_id:
                settle()
            else:
                loop.call_soon_threadsafe(settle)

        start = time.monotonic()
        waiter = self._new_waiter(start, wake)
        timer: asyncio.TimerHandle | None = None
        try:
            if self._queue.acquire(waiter):
                self._granted = waiter
                return
            timer = None if self._deadline is None else loop.call_later(self._deadline - start, settle)
            await woken
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._raise_unless_granted(waiter, start)

    def acquire_blocking(self, caller_cancelled: Future[None] | None = None) -> None:
        """Wait for the slot in a thread.

        Args:
            caller_cancelled: Future that ends when the caller of the thread is cancelled. From then on, the slot is
                not acquired.

        Raises:
            CancelledError: If the caller of the thread was cancelled.
            SlotTimeout: If no slot was released before the deadline, or if the deadline has already passed.
            LimiterUnavailable: If the lease has expired and the limiter could not be reached before the deadline.
            BudgetExhausted: If a budget does not suffice for the cost of the work.
            RuntimeError: If the slot is already acquired or being acquired.
        """
        start = time.monotonic()
        woken = threading.Event()
        waiter = self._new_waiter(start, woken.set)
        try:
            if is_waiting := not self._queue.acquire(waiter):
                if caller_cancelled is not None:
                    caller_cancelled.add_done_callback(lambda _: woken.set())
                woken.wait(None if self._deadline is None else max(0.0, self._deadline - start))
            if caller_cancelled is not None and caller_cancelled.done():
                raise asyncio.CancelledError
        except BaseException:
            self._abandon(waiter)
            raise
        if is_waiting:
            self._raise_unless_granted(waiter, start)
        else:
            self._granted = waiter

    def release(self) -> None:
        """Release the slot. May be called from any thread; does nothing if the slot is not acquired.

        The work counts as successful, unless `reject` was called.
        """
        self._release(self._rejection or SUCCESS)

    def reject(self, retry_after: float | None = None) -> None:
        """State that the resource rejected the work, for example with the HTTP status 429, or that it timed out.

        A limit that adapts is lowered. Release the slot as usual.

        Args:
            retry_after: Time for which the resource asked to wait, in seconds.
        """
        self._rejection = Rejection(retry_after or 0.0)

    def correct(self, **cost: float) -> None:
        """Set the true cost of the work, which replaces the estimated one. Possible after the release, too.

        Args:
            cost: Amount of each unit whose cost is known, for example `tokens=1180`.

        Raises:
            RuntimeError: If the slot was never acquired.
            ValueError: If an amount is negative or not finite.

        Example:
            >>> from toolroll import LocalLimiter
            >>> limiter = LocalLimiter(2)
            >>> with limiter.acquire(cost={"tokens": 1200}) as slot:
            ...     slot.correct(tokens=1180)
        """
        if self._granted is None:
            raise RuntimeError(f"This slot of {self._queue.resource!r} was never acquired, so that it has no cost.")
        self._queue.correct(self._granted, checked_cost(self._queue.resource, cost))

    async def __aenter__(self) -> Slot:
        await self.acquire()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._release_after(error)

    def __enter__(self) -> Slot:
        self.acquire_blocking()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._release_after(error)

    def _release_after(self, error: BaseException | None) -> None:
        """Release the slot. An exception counts as a rejection if it indicates overload, and is ignored otherwise."""
        if error is None:
            self.release()
        elif isinstance(error, asyncio.CancelledError):
            # Cancelled at the deadline: the caller's timeout, which is outside of this block.
            is_late = self._deadline is not None and time.monotonic() >= self._deadline - DEADLINE_TOLERANCE_S
            self._release(self._rejection or (Rejection() if is_late else None))
        else:
            self._release(self._rejection or rejection_of(error))

    def _release(self, outcome: Outcome | None) -> None:
        waiter = self._waiter
        if waiter is not None and waiter.key is not None:
            self._waiter = self._rejection = None
            self._queue.release(waiter, outcome)

    def _new_waiter(self, now: float, wake: Callable[[], None]) -> Waiter:
        resource = self._queue.resource
        if self._waiter is not None:
            raise RuntimeError(
                f"This slot of {resource!r} is already acquired or being acquired. Call slot() for each piece of work."
            )
        remaining = DEFAULT_HOLD_S if self._deadline is None else self._deadline - now
        if remaining <= 0:
            raise SlotTimeout(f"The deadline for a slot of {resource!r} has already passed. Allow more time.")
        self._rejection = None
        self._waiter = Waiter(remaining if self._hold is None else float(self._hold), wake, self._cost)
        return self._waiter

    def _abandon(self, waiter: Waiter) -> None:
        self._queue.abandon(waiter)
        if self._waiter is waiter:
            self._waiter = None

    def _raise_unless_granted(self, waiter: Waiter, start: float) -> None:
        self.waited = time.monotonic() - start
        if waiter.key is not None:
            self._granted = waiter
            return
        queue = self._queue
        problem = queue.describe_wait()  # while this waiter is in the queue
        self._abandon(waiter)
        if waiter.exhausted is not None:
            unit, left = waiter.exhausted
            raise BudgetExhausted(queue.resource, unit, waiter.cost.get(unit, 0.0), round(left, 6))
        if queue.lease_expired:
            raise LimiterUnavailable(
                f"The lease on {queue.resource!r} has expired and its limiter could not be reached for "
                f"{self.waited:.1f} s. Check that the Ray cluster is up: `toolroll limiter status`."
            )
        raise SlotTimeout(f"No slot of {queue.resource!r} was granted within {self.waited:.1f} s: {problem}")
