"""What was answered of late, by the key that the request came with: sent again, it isn't run again.

Remembered for a minute, and within bounds: the oldest go first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

KEEP_SECONDS = 60.0
MOST_ANSWERS = 10_000
MOST_BYTES = 64 << 20


@dataclass
class _UnderWay:
    task: asyncio.Task[bytes]
    waiting: int = 0


class Answers:
    """Answers under way and given."""

    def __init__(self) -> None:
        self._under_way: dict[str, _UnderWay] = {}
        self._given: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str, make: Callable[[], Coroutine[Any, Any, bytes]], *, finish: bool) -> bytes:
        """The answer to a request of this key: the one that is known or under way, else what `make` gives.

        When nobody waits any more, it is given up; with `finish` it is brought to its end all the same, as it has
        effects that shall happen once. A failure isn't remembered.
        """
        self._forget_old()
        if key in self._given:
            return self._given[key][1]
        entry = self._under_way.get(key)
        if entry is None:
            entry = self._under_way[key] = _UnderWay(asyncio.create_task(make()))
            entry.task.add_done_callback(lambda task: self._done(key, task))
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.task.done() and not entry.waiting and not finish:
                entry.task.cancel()
                self._under_way.pop(key, None)

    def _done(self, key: str, task: asyncio.Task[bytes]) -> None:
        if key in self._under_way and self._under_way[key].task is task:
            del self._under_way[key]
        if not task.cancelled() and task.exception() is None:
            self._given[key] = time.monotonic(), task.result()
            self._bytes += len(task.result())
            self._forget_old()

    def _forget_old(self) -> None:
        while self._given:
            given, answer = next(iter(self._given.values()))
            too_many = len(self._given) > MOST_ANSWERS or self._bytes > MOST_BYTES
            if not too_many and time.monotonic() - given < KEEP_SECONDS:
                return
            self._given.popitem(last=False)
            self._bytes -= len(answer)
