"""A program's process, as the front sees it: begun, signalled, ended, gone.

It implements `interpreter.Run`. `gone` is done when nothing of the program is left, whichever way it ended; until then
what it was given (a cgroup, a directory) must not be given to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable


class Process:
    """The process of one program."""

    def __init__(self, *, begun: Callable[[], None] | None = None) -> None:
        self.status: int | None = None
        """The wait status; None while it runs, and if it was lost."""
        self.cpu = 0.0
        self.seconds = 0.0
        self.failure = ""
        """Why it was never begun, or its end isn't known. Not the program's doing."""
        self._begun = begun
        self._began = 0.0
        self._process = -1
        self._end: Callable[[], None] | None = None
        self._to_be_killed = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_to_end(self) -> bool:
        """Whether it has been told to end."""
        return self._to_be_killed

    def started(self, process: int, end: Callable[[], None]) -> None:
        """It begins."""
        self._process, self._end = process, end
        if self.gone.done():
            end()
            self._close()
            return
        self._began = time.monotonic()  # the loop's own clock may be coarse
        if self._to_be_killed:
            self.kill()
        elif self._begun:
            self._begun()

    def ended(self, status: int, cpu: float) -> None:
        """It has ended."""
        self.status, self.cpu = status, cpu
        self._close()

    def failed(self, reason: str) -> None:
        """It wasn't begun, or was lost."""
        self.failure = reason
        self._close()

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C does."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGINT)

    def kill(self) -> None:
        """End it, and all that it has started."""
        self._to_be_killed = True
        if self._end:
            end, self._end = self._end, None
            end()

    def _close(self) -> None:
        self.seconds = time.monotonic() - self._began if self._began else 0.0
        if self._process >= 0:
            os.close(self._process)
        self._process, self._end = -1, None
        if not self.gone.done():
            self.gone.set_result(None)


def file_of(content: bytes) -> int:
    """A descriptor of a file in memory that can only be read, from its beginning."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    f_add_seals, every_seal = 1033, 0b1111
    fcntl.fcntl(descriptor, f_add_seals, every_seal)
    return descriptor
