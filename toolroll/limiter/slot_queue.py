"""FIFO queue for the slots that this process has leased.

Invariants:

- Slots are granted in the order of the requests, across all event loops and threads of the process.
- Slots in use never exceed the leased slots. If the lease shrinks, slots in use are kept until they are released.
- A waiter that is cancelled or times out holds no slot afterwards, even if one was granted at the same moment.

The queue does no I/O. The owner sends `report()` to the ledger and passes the answer to `apply()`. The queue calls
`on_waiting` when a waiter is queued.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from toolroll.errors import LimiterUnavailable, SlotTimeout
from toolroll.limiter.lease import HolderReport, Lease, LeasedSlots

DEFAULT_HOLD_S = 60.0
"""Assumed maximum duration of work if neither `deadline` nor `hold` is given."""

HOLD_WINDOW_S = 60.0
"""Time for which the longest `hold` is remembered, so that similar work need not be announced again."""

HOLD_MARGIN = 1.05
"""Factor by which announced holds exceed the requested ones, so that slightly longer work needs no announcement."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request for a slot. `wake` is called once, after `key` was set."""

    hold: float
    wake: Callable[[], None]
    key: int | None = None
    """Number of the granted slot; None while waiting."""
    granted_at: float = -inf
    expires_at: float = -inf
    """Time by which the work in the slot must have ended."""
    lease: str | None = None
    """Token of the lease by which the slot was granted."""


class SlotQueue:
    """This process's slots of one resource, and the waiters for them. Used through `Slot`."""

    def __init__(self, resource: str, leased: LeasedSlots, on_waiting: Callable[[], None] = lambda: None) -> None:
        self.resource = resource
        self.on_waiting = on_waiting
        self._leased = leased
        self._lock = threading.Lock()
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()  # a queue from which any waiter is removed quickly
        self._held_until: dict[int, float] = {}
        """Latest end of the work in each slot in use, by the slot's key."""
        self._last_key = 0
        self._longest_hold = LongestHold()
        self._reported = (0, 0)
        """`in_use` and `wants` of the latest report."""

    @property
    def in_use(self) -> int:
        """Number of slots in use in this process."""
        return len(self._held_until)

    @property
    def waiting(self) -> int:
        """Number of waiters in this process."""
        return len(self._waiters)

    @property
    def lease_expired(self) -> bool:
        """Whether no slot can be granted because the lease has expired."""
        return time.monotonic() >= self._leased.expires_at

    def acquire(self, waiter: Waiter) -> bool:
        """Grant the waiter a slot and return True, or append it to the queue and return False."""
        with self._lock:
            now = time.monotonic()
            self._longest_hold.add(waiter.hold, now)
            if not self._waiters and self._can_grant(waiter, now):
                self._grant(waiter, now)
                return True
            self._waiters[waiter] = None
        self.on_waiting()
        return False

    def abandon(self, waiter: Waiter) -> None:
        """Remove a waiter from the queue, and release its slot if one was granted meanwhile."""
        with self._lock:
            if waiter in self._waiters:
                del self._waiters[waiter]
                self._grant_slots()  # this waiter's `hold` may have blocked those behind it
        if waiter.key is not None:
            self.release(waiter.key)

    def release(self, key: int) -> None:
        """Release a slot. Does nothing if it is already released."""
        with self._lock:
            if self._held_until.pop(key, None) is not None:
                self._grant_slots()

    def report(self) -> HolderReport:
        """Return the report to send to the ledger now."""
        with self._lock:
            now = time.monotonic()
            in_use, wants = self._reported = self.in_use, self.in_use + self.waiting
            requested = max(self._longest_hold.get(now), self._first_hold())
            hold = max([HOLD_MARGIN * requested, *(end - now for end in self._held_until.values())])
            return self._leased.report(now, in_use=in_use, wants=wants, hold=hold)

    def apply(self, lease: Lease) -> bool:
        """Apply an answer of the ledger. Return False if it answers an earlier report and was ignored."""
        with self._lock:
            applied = self._leased.apply(lease)
            self._grant_slots()
            return applied

    def terminate(self) -> None:
        """Give up the lease: grant no more slots."""
        with self._lock:
            self._leased.terminate()

    def resize(self, limit: int) -> None:
        """Change the number of slots of a queue that is not leased from a cluster."""
        with self._lock:
            self._leased.lease = Lease(capacity=limit, limit=limit)
            self._grant_slots()

    @property
    def should_report(self) -> bool:
        """Whether the demand has changed so much that a report should be sent before the next renewal."""
        with self._lock:
            has, (reported_in_use, reported_wants) = self._leased.usable(time.monotonic()), self._reported
            in_use, wants = self.in_use, self.in_use + self.waiting
            if not self._leased.has_announced(self._first_hold()):
                return True
            if not self.lease.contended:
                return wants > max(has, reported_wants)
            drained = reported_in_use > has and in_use < reported_in_use
            has_surplus = drained or (wants < has and wants < reported_wants)
            return has_surplus or abs(wants - reported_wants) > max(1.0, 0.1 * reported_wants)

    @property
    def report_interval(self) -> float:
        """Interval between reports of changes while slots are contended, in seconds; 0 otherwise."""
        return self.lease.interval if self.lease.contended else 0.0

    @property
    def lease(self) -> Lease:
        """The current lease, which may have expired."""
        return self._leased.lease

    def _first_hold(self) -> float:
        return next((waiter.hold for waiter in self._waiters), 0.0)

    def _can_grant(self, waiter: Waiter, now: float) -> bool:
        return len(self._held_until) < self._leased.usable(now) and self._leased.allows(waiter.hold)

    def _grant(self, waiter: Waiter, now: float) -> None:
        self._last_key += 1
        waiter.key, waiter.lease = self._last_key, self._leased.token
        waiter.granted_at, waiter.expires_at = now, now + waiter.hold
        self._held_until[waiter.key] = waiter.expires_at

    def _grant_slots(self) -> None:
        """Grant all free slots to the first waiters. The caller holds the lock."""
        now = time.monotonic()
        while (waiter := next(iter(self._waiters), None)) and self._can_grant(waiter, now):
            del self._waiters[waiter]
            self._grant(waiter, now)
            try:
                waiter.wake()
            except RuntimeError:  # the waiter's event loop was closed, so no code can release the slot
                self._held_until.pop(waiter.key or 0, None)


