"""AppendFile: a file of lines that are only ever appended, whole.

Lines reach the operating system after they are complete, by one write, at the end of the file. A line that a dead
process or a full disk left half is ended before the next one is begun, so that no line is glued to it. A file that was
moved away or deleted while it is open is made anew.

What was written survives the death of the process, not that of the machine: nothing waits for the disk itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

AT_ONCE = 1000
"""Lines in one write: Linux takes 1024."""


class AppendFile:
    """One file. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._is: tuple[int, int] = 0, 0
        self._half = False
        """Whether it ends with a half line."""

    def append(self, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
        """Append lines. How many of them were written, and what kept the others from it."""
        try:
            file = self._open()
        except OSError as error:
            return 0, error
        done, failed = _write(file, [b"\n", *lines] if self._half else lines)
        if failed is None:
            self._half = False
            return len(lines), None
        done -= self._half
        written = 0
        while written < len(lines) and len(lines[written]) <= done:
            done -= len(lines[written])
            written += 1
        self.close()  # what the file is like now is seen when it is opened again
        return written, failed

    def close(self) -> None:
        """Close it. It is opened again when it is needed."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _open(self) -> int:
        if self._file is not None:
            if self._is_there():
                return self._file
            self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        stat = os.fstat(file)
        self._file, self._is = file, (stat.st_dev, stat.st_ino)
        self._half = stat.st_size > 0 and os.pread(file, 1, stat.st_size - 1) != b"\n"
        return file

    def _is_there(self) -> bool:
        """Whether the name still leads to the file that is open."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return False
        return (stat.st_dev, stat.st_ino) == self._is


def _write(file: int, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
    """Write all of them: how many bytes were, and what kept the rest from it."""
    done = 0
    try:
        for at in range(0, len(lines), AT_ONCE):
            some = lines[at : at + AT_ONCE]
            written = os.writev(file, some)  # by one call, and without copying them together first
            done += written
            rest = memoryview(b"".join(some) if written < sum(map(len, some)) else b"")[written:]
            while rest:  # a disk that fills up takes part of it first, and then says so
                written = os.write(file, rest)
                done, rest = done + written, rest[written:]
    except OSError as error:
        return done, error
    return done, None
