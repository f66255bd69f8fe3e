"""Python's garbage collector, whose full collections are kept rare while trajectories run.

A full collection looks at every object there is, and everything stands still meanwhile. With ten thousand trajectories
in flight, one took 0.9 s, and they came every two seconds. Promises:

- Full collections take no more than `SHARE` of the time. Young objects, nearly all that there are to free, are
  collected as ever.
- When the last run of the process ends, the collector is as it was. One that is switched off is left alone.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.001
NEVER = 2**31 - 1


class _Rarely:
    """Told by the collector of each collection, it says when the next may be a full one."""

    def __init__(self) -> None:
        self._before = gc.get_threshold()[2]
        self._due = time.monotonic()
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
        elif info["generation"] == 2:
            self._due = now + (now - self._began) / SHARE
        self.allow(now >= self._due)

    def allow(self, full: bool) -> None:
        gc.set_threshold(*gc.get_threshold()[:2], self._before if full else NEVER)


_lock = threading.Lock()
_runs = 0
_rarely: _Rarely | None = None


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """While the block runs, in any thread."""
    global _runs, _rarely
    with _lock:
        _runs += 1
        if _runs == 1 and gc.isenabled():
            _rarely = _Rarely()
            gc.callbacks.append(_rarely)
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0 and _rarely is not None:
                gc.callbacks.remove(_rarely)
                _rarely.allow(full=True)
                _rarely = None
