"""How long `toolroll view` takes until its first screen is there, and what memory: in a real pseudo-terminal.

From the start of the process to the moment at which the first sample's row and text are on the screen, Python's own
start and all imports included.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

SHOWN = "sample 1 of "
"""Stands in the title as soon as samples are listed."""
ESCAPES = re.compile(rb"\x1b\[[0-9;?<>=$]*[A-Za-z]|\x1b\][^\x07]*\x07")


def first_screen(directory: Path, within: float = 60.0, after: float = 0.0) -> tuple[float, float]:
    """Open the viewer on a directory: seconds to its first screen, and the peak of its memory in MB.

    Args:
        directory: The dumps.
        within: Seconds after which it counts as failed.
        after: Seconds to let it run on, before its memory is read.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "toolroll.cli", "view", str(directory)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        _read_until(controller, SHOWN.encode(), began + within)
        took = time.perf_counter() - began
        _read_until(controller, None, time.perf_counter() + after)
        peak = _peak_mb(process.pid)
        os.write(controller, b"q")
        _read_until(controller, None, time.perf_counter() + 10, lambda: process.poll() is not None)
        return took, peak
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(controller)


def _read_until(terminal: int, wanted: bytes | None, deadline: float, ended: object = None) -> None:
    """Read what it draws: a terminal that nobody reads from holds its program up."""
    seen = b""
    while (left := deadline - time.perf_counter()) > 0:
        if callable(ended) and ended():
            return
        if select.select([terminal], [], [], min(left, 0.05))[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the program has ended
                return
            if wanted is not None and wanted in ESCAPES.sub(b"", seen):
                return
    if wanted is not None:
        raise TimeoutError(f"{wanted!r} never came up: {ESCAPES.sub(b'', seen)[-500:]!r}")


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    """Measure a directory."""
    took, peak = first_screen(Path(sys.argv[1]), after=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    print(f"first screen after {took:.2f} s, {peak:.0f} MB")


if __name__ == "__main__":
    main()
