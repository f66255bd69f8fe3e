"""From a clone of a warm interpreter to the program: into the jail, the files written, then be it.

A Python script is run by this very process. Commands of other languages, a program whose files are to be fetched, and
every program that has no namespaces to end with it, run under a supervisor, which this process then becomes. Until the
program begins, whatever fails is the server's fault; from then on nothing of ours is in its reach. Only the standard
library is imported.
"""

from __future__ import annotations

import base64
import errno
import os
import signal
import stat
from functools import partial
from typing import NoReturn

from toolroll.sandbox.server import cells, jail, kernel, program
from toolroll.sandbox.server.spec import Plan, Spec, Stage, is_supervised
from toolroll.sandbox.server.supervisor import Supervisor

SPEC_FD, REPORT_FD, MORE_FD = 3, 4, 5
"""The descriptors of a clone: 0 to 2 as always; its spec; where the supervisor reports; for a compiler its output and
errors, or for cells the socket that they come from. A program itself has 0 to 2 only."""


_FAULTS_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class BadFile(Exception):
    """A file of the request can't be written where it says. The request's fault, not ours."""


class Clone:
    """This process, on its way."""

    def __init__(self, plan: Plan, spec: Spec, own_memory: jail.OwnMemory) -> None:
        self.plan = plan
        self.spec = spec
        self.own_memory = own_memory
        self.directory = ""

    def become_program(self) -> NoReturn:
        """Doesn't return. An exception out of here means that the program hasn't begun."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # where the kernel shares time out by session, a program with many processes has one share too
        self.directory = jail.enter(self.plan, self.spec)
        user = self.spec.get("user")
        # A supervisor that isn't the program's user must be able to become it, and to end what it left.
        keep = (kernel.CAP_KILL, kernel.CAP_SETUID, kernel.CAP_SETGID) if user is not None else ()
        jail.lock(self.plan, self.directory, keep=keep)
        if user is not None:
            os.seteuid(user)
        self._write_files()
        if user is not None:
            os.seteuid(0)
        if is_supervised(self.plan, self.spec):
            Supervisor(self.plan, self.spec, REPORT_FD).run(self._commands())
        self._program()

    def _commands(self) -> list[partial[NoReturn]]:
        if self.spec["kind"] != "commands":
            return [partial(self._program)]
        return [partial(self._command, stage, last=stage is self.spec["stages"][-1]) for stage in self.spec["stages"]]

    def _program(self) -> NoReturn:
        """Be the Python program, or the interpreter of cells."""
        self._lock_again()
        channel = os.dup(MORE_FD) if self.spec["kind"] == "cells" else -1
        jail.limit(
            self.plan["limits"],
            self.spec["memory"],
            own=self.own_memory,
            hard_memory=self.spec["memory_by_rlimit"],
        )
        if not self.plan["namespaces"]:  # else it is the warm interpreter's own already
            os.environ.update(jail.environment(self.plan, self.directory))
        path = f"{self.directory}/{self.spec['filename']}"
        if channel >= 0:
            os.dup2(channel, SPEC_FD)
            kernel.close_from(REPORT_FD)
            cells.serve(SPEC_FD, path)
        kernel.close_from(SPEC_FD)
        program.run(self.spec["code"], path, show_value=self.spec.get("show_value", False))

    def _command(self, stage: Stage, *, last: bool) -> NoReturn:
        """Be a compiler, or what it made. Descriptors from 3 up are closed by the kernel then."""
        self._lock_again()
        if not last:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(MORE_FD, 1)
            os.dup2(MORE_FD + 1, 2)
        # Runtimes that collect garbage reserve far more address space than they use.
        most = self.spec["memory"] if self.spec["memory_by_rlimit"] else -1
        jail.limit(self.plan["limits"], most, hard_memory=False)
        environment = jail.environment(self.plan, self.directory, self.spec.get("environment", {}))
        try:
            os.execvpe(stage["argv"][0], stage["argv"], environment)  # noqa: S606 (what this is for)
        except OSError as error:
            os.write(2, f"{stage['argv'][0]}: {error.strerror}\n".encode())
            os._exit(127)

    def _lock_again(self) -> None:
        """Where no namespace keeps the program from its supervisor, another user or a jail in the jail does."""
        if self.plan["namespaces"]:
            return
        if (user := self.spec.get("user")) is not None:
            jail.become(user)
        jail.lock(self.plan, self.directory)

    def _write_files(self) -> None:
        files = {self.spec["filename"]: self.spec["code"].encode()} if self.spec["filename"] else {}
        for path, content in self.spec["files"].items():
            try:
                files[path] = base64.b64decode(content, validate=True)
            except ValueError as error:
                raise BadFile(f"the content of {path!r} is not base64: {error}") from error
        for path, data in files.items():
            try:
                if os.path.dirname(path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                _write(path, data)
            except (OSError, ValueError, RecursionError) as error:
                if not self.plan["namespaces"] and getattr(error, "errno", 0) in _FAULTS_OF_THE_MACHINE:
                    raise
                reason = getattr(error, "strerror", None) or error
                raise BadFile(f"{path[:200]!r} can't be written: {reason}") from error
        self.spec["files"] = {}  # the program's memory is counted from here


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # our own descriptors, by way of /proc, among others
            raise ValueError("it isn't a regular file")
        file.truncate(0)
        file.write(data)
