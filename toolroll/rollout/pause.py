"""Pause and resume all generations of a rollout, for example while a trainer updates the weights.

Tokens sampled before the pause are kept, with the version of the weights that sampled them. During the pause nothing is
generated, but tool calls continue, and time does not count towards the deadlines of the trajectories. A `Pause` may be
used in several event loops one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

from toolroll.rollout.limits import Limits

ABORT_REPEAT_INTERVAL_S = 0.5
"""Interval at which the abort is repeated. A request may reach the engine only after the first abort."""
ABORT_CALL_TIMEOUT_S = 60.0
"""Timeout for one abort call to the engine, after which it is repeated."""

AbortMany = Callable[[list[str]], Awaitable[None]]


class Pause:
    """The pause state shared by all trajectories of a rollout."""

    def __init__(self) -> None:
        self.count = 0
        """Number of pauses so far. A generation that started before the latest one may have been aborted by it."""
        self._generating: set[str] = set()
        self._resume_waiters: set[asyncio.Future[None]] = set()
        self._idle_waiters: set[asyncio.Future[None]] = set()
        self._started_at: float | None = None
        self._finished_seconds = 0.0

    @property
    def is_active(self) -> bool:
        """True during a pause."""
        return self._started_at is not None

    @property
    def total_seconds(self) -> float:
        """Total duration of all pauses, including the current one."""
        current = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return self._finished_seconds + current

    async def wait_until_resumed(self) -> None:
        """Wait until no pause is active."""
        while self.is_active:
            await _wait_for_notification(self._resume_waiters)

    @contextlib.contextmanager
    def track_generation(self, request_id: str) -> Iterator[None]:
        """Register a request so that a pause aborts it and waits for its end."""
        self._generating.add(request_id)
        try:
            yield
        finally:
            self._generating.discard(request_id)
            if not self._generating:
                _notify(self._idle_waiters)

    async def start(self, abort: AbortMany) -> None:
        """Start a pause and return when every generation has ended.

        Args:
            abort: Function that aborts the requests with the given ids at the engine.
        """
        if self._started_at is None:
            self.count += 1
            self._started_at = time.monotonic()
        while self._generating and self.is_active:
            aborting = asyncio.ensure_future(abort(list(self._generating)))
            try:
                await asyncio.wait({aborting}, timeout=ABORT_CALL_TIMEOUT_S)
            finally:
                aborting.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_REPEAT_INTERVAL_S):
                    while self._generating:
                        await _wait_for_notification(self._idle_waiters)

    def stop(self) -> None:
        """End the pause."""
        self._finished_seconds, self._started_at = self.total_seconds, None
        _notify(self._resume_waiters)


class Deadlines:
    """The deadline of a trajectory and of its current turn. Both start when the object is created."""

    def __init__(self, limits: Limits, pause: Pause) -> None:
        self._pause = pause
        self._turn_timeout_s = limits.turn_timeout
        self._trajectory_deadline = self._now() + limits.trajectory_timeout
        self._turn_deadline = self._now() + limits.turn_timeout
        self._turn: int | None = None

    def start_turn(self, turn: int) -> None:
        """Start the clock of a turn. A turn that is resumed or restarted keeps its deadline.

        Args:
            turn: Number of the turn.
        """
        if turn != self._turn:
            self._turn = turn
            self._turn_deadline = self._now() + self._turn_timeout_s

    @property
    def trajectory_expired(self) -> bool:
        """True if the trajectory's deadline has passed."""
        return self._now() >= self._trajectory_deadline

    def remaining_s(self) -> float:
        """Return the seconds until the earlier of the two deadlines, negative if it has passed."""
        return min(self._turn_deadline, self._trajectory_deadline) - self._now()

    def expire(self) -> None:
        """Let the deadlines pass now, as they did in a trajectory that is replayed."""
        self._turn_deadline = self._trajectory_deadline = self._now()

    def _now(self) -> float:
        return time.monotonic() - self._pause.total_seconds


async def _wait_for_notification(waiters: set[asyncio.Future[None]]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(future)
    try:
        await future
    finally:
        waiters.discard(future)


def _notify(waiters: set[asyncio.Future[None]]) -> None:
    for future in list(waiters):
        if not future.done() and not future.get_loop().is_closed():
            future.set_result(None)
