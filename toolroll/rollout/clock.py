"""Clock: the deadlines of one trajectory. A turn's is within the trajectory's; a pause's time counts for neither."""

from __future__ import annotations

import time

from toolroll.rollout.limits import Limits
from toolroll.rollout.pause import Pause


class Clock:
    """Begins when it is made."""

    def __init__(self, limits: Limits, pause: Pause) -> None:
        self._limits = limits
        self._pause = pause
        self._began = self._turn_began = self._now()

    def begin_turn(self) -> None:
        """A turn begins now."""
        self._turn_began = self._now()

    @property
    def is_over(self) -> bool:
        """Whether the trajectory's time is up."""
        return self._now() >= self._began + self._limits.trajectory_timeout

    def left(self) -> float:
        """Seconds to the nearer of the two deadlines; none or less: it has passed."""
        ends = min(self._turn_began + self._limits.turn_timeout, self._began + self._limits.trajectory_timeout)
        return ends - self._now()

    def _now(self) -> float:
        return time.monotonic() - self._pause.seconds
