"""The zygote: a Python interpreter with libraries already imported, which clones itself for each program.

The zygote exchanges packets with the server over one socket. It receives requests to run a job, with the job's
descriptors, and to kill, stop or continue a job; it sends an event when a job starts and when it ends. It never reads
data that a program or a request could have written: the job's spec is read by the clone. It has one thread and one
event loop, which waits for nothing that a program can delay, and exits when the server closes the socket.

A program and its children run in a pid namespace whose pid 1 is an idle process. The namespace is reused for another
program only if no process of the previous one remains; otherwise it is destroyed, which kills the remaining processes.
A program thus costs one fork instead of two. Only the zygote destroys namespaces: the server learns later that a
program has ended, and could kill the next program in the same namespace.

The zygote and a new clone share their memory, and a page is copied when either writes to it. Python writes to every
object that it uses, so page faults are the largest part of the cost of a program. The zygote therefore prepares the
parts that all programs have in common, and the code that runs for each program uses few objects.

Besides the modules to preload, only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import marshal
import os
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from typing import NoReturn

from toolroll.sandbox.server.interpreter import script_runner
from toolroll.sandbox.server.interpreter.child_setup import REPORT_FD, SPEC_FD, ChildSetup
from toolroll.sandbox.server.interpreter.supervisor import STOP, child_pids
from toolroll.sandbox.server.isolation import jail, syscalls
from toolroll.sandbox.server.job_spec import WORK, JailPlan, JobSpec

START_ENVIRONMENT = {"LD_BIND_NOW": "1"}
"""Variables with which a zygote is started. The dynamic linker resolves functions at once: if it did so at their first
call, every clone would do it again."""
REQUEST = struct.Struct("=cQB")
"""Packet to the zygote: RUN, KILL, STOP or CONTINUE, the job's number, and how many of its descriptors, the last ones,
are cgroups to enter."""
RUN, KILL = b"J", b"K"
EVENT = struct.Struct("=cQ")
"""Packet from the zygote: READY, STARTED or FAILED, and the job's number. READY is followed by the names of the
preloaded modules as JSON, FAILED by the reason. STARTED has one or two descriptors: the pidfd of the program, and that
of the first process of its pid namespace."""
EXIT_EVENT = struct.Struct("=cQid")
"""Packet from the zygote: EXITED, the job's number, its wait status, and its CPU time in seconds."""
READY, STARTED, EXITED, FAILED = b"R", b"S", b"E", b"F"
MAX_JOB_DESCRIPTORS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_JOB_DESCRIPTORS * struct.calcsize("i"))
_SOL_SOCKET, _SCM_RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
MAX_SPARE_NAMESPACES = 64
"""Maximum number of empty pid namespaces to keep for reuse."""
ORPHAN_CHECK_INTERVAL_MS = 10


@dataclass
class PidNamespace:
    """A pid namespace, and its idle first process."""

    pid: int
    pidfd: int
    namespace_fd: int
    control_fd: int
    """Pipe to the first process, for STOP and CONTINUE."""

    @classmethod
    def create(cls) -> PidNamespace:
        """Create a namespace that contains only its first process."""
        pid, pidfd, orders, control_fd = _clone_with_pipe(syscalls.CLONE_NEWPID)
        if pid == 0:
            _be_first_process(orders)
        return cls(pid, pidfd, os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC), control_fd)

    def is_empty(self) -> bool:
        """Return True if only the first process remains. Orphans of a dead program are its children."""
        try:
            children_fd = os.open(f"/proc/{self.pid}/task/{self.pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the process is dead, or the kernel lacks this file
            return False
        try:
            return not os.read(children_fd, 1)
        except OSError:
            return False
        finally:
            os.close(children_fd)

    def kill(self) -> None:
        """Kill all processes in the namespace. The first one ends last."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the namespace, after its first process has ended."""
        os.waitpid(self.pid, 0)
        for fd in (self.pidfd, self.namespace_fd, self.control_fd):
            os.close(fd)


@dataclass
class ZygoteJob:
    """A running program."""

    number: int
    pid: int
    pidfd: int
    namespace: PidNamespace | None
    control_fd: int
    """Pipe to the supervisor, or to the first process of the namespace, for STOP and CONTINUE."""
    had_order: bool = False
    """Whether an order was sent, which may arrive after the end of the program."""

    def kill(self) -> None:
        """Kill the program and all its processes. Without namespaces, its supervisor does this."""
        if self.namespace:
            self.namespace.kill()
        else:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)


