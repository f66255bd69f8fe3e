"""Delays that the machine itself causes, measured while a test runs."""

from __future__ import annotations

import threading
import time
from typing import Self

_INTERVAL_S = 0.005


class SchedulingDelay:
    """Context in which a thread sleeps for 5 ms at a time and measures how much later it wakes up.

    A test adds a multiple of `max_s` to a bound in seconds, so that the bound holds on a busy machine and is tight on
    an idle one.
    """

    def __init__(self) -> None:
        self.max_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._stop.is_set():
            due = time.monotonic() + _INTERVAL_S
            time.sleep(_INTERVAL_S)
            self.max_s = max(self.max_s, time.monotonic() - due)


def max_overlap(spans: list[tuple[float, float]]) -> int:
    """Return the largest number of spans (begin, end) that contain a common moment."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    level = highest = 0
    for _, change in changes:
        level += change
        highest = max(highest, level)
    return highest
