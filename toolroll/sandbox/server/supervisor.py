"""Runs the commands of a program one after the other inside the jail, and hands out its files afterwards.

It is itself locked into the jail, so that a path to write or to fetch leads nowhere that the program couldn't have gone
by itself: links, `..` and absolute paths need no checking. It reports over a pipe: a line of JSON for each command as
it ends, then the fetched files, in pieces of a line each with so many bytes after it. Nothing of that is the
program's to write. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from toolroll.sandbox.server import jail, kernel, landlock
from toolroll.sandbox.server.spec import Plan, Spec

_PIECE = 1 << 18


class Supervisor:
    """Carries a program through its commands."""

    def __init__(self, plan: Plan, spec: Spec, report: int) -> None:
        self.plan = plan
        self.spec = spec
        self.report = report
        self.child = 0
        self.is_to_end = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def run(self, commands: Sequence[Callable[[], NoReturn]]) -> NoReturn:
        """Run each in a process of its own until one fails, send the files, end.

        A command is a function that doesn't return: it runs a program in its process, or becomes another.
        """
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nothing that runs as the same user may look in
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        if not self.plan["namespaces"]:
            # Where no pid namespace ends with the warm interpreter, this ends what is under it. Again, since changing
            # the user had cleared it.
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        for command in commands:
            if self.is_to_end or self._run(command) != 0:
                break
        self._kill_all()
        self._reap()
        if (user := self.spec.get("user")) is not None:
            jail.become(user)  # nothing is fetched that the program itself couldn't read
        self._send_files()
        os._exit(0)

    def _run(self, command: Callable[[], NoReturn]) -> int:
        began = time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            command()
        if self.is_to_end:  # since before there was a child
            os.kill(self.child, signal.SIGKILL)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == self.child:
                break
        self.child = 0
        self._send({"status": status, "seconds": time.monotonic() - began, "cpu": usage.ru_utime + usage.ru_stime})
        return status

    def _pass_on(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self.is_to_end = True
            if self.child:  # it may not be the program's user yet
                with contextlib.suppress(OSError):
                    os.kill(self.child, signal.SIGKILL)
            self._kill_all()
        elif self.child:
            with contextlib.suppress(OSError):
                os.killpg(self.child, number)

    def _kill_all(self) -> None:
        """End whatever the program has left, in one call that no fork can get ahead of.

        The call ends all that the caller may signal: its pid namespace, or its user, or what its Landlock domain holds.
        """
        if (user := self.spec.get("user")) is not None:
            if (killer := os.fork()) == 0:
                jail.become(user)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(killer, 0)
        elif self.plan["namespaces"] or self.plan["landlock"] >= landlock.SIGNALS_FROM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            self._kill_children()

    def _kill_children(self) -> None:
        """The same where nothing is isolated: one by one. What is orphaned comes to us, and has its turn."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for _ in range(1000):
            if not (alive := children.read_text().split()):
                return
            for pid in map(int, alive):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _send_files(self) -> None:
        left = self.spec["fetch_limit"]
        for path in self.spec["fetch"]:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except (OSError, ValueError):
                continue
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode) and about.st_size > left:
                self._send({"too_large": path})
            elif stat.S_ISREG(about.st_mode):
                left -= self._send_file(path, fd, about.st_size)
            os.close(fd)

    def _send_file(self, path: str, fd: int, size: int) -> int:
        """Piece by piece: a copy would count against the program's memory. The bytes sent."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < size and (piece := os.read(fd, min(_PIECE, size - sent))):
                self._send({"file": path, "bytes": len(piece)}, piece)
                sent += len(piece)
        self._send({"file": path, "bytes": 0})
        return sent

    def _send(self, message: dict[str, Any], raw: bytes = b"") -> None:
        data = json.dumps(message).encode() + b"\n" + raw
        while data:
            data = data[os.write(self.report, data) :]
