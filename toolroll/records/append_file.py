"""File to which complete lines are appended.

Each group of lines is written by one system call at the end of the file. If a killed process or a full disk left an
incomplete line, it is terminated before the next line is written. A file that was moved or deleted while it was open is
created again after `close_if_moved`.

Written lines survive the death of the process but not a power failure: the file is not synced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LINES_PER_WRITE = 1000
"""Maximum number of lines per system call. Linux allows 1024 buffers."""


class AppendFile:
    """A file of lines. Not thread-safe.

    Args:
        path: Path of the file. Missing directories are created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._ends_incomplete = False

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines, each of which ends with a newline.

        Raises:
            OSError: If a line cannot be written. The lines before it are written.
        """
        file = self._open()
        try:
            _write(file, [b"\n", *lines] if self._ends_incomplete else lines)
        except OSError as error:
            error.filename = str(self.path)
            self.close()  # its end is examined when it is opened again
            raise
        self._ends_incomplete = False

    def close(self) -> None:
        """Close the file. The next `append` opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def close_if_moved(self) -> None:
        """Close the file if it was moved or deleted, so that the next `append` creates it again."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), self.path.stat()):
                    return
            self.close()

    def _open(self) -> int:
        if self._file is not None:
            return self._file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        stat = os.fstat(file)
        self._ends_incomplete = stat.st_size > 0 and os.pread(file, 1, stat.st_size - 1) != b"\n"
        return file


def _write(file: int, lines: Sequence[bytes]) -> None:
    for start in range(0, len(lines), LINES_PER_WRITE):
        batch = lines[start : start + LINES_PER_WRITE]
        written = os.writev(file, batch)  # joining the lines first would take 5 % longer
        rest = memoryview(b"".join(batch) if written < sum(map(len, batch)) else b"")[written:]
        while rest:  # a disk that fills up accepts a part before it fails
            rest = rest[os.write(file, rest) :]