class Zygote:
    """Event loop of the zygote process.

    Args:
        server: Socket to the server.
        plan: How programs are isolated.
    """

    def __init__(self, server: socket.socket, plan: JailPlan) -> None:
        self.server = server
        self.plan = plan
        self.child_setup = ChildSetup(jail.ProgramJail(plan, jail.MemoryUse.current()))
        self.jobs: dict[int, ZygoteJob] = {}
        """Running jobs by pidfd."""
        self.spare_namespaces: list[PidNamespace] = []
        self.dying_namespaces: dict[int, tuple[PidNamespace, bytes]] = {}
        """Namespaces that are being destroyed, by pidfd, each with the event to send afterwards."""
        self.events_after_orphans: list[bytes] = []
        """Without namespaces: events to send when no process of an ended job is left."""
        self.own_namespace_fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.poll = select.poll()  # not epoll, whose watches are limited per user
        self.poll.register(server, select.POLLIN)

    def serve(self, preloaded: list[str]) -> None:
        """Run jobs until the server closes the socket."""
        with contextlib.suppress(ConnectionError):
            self.server.send(EVENT.pack(READY, 0) + json.dumps(preloaded).encode())
            while True:
                for fd, _ in self.poll.poll(ORPHAN_CHECK_INTERVAL_MS if self.events_after_orphans else None):
                    if fd in self.jobs:
                        self._finish(self.jobs.pop(fd))
                    elif fd in self.dying_namespaces:
                        self._finish_namespace(*self.dying_namespaces.pop(fd))
                    elif not self._handle_request():
                        return
                self._kill_orphans()

    def _handle_request(self) -> bool:
        # Not socket.recv_fds, nor send_fds below, which use more objects.
        packet, ancillary, _, _ = self.server.recvmsg(REQUEST.size, _ANCILLARY_BYTES)
        if not packet:
            return False
        descriptors = [fd for _, _, data in ancillary for fd in memoryview(data).cast("i")]
        kind, number, cgroup_count = REQUEST.unpack(packet)
        if kind != RUN:
            for job in self.jobs.values():
                if job.number == number:
                    self._handle_order(job, kind)
            return True
        try:
            self._start(number, descriptors, cgroup_count)
        except OSError as error:
            self.server.send(EVENT.pack(FAILED, number) + str(error).encode())
        finally:
            for fd in descriptors:
                os.close(fd)
        return True

    def _handle_order(self, job: ZygoteJob, order: bytes) -> None:
        job.had_order = True
        if order == KILL:
            job.kill()
        else:
            with contextlib.suppress(BrokenPipeError):  # the receiver is dead
                os.write(job.control_fd, order)

    def _start(self, number: int, descriptors: list[int], cgroup_count: int) -> None:
        namespace, orders = None, -1
        if self.plan["namespaces"]:
            pid, pidfd, namespace = self._clone_into_namespace()
            control_fd = namespace.control_fd
        else:
            pid, pidfd, orders, control_fd = _clone_with_pipe(0)
        if pid == 0:
            self._become_program(descriptors, cgroup_count, orders)
        job = ZygoteJob(number, pid, pidfd, namespace, control_fd)
        try:
            pidfds = struct.pack("ii", pidfd, namespace.pidfd) if namespace else struct.pack("i", pidfd)
            self.server.sendmsg((EVENT.pack(STARTED, number),), ((_SOL_SOCKET, _SCM_RIGHTS, pidfds),))
        except OSError as error:  # the server could not end this program
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._release(job, EVENT.pack(FAILED, number) + str(error).encode())
            return
        self.poll.register(pidfd, select.POLLIN)
        self.jobs[pidfd] = job

    def _clone_into_namespace(self) -> tuple[int, int, PidNamespace]:
        """Clone this process into a pid namespace without other programs, and into new namespaces of other kinds."""
        while True:
            is_new = not self.spare_namespaces
            namespace = PidNamespace.create() if is_new else self.spare_namespaces.pop()
            try:
                syscalls.setns(namespace.namespace_fd, syscalls.CLONE_NEWPID)
                pid, pidfd = syscalls.clone(jail.PROGRAM_NAMESPACES)
                if pid:
                    syscalls.setns(self.own_namespace_fd, syscalls.CLONE_NEWPID)
                return pid, pidfd, namespace
            except OSError:
                syscalls.setns(self.own_namespace_fd, syscalls.CLONE_NEWPID)
                self._destroy(namespace, b"")
                if is_new:
                    raise
                # The first process of the spare namespace was killed, so the namespace is unusable. Try another one.

    def _finish(self, job: ZygoteJob) -> None:
        """Handle the end of a job. Its exit event is sent when all its processes have ended."""
        self.poll.unregister(job.pidfd)
        _, status, usage = os.wait4(job.pid, 0)
        event = EXIT_EVENT.pack(EXITED, job.number, status, usage.ru_utime + usage.ru_stime)
        # A program that was killed may have been killed together with the first process of its namespace.
        is_reusable = not job.had_order and status != signal.SIGKILL
        has_room = len(self.spare_namespaces) < MAX_SPARE_NAMESPACES
        if job.namespace and is_reusable and has_room and job.namespace.is_empty():
            os.close(job.pidfd)
            self.spare_namespaces.append(job.namespace)
            self.server.send(event)
        else:
            self._release(job, event)

    def _release(self, job: ZygoteJob, event: bytes) -> None:
        """End the remaining processes of a job, then send `event`."""
        os.close(job.pidfd)
        if job.namespace:
            self._destroy(job.namespace, event)
        else:
            os.close(job.control_fd)
            self.events_after_orphans.append(event)

    def _destroy(self, namespace: PidNamespace, event: bytes) -> None:
        """Kill all processes of a namespace, then send `event`. This can take seconds, so it is not awaited here."""
        namespace.kill()
        self.poll.register(namespace.pidfd, select.POLLIN)
        self.dying_namespaces[namespace.pidfd] = namespace, event

    def _finish_namespace(self, namespace: PidNamespace, event: bytes) -> None:
        self.poll.unregister(namespace.pidfd)
        namespace.close()
        if event:
            self.server.send(event)

    def _kill_orphans(self) -> None:
        """Without namespaces, kill the processes of a dead supervisor, which are our children, then send its event."""
        if not self.events_after_orphans:
            return
        running = {job.pid for job in self.jobs.values()}
        orphans = [pid for pid in child_pids() if pid not in running]
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        if not orphans:
            for event in self.events_after_orphans:
                self.server.send(event)
            self.events_after_orphans.clear()

    def _become_program(self, descriptors: list[int], cgroup_count: int, orders: int) -> NoReturn:
        """Run the program in the clone. Never returns to the event loop."""
        try:
            orders = _arrange_descriptors(descriptors, cgroup_count, orders)
            size = os.lseek(SPEC_FD, 0, os.SEEK_END)
            spec: JobSpec = marshal.loads(os.pread(SPEC_FD, size, 0))  # noqa: S302 (the server's)
            self.child_setup.become_program(spec, orders)
        except BaseException as error:  # the program has not started: an error of the server or of the request
            os.write(REPORT_FD, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            os._exit(255)


def _clone_with_pipe(flags: int) -> tuple[int, int, int, int]:
    """Clone this process.

    Returns:
        pid and pidfd, or (0, -1) in the child; the read end of a pipe for the child, and its write end for the parent.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        pid, pidfd = syscalls.clone(flags)
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    os.close(read_end if pid else write_end)
    return pid, pidfd, read_end, write_end


def _arrange_descriptors(descriptors: list[int], cgroup_count: int, orders: int) -> int:
    """Enter the cgroups, move the other descriptors to 0, 1, 2, … and close the rest.

    Returns:
        The new descriptor of `orders`, the pipe to a supervisor, which is the last one. -1 if there is none.
    """
    count = len(descriptors) - cgroup_count
    for fd in descriptors[count:]:
        os.write(fd, b"0")
    kept = descriptors[:count] + ([orders] if orders >= 0 else [])
    # Duplicated above 64 first, so that no descriptor is overwritten before it is moved.
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in kept]):
        os.dup2(fd, number, inheritable=number < SPEC_FD)
    syscalls.close_from(len(kept))
    return count if orders >= 0 else -1


def _be_first_process(orders: int) -> NoReturn:
    """Be the first process of a pid namespace: stop and continue all others on request."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 ignores signals that have the default action
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    os.dup2(orders, 0)
    syscalls.close_from(1)
    while order := os.read(0, 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP if order == STOP else signal.SIGCONT)
    os._exit(0)


def preload(names: list[str]) -> list[str]:
    """Import modules, skipping those that are not installed.

    Args:
        names: Names of modules. For `module:function`, the function is called too.

    Returns:
        The names that were imported.
    """
    found = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            imported = importlib.import_module(module)
        except ImportError:
            continue
        if function:
            getattr(imported, function)()
        found.append(name)
    return found


def main() -> None:
    """Run a zygote. Standard input is the socket to the server; the first argument is its configuration as JSON."""
    server = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, SPEC_FD))
    for standard_fd, pipe_end in enumerate(os.pipe()):
        os.dup2(pipe_end, standard_fd)
        os.close(pipe_end)
    script_runner.open_streams()
    script_runner.handle_interrupts()
    config = json.loads(sys.argv[1])
    plan: JailPlan = config["plan"]
    try:
        jail.reset_process_attributes()
        jail.isolate_zygote(plan)
        os.environ.clear()
        os.environ.update(jail.environment(plan, WORK))
        preloaded = preload(config["preload"])
        script_runner.install_main_module(f"{WORK}/main.py")
        gc.collect()
        gc.freeze()  # garbage collections of programs skip these objects, so their pages stay shared
        zygote = Zygote(server, plan)
    except BaseException as error:  # any error is reported to the server as the reason of the failed start
        server.send(EVENT.pack(FAILED, 0) + f"{type(error).__name__}: {error}".encode())
        raise SystemExit(1) from error
    zygote.serve(preloaded)
    os._exit(0)
