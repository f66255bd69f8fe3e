"""Decide when a program has exceeded its time limit. This module is pure: callers pass the measured times.

- A program that uses the processor is limited by its CPU time, so a busy machine does not change the verdict.
- A program that sleeps or waits uses no CPU time. It is limited by its own time: the elapsed time without the time in
  which its threads were ready to run and waited for the processor.
- Time in which a thread was blocked in the kernel, usually by the disk, postpones this limit. It is the program's own
  time nevertheless, because a program can cause it: with `vfork`, for example.
- If a machine is so busy that neither limit is reached in a multiple of the time, the program is starved. This is a
  failure of the sandbox, not of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from toolroll.sandbox.protocol import FULL_TIME_FRACTION, max_wall_time

MAX_ELAPSED_FACTOR = 4
"""Maximum elapsed time as a multiple of the maximum own time, unless the request limits it."""
MIN_CHECK_INTERVAL_S = 0.05
MAX_CHECK_INTERVAL_S = 0.25
"""Waits of processes that start and end between two checks are not seen, so that checks must be frequent."""


class TimeVerdict(Enum):
    """Whether a program may continue."""

    WITHIN_LIMIT = auto()
    TIMEOUT = auto()
    STARVED = auto()
    """The program is to be stopped, but did not have its time."""


@dataclass(frozen=True)
class TimeSample:
    """Times of a program since its start, in seconds."""

    elapsed_s: float
    cpu_s: float
    """CPU time of all processes together."""
    waited_s: float
    """Time in which the program waited for the processor."""
    blocked_s: float = 0.0
    """Time in which a thread was blocked in the kernel."""

    @property
    def own_s(self) -> float:
        """Time in which the program ran, slept or waited for something else than the processor."""
        return self.elapsed_s - self.waited_s


@dataclass(frozen=True)
class ThreadTimes:
    """Times of a thread, in seconds."""

    run_s: float
    ended_waits_s: float
    """Time that the thread has waited for a processor. The kernel adds a wait when it ends."""
    runs: int
    """Number of times that the thread was given a processor."""
    is_ready: bool
    """Whether the thread runs or waits for a processor."""
    is_blocked: bool = False
    """Whether the thread waits in the kernel and cannot be interrupted."""
    current_wait_s: float = 0.0
    """Known duration of the current wait."""

    @property
    def waited_s(self) -> float:
        """Time that the thread has waited for a processor, as far as it is known."""
        return self.ended_waits_s + self.current_wait_s

    def since(self, before: ThreadTimes, interval_s: float) -> ThreadTimes:
        """Return these times with the known duration of the current wait.

        A thread that was ready before and is ready now, and was not given a processor meanwhile, has run or waited. The
        exception is a thread that ran, then slept and woke up within the interval: its sleep counts as a wait.

        Args:
            before: Times of the thread at the start of an interval.
            interval_s: Duration of the interval, which ends now.

        Returns:
            A copy of these times.
        """
        if not (before.is_ready and self.is_ready and before.runs == self.runs):
            return self
        waited_s = before.current_wait_s + interval_s - (self.run_s - before.run_s)
        return replace(self, current_wait_s=max(0.0, waited_s))

    def was_blocked_since(self, before: ThreadTimes) -> bool:
        """Return True if the thread has been blocked since an earlier moment."""
        return before.is_blocked and self.is_blocked and before.runs == self.runs


class TimeLimit:
    """The time limit of one command or cell.

    Args:
        limit_s: Maximum CPU time.
        max_elapsed_s: Maximum elapsed time. Default: `MAX_ELAPSED_FACTOR` times the maximum own time.
        full_own_s: Own time from which a program that reaches `max_elapsed_s` has had its time, if that is less than
            `FULL_TIME_FRACTION` of `limit_s`. A notebook passes the part that its earlier cells have left.

    Example:
        >>> limit = TimeLimit(2.0)
        >>> limit.check(TimeSample(elapsed_s=2.0, cpu_s=0.1, waited_s=1.8)).name  # on a busy machine
        'WITHIN_LIMIT'
        >>> limit.check(TimeSample(elapsed_s=2.0, cpu_s=2.0, waited_s=0.0)).name
        'TIMEOUT'
        >>> limit.check(TimeSample(elapsed_s=5.0, cpu_s=0.1, waited_s=0.0)).name  # the program sleeps
        'TIMEOUT'
    """

    def __init__(self, limit_s: float, max_elapsed_s: float | None = None, full_own_s: float | None = None) -> None:
        self.limit_s = limit_s
        self.max_own_s = max_wall_time(limit_s)
        self.max_elapsed_s = MAX_ELAPSED_FACTOR * self.max_own_s if max_elapsed_s is None else max_elapsed_s
        self.full_own_s = FULL_TIME_FRACTION * limit_s
        if full_own_s is not None:
            self.full_own_s = min(self.full_own_s, full_own_s)

    @property
    def first_check_s(self) -> float:
        """Elapsed time at the first check."""
        return min(self.limit_s, self.max_elapsed_s, MAX_CHECK_INTERVAL_S)

    def check(self, sample: TimeSample) -> TimeVerdict:
        """Return the verdict for the times so far."""
        own_s = sample.own_s
        if sample.cpu_s >= self.limit_s or own_s - sample.blocked_s >= self.max_own_s:
            return TimeVerdict.TIMEOUT
        if sample.elapsed_s >= self.max_elapsed_s:
            return TimeVerdict.TIMEOUT if own_s >= self.full_own_s else TimeVerdict.STARVED
        return TimeVerdict.WITHIN_LIMIT

    def until_next_check(self, sample: TimeSample) -> float:
        """Return the time until the next check, if the program uses at most one processor."""
        remaining = self.limit_s - sample.cpu_s, self.max_own_s - sample.own_s, self.max_elapsed_s - sample.elapsed_s
        return max(MIN_CHECK_INTERVAL_S, min(*remaining, MAX_CHECK_INTERVAL_S))
