"""What was answered of late, by the key that the request came with: sent again, it isn't run again.

Remembered for a minute, and within bounds: the oldest go first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

KEEP_SECONDS = 60.0
MOST_ANSWERS = 10_000
MOST_BYTES = 64 << 20


@dataclass
class _Entry:
    task: asyncio.Task[bytes]
    waiting: int = 0
    ended: float = 0.0
    size: int = 0


class Answers:
    """Answers under way and given."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str, make: Callable[[], Awaitable[bytes]], *, finish: bool) -> bytes:
        """The answer to a request of this key: the one that is known or under way, else what `make` gives.

        When nobody waits any more, it is given up; with `finish` it is brought to its end all the same, as it has
        effects that shall happen once. A failure isn't remembered.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(asyncio.ensure_future(make()))
            entry.task.add_done_callback(lambda _: self._done(key, entry))
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.task.done() and not entry.waiting and not finish:
                self._entries.pop(key, None)
                entry.task.cancel()

    def _done(self, key: str, entry: _Entry) -> None:
        if entry.task.cancelled() or entry.task.exception():
            if self._entries.get(key) is entry:
                del self._entries[key]
            return
        entry.ended, entry.size = time.monotonic(), len(entry.task.result())
        self._bytes += entry.size
        self._entries.move_to_end(key)
        while self._entries:
            oldest = next(iter(self._entries))
            first = self._entries[oldest]
            old = first.ended and entry.ended - first.ended > KEEP_SECONDS
            if not first.ended or not (old or len(self._entries) > MOST_ANSWERS or self._bytes > MOST_BYTES):
                break
            del self._entries[oldest]
            self._bytes -= first.size
