"""Pause: stops all generations at once, and lets them go on: before and after a trainer changes the weights.

What was sampled up to then is kept, with the version of the weights that sampled it. While it lasts nothing new is
generated; tools that are at work go on. The time of a pause counts for no deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

AGAIN = 0.2
"""Seconds after which a generation that hasn't stopped is told so again: it may not have begun when it was told."""


class Pause:
    """One for all trajectories of a rollout."""

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._since: float | None = None
        self._spent = 0.0

    @property
    def is_on(self) -> bool:
        """Whether nothing is generated."""
        return not self._going.is_set()

    @property
    def seconds(self) -> float:
        """How long it has lasted in all."""
        return self._spent + (time.monotonic() - self._since if self._since is not None else 0.0)

    async def over(self) -> None:
        """Wait until it is over."""
        if not self._going.is_set():
            await self._going.wait()

    @contextlib.contextmanager
    def generating(self, request_id: str) -> Iterator[None]:
        """While a generation is under way."""
        self._running.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()

    async def begin(self, abort: Callable[[str], Awaitable[None]]) -> None:
        """Stop every generation, and wait until all have stopped."""
        if self._going.is_set():
            self._going.clear()
            self._since = time.monotonic()
        while self._running:
            await asyncio.gather(*(abort(request_id) for request_id in list(self._running)), return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    await self._idle.wait()

    def end(self) -> None:
        """Let them go on."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None
        self._going.set()

    @contextlib.asynccontextmanager
    async def during(self, abort: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
        """`async with` a pause around what must not see a generation."""
        await self.begin(abort)
        try:
            yield
        finally:
            self.end()
