"""The guard of a front, if a server has several.

The process forks first. The child is the front. The parent, its guard, waits until the front ends, then kills every
process that the front has left behind, and exits. So the hub knows that no program of a front runs any more when the
guard has ended, however the front died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import NoReturn

from toolroll.sandbox.server.interpreter.supervisor import child_pids
from toolroll.sandbox.server.isolation import syscalls

END_TIMEOUT_S = 1.0
"""Time in which the processes of a dead front end by themselves."""
END_POLL_INTERVAL_S = 0.01


def main() -> NoReturn:
    """Run a front. The first line of standard input is its configuration; see `FrontConfig`."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    config = sys.stdin.buffer.readline()
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if front := os.fork():
        syscalls.close_from(3)
        _guard(front)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before the call above
        os._exit(1)
    from toolroll.sandbox.server.fronts.front_service import run

    run(config)
    os._exit(0)


def _guard(front: int) -> NoReturn:
    """Wait for the front, then end its remaining processes. SIGTERM kills the front."""
    pidfd = os.pidfd_open(front)

    def kill_front(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_front)
    while os.wait()[0] != front:  # orphans of its zygotes are children of this process, too
        pass
    # Zygotes and supervisors are notified by the kernel. A supervisor kills all processes of its program at once, which
    # is safer than killing them one by one.
    deadline = time.monotonic() + END_TIMEOUT_S
    while child_pids() and time.monotonic() < deadline:
        if os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(END_POLL_INTERVAL_S)
    while children := child_pids():  # the children of a killed process become children of this one
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    os._exit(0)
