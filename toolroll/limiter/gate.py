"""The gate: hands out this process's slots, first come first served.

A gate stands before an allowance (lease.py): so many slots, which the cluster's limiter changes from time to time, or
which stay as they are. It promises:

- Strictly first come, first served, over all event loops and threads of the process.
- No more in use than the allowance says. What is in use while the allowance shrinks is let finish.
- Nothing lost, nothing doubled: a waiter that is cancelled or times out takes nothing with it, also where its slot had
  just been given to it.

No I/O: whoever carries reports between the gate and the ledger takes `report`, brings back `apply`, and is called by
`on_news` when there is something to say.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from toolroll.errors import LimiterUnavailable, SlotTimeout
from toolroll.limiter.lease import Allowance, Lease, Report

HOLD = 60.0
"""Seconds that work is taken to last, at the most, where neither a deadline nor `hold` says."""

HOLD_MEMORY = 60.0
"""Seconds for which the longest `hold` is remembered, so that the next of its kind needn't be announced again."""


ROOM = 1.05
"""How much longer than what was asked for is announced: deadlines a moment apart need no new announcement each."""


class Waiter:
    """Somebody in the queue. `wake` is called once, when the slot is theirs and its `key` is set."""

    __slots__ = ("hold", "key", "left", "wake")

    def __init__(self, hold: float, wake: Callable[[], None]) -> None:
        self.hold = hold
        self.wake = wake
        self.key: int | None = None
        self.left = False


