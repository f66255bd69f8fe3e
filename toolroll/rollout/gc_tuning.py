"""Option for the owner of a process: make full garbage collections rare while many trajectories run.

A full collection visits every object and blocks the event loop meanwhile. With 10,000 trajectories in flight, one took
0.9 s, and one started every two seconds. Collections of young objects, which free nearly everything, are cheap.

The garbage collector belongs to the whole process. toolroll therefore changes it only in processes that it owns
(`toolroll run` and its Ray workers); a trainer's script enables the option itself with `infrequent_full_gc`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_FULL_GC_TIME_SHARE = 0.001
"""Maximum share of the time that full collections take."""
FULL_GC_OFF_THRESHOLD = 2**31 - 1
"""Threshold of generation 2 that is never reached."""


class _FullGCThrottle:
    """Callback of the garbage collector that allows the next full collection only after a delay."""

    def __init__(self) -> None:
        self._original_threshold = gc.get_threshold()[2]
        self._next_allowed_at = time.monotonic()
        self._collection_started_at = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collection_started_at = now
        elif info["generation"] == 2:
            self._next_allowed_at = now + (now - self._collection_started_at) / MAX_FULL_GC_TIME_SHARE
        self.allow_full_gc(now >= self._next_allowed_at)

    def allow_full_gc(self, allowed: bool) -> None:
        threshold = self._original_threshold if allowed else FULL_GC_OFF_THRESHOLD
        gc.set_threshold(*gc.get_threshold()[:2], threshold)


_lock = threading.Lock()
_active_blocks = 0
_throttle: _FullGCThrottle | None = None


@contextmanager
def infrequent_full_gc() -> Iterator[None]:
    """Limit full garbage collections of this process to 0.1 % of the time while the block runs.

    Young objects are collected as usual. Blocks may be nested and may run in several threads; when the last one ends,
    the collector has its original settings again. A collector that is disabled stays disabled.

    Yields:
        None.

    Example:
        >>> with infrequent_full_gc():
        ...     pass  # trainer.train()
    """
    global _active_blocks, _throttle
    with _lock:
        _active_blocks += 1
        if _active_blocks == 1 and gc.isenabled():
            _throttle = _FullGCThrottle()
            gc.callbacks.append(_throttle)
    try:
        yield
    finally:
        with _lock:
            _active_blocks -= 1
            if _active_blocks == 0 and _throttle is not None:
                gc.callbacks.remove(_throttle)
                _throttle.allow_full_gc(True)
                _throttle = None
