"""What a program writes, taken as it comes: the first so many bytes are kept, the rest is thrown away.

The program never waits for a reader that has had enough, and can't keep the server busy by writing much: what comes in
many small pieces is looked at every few milliseconds only, and what is thrown away isn't copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from functools import cache

_EAGER_READS = 32
_PAUSE = 0.004
_LARGE_PIPE = 1 << 20
_CHUNK = 1 << 16


class Output:
    """The reading end of a pipe. `heard` is called with every piece that is kept.

    One that isn't `watched` is only read when it is closed: for what is small, or nothing.
    """

    def __init__(self, most: int, heard: Callable[[bytes], None] | None = None, *, watched: bool = True) -> None:
        self.most = most
        self._heard = heard
        self._watched = watched
        self.truncated = False
        self._kept = bytearray()
        self._reads = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._null = _null()
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        if watched:
            self._loop.add_reader(self._reading, self._read)

    def give_away(self) -> None:
        """Close the writing end here: the program has it now."""
        os.close(self.writing)
        self.writing = -1

    def close(self) -> bytes:
        """Take what is there, and no more. What was kept."""
        if self.writing >= 0:
            self.give_away()
        if self._reading >= 0:
            for _ in range(2 * (_LARGE_PIPE // _CHUNK)):  # a pipe's content; somebody may still be writing
                if self._reading < 0 or not self._take():
                    break
            self._stop()
        return bytes(self._kept)

    def pause(self) -> None:
        """Leave what comes where it is, until `resume`. A writer that goes on has to wait."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)

    def resume(self) -> None:
        """Read again."""
        self._reads = 0
        if self._reading >= 0:
            self._loop.add_reader(self._reading, self._read)

    def so_far(self) -> tuple[bytes, bool]:
        """Take what is there, and begin anew: what was kept since the last time, and whether that is not all."""
        for _ in range(2 * (_LARGE_PIPE // _CHUNK)):
            if self._reading < 0 or not self._take():
                break
        kept, truncated = bytes(self._kept), self.truncated
        self._kept.clear()
        self.truncated = False
        return kept, truncated

    def _read(self) -> None:
        self._reads += 1
        if self._take() and self._reading >= 0 and self._reads == _EAGER_READS:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _LARGE_PIPE)
            self._loop.remove_reader(self._reading)
            self._timer = self._loop.call_later(_PAUSE, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        found = False
        for _ in range(_LARGE_PIPE // _CHUNK):
            if self._reading < 0 or not self._take():
                break
            found = True
        if self._reading < 0:
            return
        if found:
            self._timer = self._loop.call_later(_PAUSE, self._look_again)
        else:  # it has become quiet
            self._reads = 0
            self._loop.add_reader(self._reading, self._read)

    def _take(self) -> bool:
        """Take one piece. Whether there was one."""
        try:
            if len(self._kept) < self.most:
                piece = os.read(self._reading, min(_CHUNK, self.most - len(self._kept)))
                self._kept += piece
                if self._heard:
                    self._heard(piece)
                size = len(piece)
            else:
                size = os.splice(self._reading, self._null, _LARGE_PIPE)
                self.truncated = self.truncated or size > 0
        except BlockingIOError:
            return False
        if size == 0:
            self._stop()
        return size > 0

    def _stop(self) -> None:
        if self._reading < 0:
            return
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._watched:
            self._loop.remove_reader(self._reading)
        os.close(self._reading)
        self._reading = -1


@cache
def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
