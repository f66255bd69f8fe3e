"""An event loop with a virtual clock, for tests of timeouts, retries and deadlines.

The clock stands still while the loop has work and jumps to the next timer when it has none. So a test that waits for a
minute takes milliseconds, and its figures do not depend on the load of the machine. Servers that run in the same loop
may use real sockets. While a thread of the loop's executor works, the clock is that of the machine.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any

QUIET_S = 0.01
"""Real time without any event after which the loop has no work. Data on the loopback interface arrives in less."""

_monotonic = time.monotonic


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock is also `time.monotonic` while the loop exists."""

    def __init__(self) -> None:
        self.now = _monotonic()
        self.threads = 0
        super().__init__(_JumpingSelector(self))
        time.monotonic = self.time

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_is_done)
        return future

    def _thread_is_done(self, _: asyncio.Future[Any]) -> None:
        self.threads -= 1

    def close(self) -> None:
        time.monotonic = _monotonic
        super().close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine with a virtual clock, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that advances the clock of its loop instead of waiting for a timer."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self._loop.threads:
            began = _monotonic()
            events = super().select(timeout)
            self._loop.now += _monotonic() - began
            return events
        events = super().select(QUIET_S)
        if not events:
            self._loop.now += timeout
        return events
