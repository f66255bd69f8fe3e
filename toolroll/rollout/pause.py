"""Pause: stops all generations at once, and lets them go on: before and after a trainer changes the weights.

What was sampled up to then is kept, with the version of the weights that sampled it. While it lasts nothing new is
generated; tools that are at work go on. The time of a pause counts for no deadline. It may be used in one event loop
after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

AGAIN = 0.5
"""Seconds after which generations that haven't stopped are told so again: one may not have begun when it was told."""
AN_ABORT = 60.0
"""Seconds that an engine may take over an abort, before it is told again."""

AbortMany = Callable[[list[str]], Awaitable[None]]


class Pause:
    """One for all trajectories of a rollout."""

    def __init__(self) -> None:
        self.count = 0
        """How many there were. A generation that began before the last one may have been stopped by it."""
        self._running: set[str] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._idle: set[asyncio.Future[None]] = set()
        self._since: float | None = None
        self._spent = 0.0

    @property
    def is_on(self) -> bool:
        """Whether nothing is generated."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """How long it has lasted in all."""
        return self._spent + (time.monotonic() - self._since if self._since is not None else 0.0)

    async def over(self) -> None:
        """Wait until it is over."""
        while self.is_on:
            await _told(self._waiting)

    @contextlib.contextmanager
    def generating(self, request_id: str) -> Iterator[None]:
        """While a generation is under way."""
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)
            if not self._running:
                _tell(self._idle)

    async def begin(self, abort: AbortMany) -> None:
        """Stop every generation, and wait until all have stopped."""
        if self._since is None:
            self.count += 1
            self._since = time.monotonic()
        while self._running and self.is_on:
            aborting = asyncio.ensure_future(abort(list(self._running)))
            try:
                await asyncio.wait({aborting}, timeout=AN_ABORT)
            finally:
                aborting.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    while self._running:
                        await _told(self._idle)

    def end(self) -> None:
        """Let them go on."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None
        _tell(self._waiting)


async def _told(waiting: set[asyncio.Future[None]]) -> None:
    """Wait until those who wait here are told."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.add(future)
    try:
        await future
    finally:
        waiting.discard(future)


def _tell(waiting: set[asyncio.Future[None]]) -> None:
    for future in list(waiting):
        if not future.done() and not future.get_loop().is_closed():
            future.set_result(None)
