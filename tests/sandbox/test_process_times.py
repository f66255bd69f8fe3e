"""Times of a program: what it used, and how long it waited for the processor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolroll.sandbox.server.execution.process_times import ProcessTimes

pytestmark = pytest.mark.process
BUSY = "while True: pass"
IDLE = "import time; time.sleep(60)"
CHILD_IS_BUSY = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.fixture
def start() -> Iterator[Callable[[str], Any]]:
    """Return a function that starts a program on one processor, which all of them share."""
    with ExitStack() as stack:
        processor = {min(os.sched_getaffinity(0))}

        def start(code: str) -> Any:
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], process_group=0))
            stack.callback(kill_group, program.pid)
            os.sched_setaffinity(program.pid, processor)
            return SimpleNamespace(roots=lambda: [program.pid], program=program)

        yield start


def kill_group(leader: int) -> None:
    """Kill a program and its children."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def times_of(process: Any, *, is_new: bool = True, is_supervised: bool = False) -> ProcessTimes:
    return ProcessTimes(process, is_supervised=is_supervised, is_new=is_new)


def wait_for_cpu(times: ProcessTimes, cpu_s: float) -> None:
    """Wait until the program has used some CPU time."""
    for _ in range(2000):
        if times.sample()[0].cpu_s >= cpu_s:
            return
        time.sleep(0.02)
    raise AssertionError("the program does not run")


def test_program_waits_while_others_run(start: Callable[[str], Any]) -> None:
    times = [times_of(start(BUSY)) for _ in range(4)]
    for one in times:
        wait_for_cpu(one, 0.2)
    samples = [one.sample() for one in times]
    cpu_s = sum(sample.cpu_s for sample, _ in samples)
    for sample, is_running in samples:
        assert is_running
        # They do not start at the same moment, and other processes of the machine can make them wait longer.
        assert sample.waited_s > 0.5 * (cpu_s - sample.cpu_s)


def test_wait_that_has_not_ended_counts(start: Callable[[str], Any]) -> None:
    busy = times_of(start(BUSY))
    process = start(BUSY)
    wait_for_cpu(times_of(process), 0.1)  # it has started, and does not wait for the disk
    os.sched_setscheduler(process.program.pid, os.SCHED_IDLE, os.sched_param(0))
    wait_for_cpu(busy, 0.2)
    times = times_of(process, is_new=False)
    for cpu_s in (0.3, 0.4, 0.5, 0.6, 0.7):  # as often as the server does: a wait is known if no run ended it meanwhile
        wait_for_cpu(busy, cpu_s)
        sample, is_running = times.sample()
    assert is_running
    assert sample.waited_s > 0.5 * sample.elapsed_s


def test_sleeping_program_does_not_wait(start: Callable[[str], Any]) -> None:
    process = start(IDLE)
    busy = times_of(start(BUSY))
    wait_for_cpu(busy, 0.2)
    times = times_of(process, is_new=False)
    wait_for_cpu(busy, 0.6)
    sample, is_running = times.sample()
    assert is_running
    assert sample.cpu_s + sample.waited_s < 0.5 * sample.elapsed_s


def test_blocked_program_does_not_wait(start: Callable[[str], Any], tmp_path: Path) -> None:
    """A parent is blocked until its child of `vfork` starts a program. It can cause this for as long as it likes."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    open_fifo = f"[(os.POSIX_SPAWN_OPEN, 0, {fifo!r}, os.O_RDONLY, 0)]"
    process = start(f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions={open_fifo})")
    stat = Path(f"/proc/{process.program.pid}/stat")
    for _ in range(2000):
        if stat.read_text().rpartition(")")[2].split()[0] == "D":
            break
        time.sleep(0.02)
    times = times_of(process, is_new=False)
    for _ in range(5):
        time.sleep(0.1)
        sample, is_running = times.sample()
    assert is_running
    assert sample.waited_s < 0.1 * sample.elapsed_s
    assert sample.blocked_s > 0.9 * sample.elapsed_s


def test_children_count(start: Callable[[str], Any]) -> None:
    wait_for_cpu(times_of(start(CHILD_IS_BUSY)), 0.5)


def test_supervisor_does_not_count(start: Callable[[str], Any]) -> None:
    process = start(BUSY)
    wait_for_cpu(times_of(process), 0.1)
    sample, is_running = times_of(process, is_supervised=True).sample()
    assert (sample.cpu_s, is_running) == (0, False)


def test_time_before_a_call_does_not_count(start: Callable[[str], Any]) -> None:
    process = start(BUSY)
    wait_for_cpu(times_of(process), 0.5)
    sample, _ = times_of(process, is_new=False).sample()
    assert sample.cpu_s <= sample.elapsed_s + 0.05  # the kernel counts in ticks of 0.01 s


def test_ended_program_is_not_running(start: Callable[[str], Any]) -> None:
    process = start("pass")
    times = times_of(process)
    assert process.program.wait(60) == 0
    assert not times.sample()[1]
