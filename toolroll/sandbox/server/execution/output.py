"""Reader for the output of a program, which keeps a limited number of bytes and discards the rest.

A program never blocks because the limit is reached, and cannot keep the server busy by writing a lot: many small writes
are read in batches every few milliseconds, and discarded data is not copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable
from functools import cache

_EAGER_READS = 32
"""Number of reads after which the reader switches from events to polling."""
_POLL_INTERVAL_S = 0.004
_LARGE_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


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
        self._reads = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._devnull = _devnull()
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
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)

    def resume(self) -> None:
        """Read data as it arrives."""
        self._reads = 0
        if self._read_fd >= 0:
            self._loop.add_reader(self._read_fd, self._on_readable)

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
        self._reads += 1
        if self._read_chunk() and self._reads == _EAGER_READS:
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _LARGE_PIPE_BYTES)
            self._loop.remove_reader(self._read_fd)
            self._timer = self._loop.call_later(_POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        if self._drain(_LARGE_PIPE_BYTES) and self._read_fd >= 0:
            self._timer = self._loop.call_later(_POLL_INTERVAL_S, self._poll)
        else:
            self.resume()

    def _drain(self, max_bytes: int) -> bool:
        """Read until the pipe is empty. Return True if there was data."""
        chunks = 0
        while chunks < max_bytes // _CHUNK_BYTES and self._read_chunk():
            chunks += 1
        return chunks > 0

    def _read_chunk(self) -> bool:
        """Read one chunk. Return True if there was one."""
        if self._read_fd < 0:
            return False
        try:
            if len(self._kept) < self.limit_bytes:
                chunk = os.read(self._read_fd, min(_CHUNK_BYTES, self.limit_bytes - len(self._kept)))
                self._kept += chunk
                if self._on_data:
                    self._on_data(chunk)
                size = len(chunk)
            else:
                size = self._discard()
                self.truncated = self.truncated or size > 0
        except BlockingIOError:
            return False
        if size == 0:
            self._stop()
        return size > 0

    def _discard(self) -> int:
        """Discard data. Return the number of bytes."""
        if sys.platform == "linux":
            return os.splice(self._read_fd, self._devnull, _LARGE_PIPE_BYTES)
        return len(os.read(self._read_fd, _CHUNK_BYTES))

    def _stop(self) -> None:
        self.pause()
        os.close(self._read_fd)
        self._read_fd = -1


@cache
def _devnull() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
