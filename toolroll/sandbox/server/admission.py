"""Who may run now, who waits, who is sent away. First come, first served.

At most `capacity` run and at most `queue` wait. Who comes when the queue is full is told at once, with an estimate of
when to come back; who is reached after nobody waits for its answer any more is refused, not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator


class Full(Exception):
    """The queue is full. `retry_after` is in how many seconds it may be worth another try."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The sandbox is full. Try again in {retry_after} s.")
        self.retry_after = retry_after


class Late(Exception):
    """The deadline passed before the request had its turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request's deadline passed {seconds:.3f} s ago by the server's clock; it was not run.")


class Admission:
    """The door."""

    def __init__(self, capacity: int, queue: int) -> None:
        self.capacity = capacity
        self.queue = queue
        self.running = 0
        self.mean_seconds = 0.1
        """How long one has run of late; an estimate for `Full`."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def check_room(self) -> None:
        """Raise Full if one more would be too many."""
        if self.running >= self.capacity and len(self._waiters) >= self.queue:
            raise Full(self.retry_after())

    def retry_after(self) -> int:
        """Seconds until the queue will be half as long, about."""
        return max(1, min(60, math.ceil(len(self._waiters) / 2 * self.mean_seconds / self.capacity)))

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float | None) -> AsyncIterator[float]:
        """Wait for one's turn and take it. `deadline` is Unix time. Gives the seconds waited."""
        came = time.monotonic()
        self._refuse_late(deadline)
        await self._enter(deadline)
        began = time.monotonic()
        try:
            self._refuse_late(deadline)
            yield began - came
            self.mean_seconds += 0.05 * (time.monotonic() - began - self.mean_seconds)
        finally:
            self._leave()

    async def _enter(self, deadline: float | None) -> None:
        self.check_room()
        if self.running < self.capacity and not self._waiters:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.time()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # it had just been given the turn that it no longer wants
            else:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(turn)
            if isinstance(error, TimeoutError):
                raise Late(0.0) from None
            raise

    def _leave(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)  # the place goes from hand to hand, so nobody can slip in between
                return
        self.running -= 1

    @staticmethod
    def _refuse_late(deadline: float | None) -> None:
        if deadline is not None and (late := time.time() - deadline) > 0:
            raise Late(late)