class Gate:
    """This process's slots of one resource. `Slot` is how they are used."""

    def __init__(self, resource: str, allowance: Allowance, on_news: Callable[[], None] = lambda: None) -> None:
        self.resource = resource
        self.on_news = on_news
        self._allowance = allowance
        self._lock = threading.Lock()
        self._queue: deque[Waiter] = deque()
        self._waiting = 0
        self._ends: dict[int, float] = {}
        """When that which is in use must have ended, by its key."""
        self._keys = 0
        self._longest = LongestAsked()
        self._reported = (0, 0)
        """`in_use` and `wants`, as last reported."""

    @property
    def in_use(self) -> int:
        """Slots in use in this process."""
        return len(self._ends)

    @property
    def waiting(self) -> int:
        """How many wait in this process."""
        return self._waiting

    @property
    def lapsed(self) -> bool:
        """Whether nothing can be begun because the lease has run out."""
        return time.monotonic() >= self._allowance.ends

    def take(self, waiter: Waiter) -> bool:
        """Give the waiter a slot now, or else a place at the end of the queue."""
        with self._lock:
            now = time.monotonic()
            self._longest.note(waiter.hold, now)
            if not self._waiting and self._may_begin(waiter, now):
                self._begin(waiter, now)
                return True
            self._queue.append(waiter)
            self._waiting += 1
        self.on_news()
        return False

    def leave(self, waiter: Waiter) -> None:
        """Give up: the place in the queue, or the slot if it has been given just now."""
        with self._lock:
            if waiter.key is None and not waiter.left:
                waiter.left = True
                self._waiting -= 1
                if len(self._queue) > 2 * self._waiting + 16:  # those who left are still in it
                    self._queue = deque(other for other in self._queue if not other.left)
                self._hand_out()  # who stood behind one that asked for too much may go on
        if waiter.key is not None:
            self.give_back(waiter.key)

    def give_back(self, key: int) -> None:
        """The end of a slot's use. A second time it does nothing."""
        with self._lock:
            if self._ends.pop(key, None) is not None:
                self._hand_out()

    def report(self) -> Report:
        """What to tell the ledger now."""
        with self._lock:
            now = time.monotonic()
            in_use, wants = len(self._ends), len(self._ends) + self._waiting
            asked = max(self._longest.asked(now), self._queue[0].hold if self._queue else 0.0)
            hold = max([ROOM * asked, *(end - now for end in self._ends.values())])
            self._reported = in_use, wants
            return self._allowance.report(now, in_use=in_use, wants=wants, hold=hold)

    def apply(self, lease: Lease) -> bool:
        """Heed the ledger's answer. False: it is void."""
        with self._lock:
            heeded = self._allowance.apply(lease)
            if heeded:
                self._hand_out()
            return heeded

    def end(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._allowance.end()

    def resize(self, capacity: int) -> None:
        """Change a fixed allowance."""
        with self._lock:
            self._allowance.capacity = self._allowance.limit = capacity
            self._hand_out()

    @property
    def has_news(self) -> bool:
        """Whether the ledger should hear something before its answer is due."""
        with self._lock:
            now = time.monotonic()
            has, (told_in_use, told_wants) = self._allowance.usable(now), self._reported
            in_use, wants = len(self._ends), len(self._ends) + self._waiting
            if self._waiting and not self._allowance.allows(self._queue[0].hold):
                return True
            if not self._allowance.contended:
                return wants > max(has, told_wants)
            drained = told_in_use > has and in_use < told_in_use
            giving_back = drained or (wants < has and wants < told_wants)
            return giving_back or abs(wants - told_wants) > max(1.0, 0.1 * told_wants)

    @property
    def interval(self) -> float:
        """Seconds to let pass between two reports of news."""
        return self._allowance.interval if self._allowance.contended else 0.0

    @property
    def ttl(self) -> float:
        """The life of a lease in seconds; 0 before there was one."""
        return self._allowance.ttl

    @property
    def limit(self) -> tuple[int, int]:
        """The limit over all, as last heard, and its version."""
        return self._allowance.limit, self._allowance.version

    def _may_begin(self, waiter: Waiter, now: float) -> bool:
        return len(self._ends) < self._allowance.usable(now) and self._allowance.allows(waiter.hold)

    def _begin(self, waiter: Waiter, now: float) -> None:
        self._keys += 1
        waiter.key = self._keys
        self._ends[waiter.key] = now + waiter.hold

    def _hand_out(self) -> None:
        """Slots to the first in the queue, as many as there are. With the lock held."""
        now = time.monotonic()
        while self._queue and (self._queue[0].left or self._may_begin(self._queue[0], now)):
            waiter = self._queue.popleft()
            if not waiter.left:
                self._waiting -= 1
                self._begin(waiter, now)
                try:
                    waiter.wake()
                except RuntimeError:  # its event loop was closed while it waited: nobody is there to take the slot
                    self._ends.pop(waiter.key or 0, None)


class LongestAsked:
    """The longest `hold` that was asked for within the last minute or two."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._now = self._before = 0.0

    def note(self, hold: float, now: float) -> None:
        """Somebody asked for so long."""
        if now - self._since > HOLD_MEMORY:
            self._since, self._before, self._now = now, self._now, 0.0
        if hold > self._now:
            self._now = hold

    def asked(self, now: float) -> float:
        """The longest of late."""
        self.note(0.0, now)
        return max(self._now, self._before)


class Slot:
    """A slot, for `async with` or, in a thread, `with`."""

    __slots__ = ("_deadline", "_gate", "_hold", "_waiter", "waited")

    def __init__(self, gate: Gate, deadline: float | None, hold: float | None) -> None:
        self._gate = gate
        self._deadline = deadline
        self._hold = hold
        self._waiter: Waiter | None = None
        self.waited = 0.0
        """Seconds in the queue, once it was got."""

    @property
    def number(self) -> int:
        """The slots of a process are numbered in the order in which they are given out; 0 before."""
        return (self._waiter and self._waiter.key) or 0

    async def __aenter__(self) -> Slot:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        began = time.monotonic()
        hold = self._longest(began)
        got: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not got.done():
                got.set_result(None)

        def wake() -> None:
            if threading.get_ident() == thread:
                settle()
            else:
                loop.call_soon_threadsafe(settle)

        waiter = self._waiter = Waiter(hold, wake)
        if self._gate.take(waiter):
            return self
        timer = None
        if self._deadline is not None:
            timer = loop.call_later(self._deadline - began, settle)
        try:
            await got
        except BaseException:
            self._gate.leave(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._got(began)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def __enter__(self) -> Slot:
        began = time.monotonic()
        hold = self._longest(began)
        got = threading.Event()
        waiter = self._waiter = Waiter(hold, got.set)
        if self._gate.take(waiter):
            return self
        try:
            got.wait(None if self._deadline is None else max(0.0, self._deadline - began))
        except BaseException:
            self._gate.leave(waiter)
            raise
        self._got(began)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def give_back(self) -> None:
        """End its use, from any thread: for work that goes on after the block that began it. A second time, nothing."""
        if self._waiter is not None and self._waiter.key is not None:
            self._gate.give_back(self._waiter.key)

    def _longest(self, now: float) -> float:
        """How long the work may last. Refuses what comes too late to be begun at all."""
        left = HOLD if self._deadline is None else self._deadline - now
        if left <= 0:
            raise SlotTimeout(f"The deadline for a slot of {self._gate.resource!r} had passed before it was asked for.")
        return left if self._hold is None else self._hold

    def _got(self, began: float) -> None:
        """After the waiting: all is well, or the time is up."""
        self.waited = time.monotonic() - began
        assert self._waiter is not None
        if self._waiter.key is not None:
            return
        self._gate.leave(self._waiter)
        self._waiter.key = None  # if it was given at the last moment, it has just been given back
        gate = self._gate
        if gate.lapsed:
            raise LimiterUnavailable(
                f"The lease on {gate.resource!r} has run out and its limiter can't be reached: waited "
                f"{self.waited:.1f} s. Is the Ray cluster up? `toolroll limiter status` asks it."
            )
        raise SlotTimeout(
            f"No slot of {gate.resource!r} came free in {self.waited:.1f} s: {gate.in_use} in use and {gate.waiting} "
            "waiting in this process. Raise the limit if the resource can take more, or allow more time."
        )
