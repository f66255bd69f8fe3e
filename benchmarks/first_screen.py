"""Measure how long `toolroll view` takes to show its first screen, and its memory, in a pseudo-terminal.

The time is measured from the start of the process, including that of Python and all imports, until the first sample is
on the screen.

    python benchmarks/first_screen.py DIRECTORY [SECONDS]
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
from collections.abc import Callable
from pathlib import Path

FIRST_SCREEN_TEXT = b"sample 1 of "
"""Part of the title as soon as samples are listed."""
ESCAPE_SEQUENCES = re.compile(rb"\x1b\[[0-9;?<>=$]*[A-Za-z]|\x1b\][^\x07]*\x07")


def first_screen(directory: Path, timeout_s: float = 60.0, run_on_s: float = 0.0) -> tuple[float, float]:
    """Open a directory in the viewer.

    Args:
        directory: Directory with dumps.
        timeout_s: Time after which the measurement fails.
        run_on_s: Time to keep the viewer running before its memory is measured.

    Returns:
        Seconds until the first screen, and peak memory in MB.

    Raises:
        TimeoutError: If the first screen does not appear in time.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "toolroll.cli", "view", str(directory)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        _read_until_text(controller, FIRST_SCREEN_TEXT, start + timeout_s)
        elapsed = time.perf_counter() - start
        _drain(controller, time.perf_counter() + run_on_s)
        peak = _peak_mb(process.pid)
        os.write(controller, b"q")
        _drain(controller, time.perf_counter() + 10, lambda: process.poll() is not None)
        return elapsed, peak
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(controller)


def _read_until_text(terminal: int, text: bytes, deadline: float) -> None:
    output = b""

    def is_shown(data: bytes) -> bool:
        nonlocal output
        output += data
        return text in ESCAPE_SEQUENCES.sub(b"", output)

    if not _read(terminal, deadline, is_shown):
        raise TimeoutError(f"The screen never showed {text!r}: {ESCAPE_SEQUENCES.sub(b'', output)[-500:]!r}")


def _drain(terminal: int, deadline: float, is_done: Callable[[], bool] = lambda: False) -> None:
    """Read and discard output, because a full terminal buffer blocks the viewer."""
    _read(terminal, deadline, lambda _: is_done())


def _read(terminal: int, deadline: float, is_done: Callable[[bytes], bool]) -> bool:
    """Read until `is_done` returns True for the data, the program exits or the deadline passes."""
    while (left := deadline - time.perf_counter()) > 0:
        data = b""
        if select.select([terminal], [], [], min(left, 0.05))[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the program has exited
                return False
        if is_done(data):
            return True
    return False


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    """Measure a directory."""
    elapsed, peak = first_screen(Path(sys.argv[1]), run_on_s=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    print(f"first screen after {elapsed:.2f} s, {peak:.0f} MB")


if __name__ == "__main__":
    main()
