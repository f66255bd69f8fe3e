"""A warm interpreter: it has the libraries imported, and is cloned for each program.

It talks to the front over one socket, in packets: a job with its descriptors, and that one is to end, comes in; that it
was started, and how it ended, goes out. It reads nothing that a program or a request could have written: the job's
content is opened by the clone. One thread, one loop. When the front goes, the socket ends and so does this.

A program runs in a pid namespace together with its children, and an idle process that was there first as pid 1. Such a
namespace is used for another program only if nothing of the last one is left in it; else it is destroyed, which ends
whatever was left. So a program costs one fork, and not a second one for its pid 1. Only this process ends a namespace:
the front, which hears later than this that a program has ended, would end the next one in it.

Only the standard library is imported, besides what is to be preloaded.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import NoReturn

from toolroll.sandbox.server import jail, kernel, program
from toolroll.sandbox.server.clone import REPORT_FD, SPEC_FD, Clone
from toolroll.sandbox.server.spec import WORK, Plan, Spec

ORDER = struct.Struct("=cQB")
"""To this process: to run or to end a job, its number, and how many of its descriptors, the last ones, are cgroups to
enter."""
RUN, END = b"J", b"K"
JOB = struct.Struct("=cQ")
ENDED = struct.Struct("=cQid")
READY, STARTED, FINISHED, NOT_STARTED = b"R", b"S", b"E", b"F"
MOST_DESCRIPTORS = 16
MOST_SPARE = 64
"""How many empty pid namespaces are kept for later."""


@dataclass
class PidNamespace:
    """A pid namespace and its first process, which does nothing but be there."""

    pid: int
    pidfd: int
    handle: int

    @classmethod
    def make(cls) -> PidNamespace:
        """A new one, empty but for its first process."""
        pid, pidfd = kernel.clone(kernel.CLONE_NEWPID)
        if pid == 0:
            _rest()
        return cls(pid, pidfd, os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))

    def is_empty(self) -> bool:
        """Whether nothing else is left in it. What a dead program leaves becomes a child of the first process."""
        try:
            children = os.open(f"/proc/{self.pid}/task/{self.pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it is dead, or the kernel doesn't tell
            return False
        try:
            return not os.read(children, 1)
        finally:
            os.close(children)

    def destroy(self) -> None:
        """End everything in it."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self.handle)


@dataclass
class Job:
    """A program that runs."""

    number: int
    pid: int
    pidfd: int
    space: PidNamespace | None
    is_to_end: bool = False

    def end(self) -> None:
        """End it with all that it has started. Without namespaces it is the supervisor that does so."""
        self.is_to_end = True
        if self.space:
            signal.pidfd_send_signal(self.space.pidfd, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)


