"""Cache of responses by idempotency key, so that a request that is sent again is not run again.

Responses are kept for a minute, within a bound on their number and size. The oldest are evicted first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

RESPONSE_TTL_S = 60.0
MAX_CACHED_RESPONSES = 10_000
MAX_CACHED_BYTES = 64 << 20


@dataclass
class _PendingResponse:
    task: asyncio.Task[bytes]
    waiters: int = 0


class IdempotencyCache:
    """Pending and recent responses, by idempotency key."""

    def __init__(self) -> None:
        self._pending: dict[str, _PendingResponse] = {}
        self._cached: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._cached_bytes = 0

    async def get(self, key: str, make: Callable[[], Coroutine[Any, Any, bytes]], *, finish: bool) -> bytes:
        """Return the cached or pending response for a key; run `make` if there is none. Failures are not cached.

        Args:
            key: Idempotency key.
            make: Function that runs the request.
            finish: Whether to complete the request even if all callers are cancelled. Use it for requests with side
                effects that must happen exactly once.

        Returns:
            The response body.
        """
        self._evict()
        if key in self._cached:
            return self._cached[key][1]
        if (entry := self._pending.get(key)) is None:
            entry = self._pending[key] = _PendingResponse(asyncio.create_task(make()))
            entry.task.add_done_callback(lambda task: self._store(key, task))
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            if not entry.task.done() and not entry.waiters and not finish:
                entry.task.cancel()
                self._pending.pop(key, None)

    def _store(self, key: str, task: asyncio.Task[bytes]) -> None:
        if key in self._pending and self._pending[key].task is task:
            del self._pending[key]
        if not task.cancelled() and task.exception() is None:
            self._cached[key] = time.monotonic(), task.result()
            self._cached_bytes += len(task.result())
            self._evict()

    def _evict(self) -> None:
        while self._cached:
            cached_at, body = next(iter(self._cached.values()))
            over_limit = len(self._cached) > MAX_CACHED_RESPONSES or self._cached_bytes > MAX_CACHED_BYTES
            if not over_limit and time.monotonic() - cached_at < RESPONSE_TTL_S:
                return
            self._cached.popitem(last=False)
            self._cached_bytes -= len(body)
