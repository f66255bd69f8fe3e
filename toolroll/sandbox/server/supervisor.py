"""Runs the commands of a program one after the other inside the jail, and hands out its files afterwards.

It is itself locked into the jail, so that a path to write or to fetch leads nowhere that the program couldn't have gone
by itself: links, `..` and absolute paths need no checking. It reports over a pipe: a line of JSON for each command as
it ends, then the fetched files. The front takes nothing of that on trust but the exit status, which the program decides
anyway. Only the standard library is imported.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from toolroll.sandbox.server import jail, kernel
from toolroll.sandbox.server.spec import Spec


class Supervisor:
    """Carries a program through its commands."""

    def __init__(self, spec: Spec, report: int) -> None:
        self.spec = spec
        self.report = report
        self.child = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def run(self, commands: Sequence[Callable[[], NoReturn]]) -> NoReturn:
        """Run each in a process of its own until one fails, send the files, end.

        A command is a function that doesn't return: it runs a program in its process, or becomes another.
        """
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nothing that runs as the same user may look in
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        for command in commands:
            if self._run(command) != 0:
                break
        self._kill_all()
        if (user := self.spec.get("user")) is not None:
            jail.become(user)  # nothing is fetched that the program itself couldn't read
        self._send_files()
        os._exit(0)

    def _run(self, command: Callable[[], NoReturn]) -> int:
        began = time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.close(self.report)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            command()
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == self.child:
                break
        self.child = 0
        self._send({"status": status, "seconds": time.monotonic() - began, "cpu": usage.ru_utime + usage.ru_stime})
        return status

    def _pass_on(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self._kill_all()
        elif self.child:
            with contextlib.suppress(OSError):
                os.killpg(self.child, number)

    def _kill_all(self) -> None:
        """End whatever the program has left. What is orphaned comes to us, so this finds all of it in the end."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for _ in range(10_000):
            alive = children.read_text().split() if children.exists() else []
            if not alive:
                return
            for pid in map(int, alive):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.001)

    def _send_files(self) -> None:
        left, found, too_large = self.spec["fetch_limit"], {}, []
        for path in self.spec["fetch"]:
            content = _read(path, left + 1)
            if content is not None and len(content) > left:
                too_large.append(path)
            elif content is not None:
                left -= len(content)
                found[path] = base64.b64encode(content).decode()
        self._send({"files": found, "too_large": too_large})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.report, data) :]


def _read(path: str, most: int) -> bytes | None:
    """The first bytes of a regular file, if it is one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        try:
            return file.read(most)
        except (OSError, MemoryError):
            return None
