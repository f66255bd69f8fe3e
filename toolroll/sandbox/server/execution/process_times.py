"""Measure the CPU time of a program, and how long it waited for the processor, from /proc."""

from __future__ import annotations

import os
import time
from glob import glob
from pathlib import Path

from toolroll.sandbox.server.execution.time_limit import TimeSample
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ZOMBIE = "Z"


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
        self._started_at = time.monotonic()
        self._waits: dict[int, float] = {}
        """Thread id → time that it has waited for the processor."""
        self._waited_s = self._cpu_before_s = 0.0
        if not is_new:
            self._cpu_before_s = self._measure()[0]
            self._waited_s = 0.0

    def sample(self) -> tuple[TimeSample, bool]:
        """Return the times so far, and whether any process is running."""
        cpu_s, is_running = self._measure()
        elapsed_s = time.monotonic() - self._started_at
        return TimeSample(elapsed_s, cpu_s - self._cpu_before_s, min(self._waited_s, elapsed_s)), is_running

    def _measure(self) -> tuple[float, bool]:
        cpu_s, is_running, waits = 0.0, False, dict[int, float]()
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
            if (stat := _read_stat(pid)) is None:
                continue
            state, process_cpu_s = stat
            pids += _read_threads(pid, {} if pid in uncounted else waits)
            if pid not in uncounted:
                cpu_s += process_cpu_s
                is_running = is_running or state != _ZOMBIE
        # Threads that wait at the same time are counted once.
        increases = [wait - self._waits.get(thread, 0.0) for thread, wait in waits.items()]
        self._waited_s += max(increases, default=0.0)
        self._waits = waits
        return cpu_s, is_running


def _read_stat(pid: int) -> tuple[str, float] | None:
    """Return the state of a process, and its CPU time together with that of the children it has waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:  # the process has ended
        return None
    state, threads = fields[0], int(fields[17])
    # The first thread may have ended before the others.
    return state if threads <= 1 else "R", sum(map(int, fields[11:15])) / _TICKS_PER_S


def _read_threads(pid: int, waits: dict[int, float]) -> list[int]:
    """Add the waiting time of each thread to `waits`. Return the children of all threads."""
    children: list[int] = []
    for directory in glob(f"/proc/{pid}/task/*"):
        if times := _read(f"{directory}/schedstat").split():
            waits[int(os.path.basename(directory))] = int(times[1]) / 1e9
        children += map(int, _read(f"{directory}/children").split())
    return children


def _read(path: str) -> str:
    """Return the content of a file, or nothing if its process has ended or the kernel lacks the file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
