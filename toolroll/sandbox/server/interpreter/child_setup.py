"""Turn a freshly cloned child of the zygote into the program.

The child enters the jail, writes the files of the request and then runs the program. A Python script runs in this very
process. Three kinds of jobs run under a supervisor, which this process becomes: commands of other languages, programs
whose files are fetched, and all programs without namespaces.

Invariant: every failure before the program starts is an error of the server or of the request, and once the program
runs, it has none of the server's descriptors. Imports only the standard library.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
from functools import partial
from typing import NoReturn

from toolroll.sandbox.server.interpreter import notebook_kernel, script_runner
from toolroll.sandbox.server.interpreter.supervisor import Supervisor
from toolroll.sandbox.server.isolation import jail, syscalls
from toolroll.sandbox.server.job_spec import CommandStage, JobSpec, is_supervised, separate_user

SPEC_FD, REPORT_FD, EXTRA_FD = 3, 4, 5
"""Descriptors of a child besides 0 to 2: the job's spec; the pipe for reports; the stdout of a compiler (its stderr
follows) or the socket of a notebook kernel. The program itself gets only 0 to 2."""

_MACHINE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of writing a file that are not caused by the request."""


class InvalidFile(Exception):
    """Raised when a file of the request cannot be written. This is an error of the request, not of the server."""


class ChildSetup:
    """Set-up of one program. Created by the zygote, and used once, in a child of the zygote.

    Args:
        program_jail: The jail of programs.
    """

    spec: JobSpec
    orders_fd: int
    directory: str

    def __init__(self, program_jail: jail.ProgramJail) -> None:
        self.jail = program_jail
        self.plan = program_jail.plan

    def become_program(self, spec: JobSpec, orders_fd: int) -> NoReturn:
        """Enter the jail and run the program. An exception means that the program has not started.

        Args:
            spec: The job.
            orders_fd: Descriptor of the zygote's orders to a supervisor, or -1.
        """
        self.spec, self.orders_fd = spec, orders_fd
        os.setsid()  # with autogroup scheduling, CPU time is shared between sessions, not between processes
        self.directory = self.jail.enter(self.spec)
        user = separate_user(self.plan, self.spec)
        # A supervisor that runs as another user must be able to become the program's user and to kill its processes.
        keep = (syscalls.CAP_KILL, syscalls.CAP_SETUID, syscalls.CAP_SETGID) if user is not None else ()
        self.jail.drop_privileges(self.directory, keep=keep)
        if user is not None:
            os.seteuid(user)
        self._write_files()
        if user is not None:
            os.seteuid(0)
        if is_supervised(self.plan, self.spec):
            stages = self.spec["stages"]  # empty for Python
            commands = [partial(self._execute, stage, last=stage is stages[-1]) for stage in stages]
            Supervisor(self.plan, self.spec, REPORT_FD, self.orders_fd).run(commands or [self._run_python])
        self._run_python()

    def _run_python(self) -> NoReturn:
        self._isolate_from_supervisor()
        channel = os.dup(EXTRA_FD) if self.spec["kind"] == "cells" else -1
        self.jail.set_rlimits(self.spec, is_python=True)
        if not self.plan["namespaces"]:  # with namespaces, the environment of the zygote is already the right one
            os.environ.update(jail.environment(self.plan, self.directory))
        path = f"{self.directory}/{self.spec['filename']}"
        if channel >= 0:
            os.dup2(channel, SPEC_FD)
            syscalls.close_from(REPORT_FD)
            notebook_kernel.serve(SPEC_FD, path)
        syscalls.close_from(SPEC_FD)
        if is_supervised(self.plan, self.spec):  # the supervisor has changed the handler
            script_runner.handle_interrupts()
        script_runner.run(self.spec["code"], path, show_value=self.spec.get("show_value", False))

    def _execute(self, stage: CommandStage, *, last: bool) -> NoReturn:
        """Execute a compiler or a program. The kernel then closes the descriptors from 3."""
        self._isolate_from_supervisor()
        if not last:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(EXTRA_FD, 1)
            os.dup2(EXTRA_FD + 1, 2)
        self.jail.set_rlimits(self.spec, is_python=False)
        jail.restore_default_signals()
        environment = jail.environment(self.plan, self.directory, self.spec.get("environment", {}))
        try:
            os.execvpe(stage["argv"][0], stage["argv"], environment)  # noqa: S606 (runs the program on purpose)
        except OSError as error:
            os.write(2, f"{stage['argv'][0]}: {error.strerror}\n".encode())
            os._exit(127)

    def _isolate_from_supervisor(self) -> None:
        """Without namespaces, protect the supervisor from the program by another user or a nested Landlock domain."""
        if self.plan["namespaces"]:
            return
        if (user := separate_user(self.plan, self.spec)) is not None:
            syscalls.set_ids(user)
        self.jail.drop_privileges(self.directory)

    def _write_files(self) -> None:
        files = {self.spec["filename"]: self.spec["code"].encode()} if self.spec["filename"] else {}
        for path, content in self.spec["files"].items():
            try:
                files[path] = base64.b64decode(content, validate=True)
            except ValueError as error:
                raise InvalidFile(f"The content of {path!r} is not valid base64: {error}") from error
        executable, program = self.spec.get("executable", ("", b""))
        if executable:
            files[executable] = program
        for path, data in files.items():
            try:
                if "/" in path:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                _write_regular_file(path, data, 0o777 if path == executable else 0o666)
            except (OSError, ValueError, RecursionError) as error:
                if not self.plan["namespaces"] and getattr(error, "errno", 0) in _MACHINE_ERRNOS:
                    raise
                reason = getattr(error, "strerror", None) or error
                raise InvalidFile(f"The file {path[:200]!r} can't be written: {reason}") from error
        self.spec["files"] = {}  # frees memory that would count as the program's
        self.spec.pop("executable", None)


def _write_regular_file(path: str, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        fd = _open_regular_file(path, mode)
    try:
        written = 0
        while written < len(data):
            written += os.write(fd, memoryview(data)[written:])
    finally:
        os.close(fd)


def _open_regular_file(path: str, mode: int) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # for example, one of our descriptors, opened through /proc
        os.close(fd)
        raise ValueError("not a regular file")
    os.ftruncate(fd, 0)
    return fd