class WarmInterpreter:
    """The loop of this process."""

    def __init__(self, front: socket.socket, plan: Plan) -> None:
        self.front = front
        self.plan = plan
        self.jobs: dict[int, Job] = {}
        """By their pidfds."""
        self.spare: list[PidNamespace] = []
        self.own_space = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        size, _, _, _, _, data, _ = Path("/proc/self/statm").read_text().split()
        self.own_memory = jail.OwnMemory(*(int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in (size, data)))
        self.poll = select.epoll()
        self.poll.register(front, select.EPOLLIN)

    def serve(self, preloaded: list[str]) -> None:
        """Until the front goes."""
        try:
            self.front.send(JOB.pack(READY, 0) + json.dumps(preloaded).encode())
            while True:
                for fd, _ in self.poll.poll():
                    if fd in self.jobs:
                        self._finish(self.jobs.pop(fd))
                    elif not self._receive():
                        return
        except ConnectionError:
            return

    def _receive(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self.front, ORDER.size, MOST_DESCRIPTORS)
        if not packet:
            return False
        order, number, cgroups = ORDER.unpack(packet)
        if order == END:
            for job in self.jobs.values():
                if job.number == number:  # else it has ended meanwhile
                    job.end()
            return True
        try:
            self._start(number, descriptors, cgroups)
        except OSError as error:
            self.front.send(JOB.pack(NOT_STARTED, number) + str(error).encode())
        finally:
            for fd in descriptors:
                os.close(fd)
        return True

    def _start(self, number: int, descriptors: list[int], cgroups: int) -> None:
        if self.plan["namespaces"]:
            pid, pidfd, space = self._clone_into_space()
        else:
            (pid, pidfd), space = kernel.clone(0), None
        if pid == 0:
            self._become_program(descriptors, cgroups)
        try:
            self.poll.register(pidfd, select.EPOLLIN)
            socket.send_fds(self.front, [JOB.pack(STARTED, number)], [pidfd])
        except OSError:  # nobody would know of it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)
            if space:
                space.destroy()
            raise
        self.jobs[pidfd] = Job(number, pid, pidfd, space)

    def _clone_into_space(self) -> tuple[int, int, PidNamespace]:
        """A clone in a pid namespace without other programs, and in new ones of every other kind."""
        while True:
            fresh = not self.spare
            space = PidNamespace.make() if fresh else self.spare.pop()
            try:
                kernel.setns(space.handle, kernel.CLONE_NEWPID)
                pid, pidfd = kernel.clone(jail.PER_PROGRAM)
                if pid:
                    kernel.setns(self.own_space, kernel.CLONE_NEWPID)
                return pid, pidfd, space
            except OSError:
                kernel.setns(self.own_space, kernel.CLONE_NEWPID)
                space.destroy()
                if fresh:
                    raise
                # Its first process is gone, whoever ended it: it can't be used again.

    def _finish(self, job: Job) -> None:
        self.poll.unregister(job.pidfd)
        _, status, usage = os.wait4(job.pid, 0)
        os.close(job.pidfd)
        # Said only when nothing of the program is left. Who was killed was so with all its namespace, perhaps.
        killed = job.is_to_end or status == signal.SIGKILL
        if job.space is None:
            self._reap_strays()
        elif not killed and len(self.spare) < MOST_SPARE and job.space.is_empty():
            self.spare.append(job.space)
        else:
            job.space.destroy()
        self.front.send(ENDED.pack(FINISHED, job.number, status, usage.ru_utime + usage.ru_stime))

    def _reap_strays(self) -> None:
        """Without pid namespaces, what a killed supervisor leaves becomes our child. It is ended here."""
        known = {job.pid for job in self.jobs.values()}
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for _ in range(100):
            strays = [pid for pid in map(int, children.read_text().split()) if pid not in known]
            if not strays:
                return
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _become_program(self, descriptors: list[int], cgroups: int) -> NoReturn:
        """In the clone: take the program's place. Nothing returns from here into the loop."""
        try:
            _arrange(descriptors, cgroups)
            spec: Spec = marshal.loads(_read_all(SPEC_FD))  # noqa: S302 (the front wrote it)
            Clone(self.plan, spec, self.own_memory).become_program()
        except BaseException as error:  # not the program's fault: it hasn't begun
            os.write(REPORT_FD, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            os._exit(255)


def _arrange(descriptors: list[int], cgroups: int) -> None:
    """Enter the cgroups, put the descriptors where they belong, close all others."""
    own = len(descriptors) - cgroups
    for fd in descriptors[own:]:
        os.write(fd, b"0")
    # First away from the numbers that they shall have.
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in descriptors[:own]]):
        os.dup2(fd, number, inheritable=number < SPEC_FD)
    kernel.close_from(own)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _rest() -> NoReturn:
    """Be the first process of a pid namespace: there, and nothing else."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a first process is deaf to what it has no handler for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
    kernel.close_from(0)
    while True:
        signal.pause()


def preload(names: list[str]) -> list[str]:
    """Import what there is of these modules; of `module:function`, call the function. The names that there were."""
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
    """Be a warm interpreter. The first argument is JSON: the plan, and what to preload; standard input is the front."""
    front = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, SPEC_FD))
    reading, writing = os.pipe()
    for standard, end in ((0, reading), (1, writing)):
        os.dup2(end, standard)
        os.close(end)
    program.open_streams()
    orders = json.loads(sys.argv[1])
    plan: Plan = orders["plan"]
    try:
        jail.move_in(plan)
        os.environ.clear()
        os.environ.update(jail.environment(plan, WORK))
        found = preload(orders["preload"])
        gc.collect()
        gc.freeze()  # what is here now is never looked at again by a program's collections, so its pages stay shared
        interpreter = WarmInterpreter(front, plan)
    except BaseException as error:  # whatever it is, the front has to know why there is no interpreter
        front.send(JOB.pack(NOT_STARTED, 0) + f"{type(error).__name__}: {error}".encode())
        raise SystemExit(1) from error
    interpreter.serve(found)
    os._exit(0)
