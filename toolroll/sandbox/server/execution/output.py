"""Reader for the output of a program, which keeps a limited number of bytes and discards the rest.

A program never blocks because the limit is reached, and cannot keep the server busy by writing a lot: the pipes of all
programs are read together every few milliseconds, and discarded data is not copied. Most programs end earlier and write
less than a pipe holds. Their output is read once, when they have ended, and costs no wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import sys
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

_POLL_INTERVAL_S = 0.005
_LARGE_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
"""Maximum size of one read, which is also the initial size of a pipe."""


class OutputReader:
    """A pipe whose read end is read by the event loop.

    Args:
        limit_bytes: Number of bytes to keep.
        on_data: Callback for each chunk that is kept.
        watch: Whether to read data as it arrives. If False, it is read only by `take()` and `close()`, which suits
            output that fits into the buffer of the pipe.
    """

    def __init__(self, limit_bytes: int, on_data: Callable[[bytes], None] | None = None, *, watch: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.truncated = False
        self._on_data = on_data
        self._kept = bytearray()
        self._is_large = False
        self._devnull = _devnull()
        self._poller = _poller_of_this_loop()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        if watch:
            self.resume()

    def close_write_end(self) -> None:
        """Close the server's copy of the write end, after the program has received its own."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> bytes:
        """Read the data that is in the pipe, close both ends and return the kept bytes."""
        self.close_write_end()
        self._drain(2 * _LARGE_PIPE_BYTES)  # bounded, because another process may still be writing
        if self._read_fd >= 0:
            self._stop()
        return bytes(self._kept)

    def pause(self) -> None:
        """Stop reading until `resume()`. A program that writes more than the pipe can hold blocks."""
        self._poller.remove(self._read_fd)

    def resume(self) -> None:
        """Read data as it arrives."""
        if self._read_fd >= 0:
            self._poller.add(self._read_fd, self._on_readable)

    def take(self) -> tuple[bytes, bool]:
        """Read the data that is in the pipe and reset the limit.

        Returns:
            The bytes kept since the last call, and whether others were discarded.
        """
        self._drain(2 * _LARGE_PIPE_BYTES)
        taken = bytes(self._kept), self.truncated
        self._kept, self.truncated = bytearray(), False
        return taken

    def _on_readable(self) -> None:
        if self._drain(_LARGE_PIPE_BYTES) >= _CHUNK_BYTES and not self._is_large:
            self._is_large = True
            if sys.platform == "linux" and self._read_fd >= 0:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _LARGE_PIPE_BYTES)

    def _drain(self, max_bytes: int) -> int:
        """Read until the pipe is empty, or until `max_bytes` are read. Return the number of bytes."""
        total = 0
        while total < max_bytes and self._read_fd >= 0:
            wanted = min(_CHUNK_BYTES, self.limit_bytes - len(self._kept))
            try:
                size = self._read(wanted) if wanted else self._discard()
            except BlockingIOError:
                break
            if size == 0:
                self._stop()
            total += size
            if size < wanted:  # the pipe is empty
                break
        return total

    def _read(self, max_bytes: int) -> int:
        """Keep the next data. Return the number of bytes."""
        chunk = os.read(self._read_fd, max_bytes)
        self._kept += chunk
        if chunk and self._on_data:
            self._on_data(chunk)
        return len(chunk)

    def _discard(self) -> int:
        """Discard the next data. Return the number of bytes."""
        if sys.platform == "linux":
            size = os.splice(self._read_fd, self._devnull, _LARGE_PIPE_BYTES)
        else:
            size = len(os.read(self._read_fd, _CHUNK_BYTES))
        self.truncated = self.truncated or size > 0
        return size

    def _stop(self) -> None:
        self.pause()
        os.close(self._read_fd)
        self._read_fd = -1


class _Poller:
    """Calls functions for readable descriptors at a fixed interval. No timer runs while there are no descriptors.

    Unlike a watch of the event loop, which takes several system calls, a descriptor is added and removed by none.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._callbacks[fd] = on_readable
        self._poll.register(fd, select.POLLIN)
        if self._timer is None:
            self._start_timer()

    def remove(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._poll.unregister(fd)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL_S, self._call_readable)

    def _call_readable(self) -> None:
        self._timer = None
        try:
            for fd, _ in self._poll.poll(0):
                self._callbacks[fd]()
        finally:
            if self._callbacks and self._timer is None:
                self._start_timer()


_pollers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller] = WeakKeyDictionary()


def _poller_of_this_loop() -> _Poller:
    loop = asyncio.get_running_loop()
    if (poller := _pollers.get(loop)) is None:
        poller = _pollers[loop] = _Poller()
    return poller


@cache
def _devnull() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