class LongestHold:
    """The longest `hold` that was requested in the last one to two windows of `HOLD_WINDOW_S`."""

    def __init__(self) -> None:
        self._window_start = -inf
        self._current = self._previous = 0.0

    def add(self, hold: float, now: float) -> None:
        """Record a requested hold."""
        if now - self._window_start > HOLD_WINDOW_S:
            self._window_start, self._previous, self._current = now, self._current, 0.0
        self._current = max(self._current, hold)

    def get(self, now: float) -> float:
        """Return the longest recent hold, in seconds."""
        self.add(0.0, now)
        return max(self._current, self._previous)


class Slot:
    """Permission to do one piece of work under a limit. Created by `Limiter.slot`.

    Use it as a context manager: `async with` in a coroutine, `with` in a thread. For work that outlives the block that
    started it, call `acquire` and `release`.

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

    __slots__ = ("_deadline", "_hold", "_queue", "_waiter", "waited")

    def __init__(self, queue: SlotQueue, deadline: float | None, hold: float | None) -> None:
        self._queue = queue
        self._deadline = deadline
        self._hold = hold
        self._waiter: Waiter | None = None
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
        if self._queue.acquire(waiter):
            return
        timer = None if self._deadline is None else loop.call_later(self._deadline - start, settle)
        try:
            await woken
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._raise_unless_granted(waiter, start)

    def acquire_blocking(self) -> None:
        """Wait for the slot in a thread.

        Raises:
            SlotTimeout: If no slot was released before the deadline, or if the deadline has already passed.
            LimiterUnavailable: If the lease has expired and the limiter could not be reached before the deadline.
            RuntimeError: If the slot is already acquired or being acquired.
        """
        start = time.monotonic()
        woken = threading.Event()
        waiter = self._new_waiter(start, woken.set)
        if self._queue.acquire(waiter):
            return
        try:
            woken.wait(None if self._deadline is None else max(0.0, self._deadline - start))
        except BaseException:
            self._abandon(waiter)
            raise
        self._raise_unless_granted(waiter, start)

    def release(self) -> None:
        """Release the slot. May be called from any thread; does nothing if the slot is not acquired."""
        if number := self.number:
            self._waiter = None
            self._queue.release(number)

    async def __aenter__(self) -> Slot:
        await self.acquire()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()

    def __enter__(self) -> Slot:
        self.acquire_blocking()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _new_waiter(self, now: float, wake: Callable[[], None]) -> Waiter:
        resource = self._queue.resource
        if self._waiter is not None:
            raise RuntimeError(
                f"This slot of {resource!r} is already acquired or being acquired. Call slot() for each piece of work."
            )
        remaining = DEFAULT_HOLD_S if self._deadline is None else self._deadline - now
        if remaining <= 0:
            raise SlotTimeout(f"The deadline for a slot of {resource!r} has already passed. Allow more time.")
        self._waiter = Waiter(remaining if self._hold is None else self._hold, wake)
        return self._waiter

    def _abandon(self, waiter: Waiter) -> None:
        self._queue.abandon(waiter)
        if self._waiter is waiter:
            self._waiter = None

    def _raise_unless_granted(self, waiter: Waiter, start: float) -> None:
        self.waited = time.monotonic() - start
        if waiter.key is not None:
            return
        self._abandon(waiter)
        queue = self._queue
        if queue.lease_expired:
            raise LimiterUnavailable(
                f"The lease on {queue.resource!r} has expired and its limiter could not be reached for "
                f"{self.waited:.1f} s. Check that the Ray cluster is up: `toolroll limiter status`."
            )
        raise SlotTimeout(
            f"No slot of {queue.resource!r} was released within {self.waited:.1f} s: {queue.in_use} in use and "
            f"{queue.waiting} waiting in this process. Raise the limit if the resource allows it, or allow more time."
        )
