"""Warm interpreters of one profile: as many as wanted, each replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from toolroll.sandbox.server.interpreter import Interpreter, StartError
from toolroll.sandbox.server.spec import Plan

logger = logging.getLogger(__name__)

_PAUSES = (0.0, 0.1, 1.0, 5.0)
"""Seconds before another try at an interpreter that wouldn't start."""


class Pool:
    """Interpreters that have the same modules preloaded."""

    def __init__(self, plan: Plan, python: str, preload: Sequence[str], size: int) -> None:
        self.plan = plan
        self.python = python
        self.preload = preload
        self.size = size
        self.restarts = 0
        self.preloaded: list[str] = []
        self._alive: list[Interpreter] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._some = asyncio.Event()

    def start(self) -> None:
        """Start all of them, and see to it from now on that they are there."""
        self._keepers = [asyncio.create_task(self._keep()) for _ in range(self.size)]

    async def interpreter(self) -> Interpreter:
        """The one with the fewest programs; waits where all have just died."""
        while not self._alive:
            await self._some.wait()
        return self.least_busy()

    def least_busy(self) -> Interpreter:
        """The one with the fewest programs, where there is one."""
        return min(self._alive, key=lambda one: len(one.runs))

    @property
    def is_up(self) -> bool:
        """Whether there is one."""
        return bool(self._alive)

    @property
    def pids(self) -> list[int]:
        """The processes of those alive."""
        return [one.pid for one in self._alive]

    async def close(self) -> None:
        """End all of them."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self) -> None:
        """See to it that there is one, always."""
        failures = 0
        while True:
            interpreter = Interpreter(self.plan, self.python, self.preload)
            try:
                await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                await interpreter.start()
            except StartError as error:
                failures += 1
                logger.error("A warm interpreter can't be started (try %d): %s", failures, error)
                continue
            failures = 0
            self.preloaded = interpreter.preloaded
            self._alive.append(interpreter)
            self._some.set()
            try:
                await interpreter.ended.wait()
            finally:
                interpreter.close()
                self._alive.remove(interpreter)
                if not self._alive:
                    self._some.clear()
            self.restarts += 1
