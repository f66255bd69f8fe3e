"""Measure the CPU time of a program, and how long it waited for the processor, from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from toolroll.sandbox.server.execution.time_limit import ThreadTimes, TimeSample
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READY_STATE, _BLOCKED_STATE = "R", "D"
"""States of a thread that needs the processor, and of one that waits in the kernel, usually for the disk."""
_ENDED_STATES = ("Z", "X", "")
_READ_BYTES = 1 << 16
_NEW_THREAD = ThreadTimes(0.0, 0.0, 0, is_ready=False)


class ProcessTimes:
    """The times of a program since the creation of this object.

    Args:
        process: Process of the program.
        is_supervised: Whether this process is a supervisor, whose time does not count.
        is_new: Whether the process has just started, so that all its times count.
    """

    def __init__(self, process: SandboxProcess, *, is_supervised: bool, is_new: bool) -> None:
        self._process = process
        self._is_supervised = is_supervised
        self._last = _Reading()
        if not is_new:
            self._last = self._read()
        self._cpu_before_s = self._last.cpu_s
        self._started_at = self._measured_at = time.monotonic()
        self._waited_s = self._blocked_s = 0.0

    def sample(self) -> tuple[TimeSample, bool]:
        """Return the times so far, and whether any process is running."""
        last, reading, now = self._last, self._read(), time.monotonic()
        interval_s = now - self._measured_at
        waits_s, is_blocked = [0.0], False
        for thread, times in reading.threads.items():
            before = last.threads.get(thread, _NEW_THREAD)
            reading.threads[thread] = times = times.since(before, interval_s)
            waits_s.append(times.waited_s - before.waited_s)
            is_blocked |= times.was_blocked_since(before)
        self._waited_s += max(waits_s)  # threads that wait at the same time are counted once
        self._blocked_s += interval_s if is_blocked else 0.0
        self._last, self._measured_at = reading, now
        elapsed_s, cpu_s = now - self._started_at, reading.cpu_s - self._cpu_before_s
        return TimeSample(elapsed_s, cpu_s, min(self._waited_s, elapsed_s), self._blocked_s), reading.is_running

    def _read(self) -> _Reading:
        """Read the times of all processes of the program."""
        reading = _Reading()
        try:
            pids = self._process.roots()
        except OSError:  # the server has too many open files
            pids = []
        seen = set[int]()
        uncounted = set(pids if self._is_supervised else pids[1:])
        while pids:
            pid = pids.pop()
            if pid in seen:  # a process id can be reused while the tree is read
                continue
            seen.add(pid)
            is_counted = pid not in uncounted
            if is_counted:
                reading.cpu_s += _read_cpu_time(pid)
            for thread in _threads_of(pid):
                pids += map(int, _read_file(f"/proc/{pid}/task/{thread}/children").split())
                if is_counted:
                    reading.add_thread(pid, thread)
        return reading


@dataclass
class _Reading:
    """Times of a program's processes at one moment."""

    cpu_s: float = 0.0
    threads: dict[int, ThreadTimes] = field(default_factory=dict)
    """Thread id → its times."""
    is_running: bool = False

    def add_thread(self, pid: int, thread: str) -> None:
        """Add a thread of a process."""
        state = "".join(_fields_after_name(f"/proc/{pid}/task/{thread}/stat")[:1])
        self.is_running |= state not in _ENDED_STATES
        if times := _read_file(f"/proc/{pid}/task/{thread}/schedstat").split():
            run_ns, wait_ns, runs = map(int, times)
            is_ready, is_blocked = state == _READY_STATE, state == _BLOCKED_STATE
            self.threads[int(thread)] = ThreadTimes(run_ns / 1e9, wait_ns / 1e9, runs, is_ready, is_blocked)


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return []


def _read_cpu_time(pid: int) -> float:
    """Return the CPU time of a process, together with that of the children it has waited for."""
    return sum(map(int, _fields_after_name(f"/proc/{pid}/stat")[11:15])) / _TICKS_PER_S


def _fields_after_name(path: str) -> list[str]:
    """Return the fields of a `stat` file from the state on, or nothing if the process has ended."""
    return _read_file(path).rpartition(")")[2].split()


def _read_file(path: str) -> str:
    """Return the content of a file, or nothing if its process has ended or the kernel lacks the file."""
    try:
        file = os.open(path, os.O_RDONLY)  # several times as fast as a file object, which matters for a fork bomb
    except OSError:
        return ""
    content = b""
    try:
        while chunk := os.read(file, _READ_BYTES):
            content += chunk
        return content.decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)
