"""Run the commands of a program one after the other inside the jail, then send the files that the request fetches.

The supervisor is confined to the jail itself: a path that it writes or reads leads nowhere that the program could not
reach, so symbolic links, `..` and absolute paths need no checks. It reports over a pipe that the program cannot write
to: one line of JSON for each command that has ended, then the fetched files in chunks, each a line of JSON followed by
as many bytes as the line states. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from toolroll.sandbox.server.isolation import landlock, syscalls
from toolroll.sandbox.server.job_spec import JailPlan, JobSpec, separate_user

STOP, CONTINUE = b"S", b"C"
"""Orders to suspend and to resume all processes of the program."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_FILE_CHUNK_BYTES = 1 << 18


class Supervisor:
    """Runs the commands of one program.

    Signals and orders only wake the event loop, which handles them one after the other.

    Args:
        plan: How programs are isolated.
        spec: The job.
        report_fd: Descriptor of the pipe for reports.
        orders_fd: Descriptor from which STOP and CONTINUE are read, or -1.
    """

    def __init__(self, plan: JailPlan, spec: JobSpec, report_fd: int, orders_fd: int) -> None:
        self.plan = plan
        self.spec = spec
        self.report_fd = report_fd
        self.orders_fd = orders_fd
        self.child = 0
        self.terminating = False
        self.signals_fd, self._wakeup_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        self.poll = select.poll()
        for fd in (self.signals_fd, orders_fd):
            if fd >= 0:
                self.poll.register(fd, select.POLLIN)

    def run(self, commands: Sequence[Callable[[], NoReturn]]) -> NoReturn:
        """Run each command in a child process until one fails, then send the files and exit.

        Args:
            commands: Functions that do not return: each runs a program in its process or executes another one.
        """
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # processes of the same user must not inspect this one
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        if not self.plan["namespaces"]:
            # Ends the program's processes if the zygote dies; with namespaces, the pid namespace does this. The setting
            # is repeated because a change of user clears it.
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        for command in commands:
            self._handle_signals()
            if self.terminating or self._run(command) != 0:
                break
        self._signal_all(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if (user := separate_user(self.plan, self.spec)) is not None:
            syscalls.set_ids(user)  # so that only files are fetched that the program can read
        self._send_files()
        os._exit(0)

    def _run(self, command: Callable[[], NoReturn]) -> int:
        """Run a command in a child, and report its end. Return its wait status."""
        started_at = time.monotonic()
        self.child, pidfd = syscalls.clone(0)
        if self.child == 0:
            self._become_command(command)
        os.close(pidfd)
        while not (ended := self._reap()):
            self._wait()
        self.child = 0
        status, cpu_s = ended
        self._send({"status": status, "seconds": time.monotonic() - started_at, "cpu": cpu_s})
        return status

    def _become_command(self, command: Callable[[], NoReturn]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        os.setpgid(0, 0)
        command()

    def _reap(self) -> tuple[int, float] | None:
        """Wait for ended processes, also orphans of the program. Return wait status and CPU time of the command."""
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == self.child:
                return status, usage.ru_utime + usage.ru_stime
            if pid == 0:
                return None

    def _wait(self) -> None:
        """Wait for a signal or an order, and handle it."""
        ready = [fd for fd, _ in self.poll.poll()]
        if self.orders_fd in ready:
            if order := os.read(self.orders_fd, 1):
                self._signal_all(signal.SIGSTOP if order == STOP else signal.SIGCONT)
            else:  # the zygote is dead
                self.poll.unregister(self.orders_fd)
                self._terminate()
        self._handle_signals()

    def _handle_signals(self) -> None:
        try:
            received = set(os.read(self.signals_fd, 4096))
        except BlockingIOError:
            return
        if signal.SIGTERM in received:
            self._terminate()
        elif signal.SIGINT in received and self.child:
            with contextlib.suppress(OSError):
                os.killpg(self.child, signal.SIGINT)

    def _terminate(self) -> None:
        self.terminating = True
        if self.child:  # the child may not have switched to the program's user yet
            with contextlib.suppress(OSError):
                os.kill(self.child, signal.SIGKILL)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """Send a signal to all processes of the program, in one call that a fork cannot outrun.

        kill(-1) signals all processes that the caller has permission for: those of its pid namespace, of its user, or
        of its Landlock domain.
        """
        if (user := separate_user(self.plan, self.spec)) is not None:
            killer, pidfd = syscalls.clone(0)
            if killer == 0:
                try:
                    syscalls.set_ids(user)
                    os.kill(-1, number)
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
            os.close(pidfd)
        elif self.plan["namespaces"] or self.plan["landlock"] >= landlock.SIGNAL_SCOPE_ABI:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
        elif number == signal.SIGKILL:
            self._kill_children()
        else:
            for pid in child_pids():
                os.kill(pid, number)

    def _kill_children(self) -> None:
        """Without isolation, kill the children one by one. Their orphans become our children and are killed next."""
        for _ in range(1000):
            if not (children := child_pids()):
                return
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def _send_files(self) -> None:
        remaining = self.spec["fetch_limit"]
        for path in self.spec["fetch"]:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except (OSError, ValueError):
                continue
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size > remaining:
                self._send({"too_large": path})
            elif stat.S_ISREG(status.st_mode):
                remaining -= self._send_file(path, fd, status.st_size)
            os.close(fd)

    def _send_file(self, path: str, fd: int, size: int) -> int:
        """Send a file in chunks, since a copy would count as memory of the program. Return the number of bytes sent."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < size and (chunk := os.read(fd, min(_FILE_CHUNK_BYTES, size - sent))):
                self._send({"file": path, "bytes": len(chunk)}, chunk)
                sent += len(chunk)
        self._send({"file": path, "bytes": 0})
        return sent

    def _send(self, message: dict[str, Any], content: bytes = b"") -> None:
        data = json.dumps(message).encode() + b"\n" + content
        while data:
            data = data[os.write(self.report_fd, data) :]


def child_pids() -> list[int]:
    """Return the process ids of this process's children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
