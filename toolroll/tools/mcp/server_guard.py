"""The guard of an MCP server: a program that runs the server and ends all of its processes.

    python -I -S server_guard.py PARENT DIRECTORY COMMAND [ARGUMENT...]

The guard starts the server as its child and adopts the server's orphans. When the guard receives SIGTERM, it forwards
it to the server, which has `TERMINATION_GRACE_S` to end. Then, or when the server ends, the guard kills every process
that the server has left, removes the temporary directory if there is one, and exits with the server's status. The
kernel sends SIGTERM when the process PARENT dies, however it dies.

DIRECTORY is the working directory, or `-` for a new temporary directory. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NEW_DIRECTORY = "-"
CANNOT_EXECUTE = 127
"""Exit status if the command cannot be executed, as in a shell."""
TERMINATION_GRACE_S = 1.0
"""Time in which the server may end after SIGTERM, before it is killed."""
_GUARD_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main() -> NoReturn:
    """Run a server. See the module's docstring."""
    parent, directory, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _GUARD_SIGNALS)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the call above
        os._exit(1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    close_inherited_files()
    temporary = None
    if directory == NEW_DIRECTORY:
        import tempfile

        directory = temporary = tempfile.mkdtemp(prefix="toolroll-mcp-")
    if (server := os.fork()) == 0:
        execute(command, directory)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # only the server has its pipes
        os.dup2(null, fd)
    status = wait(server)
    kill_children()
    if temporary is not None:
        remove(temporary)
    os._exit(status)


def remove(directory: str) -> None:
    """Remove a directory. If it takes so long that this process is killed, its child finishes."""
    import shutil

    if (child := os.fork()) == 0:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)
    os.waitpid(child, 0)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def close_inherited_files() -> None:
    """Close all files except stdin, stdout and stderr. uvloop leaves copies of these and of other files open."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the directory that was listed
                os.close(fd)


def execute(command: list[str], directory: str) -> NoReturn:
    """Become the server."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _GUARD_SIGNALS)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.chdir(directory)
        os.execvp(command[0], command)  # noqa: S606 (runs the server on purpose)
    except OSError as error:
        os.write(2, f"Cannot execute {command[0]!r} in {directory}: {error.strerror}.\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def wait(server: int) -> int:
    """Wait until the server ends, after SIGTERM for a limited time. Return the exit status, as a shell does."""
    while signal.sigwait(_GUARD_SIGNALS) == signal.SIGCHLD:
        if (status := reap(server)) is not None:
            return status
    os.kill(server, signal.SIGTERM)
    give_up = time.monotonic() + TERMINATION_GRACE_S
    while (remaining_s := give_up - time.monotonic()) > 0 and signal.sigtimedwait({signal.SIGCHLD}, remaining_s):
        if (status := reap(server)) is not None:
            return status
    return 128 + signal.SIGTERM


def reap(server: int) -> int | None:
    """Reap the children that have ended. Return the exit status of the server if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return None


def kill_children() -> None:
    """Kill all descendants: the children of a killed process become children of this one."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
