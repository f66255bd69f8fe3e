"""Isolate a process before it runs a program.

Isolation has two steps, which cannot be undone:

1. `isolate_zygote`, once for each zygote: a root file system with only the readable paths, an unprivileged user, and a
   user namespace that permits only to create further namespaces.
2. `enter` and `drop_privileges`, for each program: a private /tmp, /proc, network and user namespace; then no
   capabilities, Landlock and seccomp. The order matters, since each restriction forbids the steps before it.

Without namespaces, a program is isolated by Landlock, seccomp and, if the server runs as root, a separate user.

A step that fails raises OSError, and the program does not run. Imports only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from toolroll.sandbox.server.isolation import landlock, rootfs, syscalls
from toolroll.sandbox.server.isolation.memory_headroom import HEADROOM_BYTES
from toolroll.sandbox.server.job_spec import WORK, JailPlan, JobLimits, JobSpec

NOBODY_UID = 65534
STACK_BYTES = 8 << 20
"""Soft limit of the stack size, which programs can raise."""
_SIGNALS_THAT_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
_ZYGOTE_NAMESPACES = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWNET
PROGRAM_NAMESPACES = _ZYGOTE_NAMESPACES | syscalls.CLONE_NEWCGROUP
"""Namespaces created when the zygote clones itself. `enter` adds a user namespace; a pid namespace is joined."""


def reset_process_attributes() -> None:
    """Give this process the attributes of a login shell. Those of the server depend on how it was started."""
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in _SIGNALS_THAT_PYTHON_IGNORES:
            signal.signal(number, signal.SIG_DFL)
    for kind, soft_limit in ((resource.RLIMIT_STACK, STACK_BYTES), (resource.RLIMIT_CPU, resource.RLIM_INFINITY)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (_at_most(soft_limit, hard), hard))


def restore_default_signals() -> None:
    """Restore the signals that Python ignores, before another program is executed."""
    for number in _SIGNALS_THAT_PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)


def isolate_zygote(plan: JailPlan) -> None:
    """Isolate a zygote. With namespaces, returns in a child process, and the caller only waits for that child."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not plan["namespaces"]:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        _install_filter(plan["seccomp"])
        return
    if os.geteuid() == 0:
        # The root file system is built as root: only root can traverse every directory of the host.
        syscalls.unshare(_ZYGOTE_NAMESPACES)
        _build_root(plan)
        with _writer_of_user_maps(plan["users"]) as write_maps:
            syscalls.set_ids(NOBODY_UID)
            _enter_user_namespace(0, syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID, write_maps)
    else:
        _enter_user_namespace(0, _ZYGOTE_NAMESPACES | syscalls.CLONE_NEWPID)
        _build_root(plan)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # again, because a change of user clears it
    # The zygote has its own pid namespace: it can enter the pid namespaces of programs and return, and all of them end
    # together with it.
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    syscalls.mount("tmpfs", rootfs.TMP, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=16m")
    rootfs.bind_paths_below_tmp(plan["readable"])
    _install_filter(plan["seccomp"])


def enter(plan: JailPlan, spec: JobSpec) -> str:
    """Move this process, a fresh clone of the zygote, into the jail of its program.

    Returns:
        The program's working directory, which is now the current directory.
    """
    with contextlib.suppress(OSError):  # if the machine runs out of memory, programs are killed before servers
        _write("/proc/self/oom_score_adj", b"1000")
    directory = WORK if plan["namespaces"] else spec["directory"]
    if plan["namespaces"]:
        limits = plan["limits"]
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        options = f"mode=1777,size={limits['disk']},nr_inodes={limits['inodes']}"
        syscalls.mount("tmpfs", rootfs.TMP, "tmpfs", flags, options)
        syscalls.mount("proc", "/proc", "proc", flags | syscalls.MS_NOEXEC)
        rootfs.bind_paths_below_tmp(plan["readable"])
        syscalls.loopback_up()
        if (user := spec.get("user")) is not None:
            syscalls.set_ids(user)
        _enter_user_namespace(1000)
        os.mkdir(rootfs.SHARED_MEMORY)
        os.mkdir(directory)
    os.chdir(directory)
    return directory


def drop_privileges(plan: JailPlan, directory: str, *, keep: Iterable[int] = ()) -> None:
    """Drop every right that the program must not have, for this process and its future children.

    Can be called twice: the second set of restrictions applies in addition to the first.

    Args:
        plan: How programs are isolated.
        directory: Working directory of the program.
        keep: Capabilities to keep.
    """
    syscalls.drop_capabilities(keep)
    if plan["landlock"]:
        if plan["namespaces"]:
            landlock.restrict(plan["landlock"], ["/"], rootfs.TMP, ["/dev"], network=True)
        else:
            readable = [*plan["readable"], "/proc"]
            landlock.restrict(plan["landlock"], readable, directory, landlock.DEVICES, network=False)
    _install_filter(plan["seccomp_of_program"])


class MemoryUse(NamedTuple):
    """Memory of a zygote, in bytes. Its clones inherit it; only memory beyond it counts as the program's."""

    address_space: int
    data: int
    """Private writable part of the address space."""


def set_rlimits(limits: JobLimits, spec: JobSpec, inherited: MemoryUse | None = None) -> None:
    """Set the resource limits of the process that becomes the program.

    Args:
        limits: Limits that are the same for all programs.
        spec: The program.
        inherited: Memory inherited from the zygote, for Python programs. The soft limit is then lower than the hard
            limit by the memory headroom: the program gets a MemoryError that it can handle, or a traceback, instead
            of being killed.
    """
    data_limit = address_space_limit = resource.RLIM_INFINITY
    headroom = HEADROOM_BYTES if inherited else 0
    if inherited or spec["memory_by_rlimit"]:
        data_limit = spec["memory"] + headroom + (inherited.data if inherited else 0)
    # Commands have no limit here: garbage-collected runtimes reserve far more address space than they use.
    if inherited and spec["memory_by_rlimit"]:
        address_space_limit = spec["memory"] + headroom + inherited.address_space
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),  # also limits timers
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (resource.RLIMIT_DATA, data_limit),
        (resource.RLIMIT_AS, address_space_limit),
    ):
        _, hard = resource.getrlimit(kind)
        limit = _at_most(limit, hard)
        is_memory = kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS) and limit != resource.RLIM_INFINITY
        resource.setrlimit(kind, (limit - headroom if is_memory else limit, limit))


def _at_most(limit: int, hard: int) -> int:
    """Return the lower of two resource limits, of which either can be infinite."""
    return min((limit, hard), key=lambda value: math.inf if value == resource.RLIM_INFINITY else value)


def environment(plan: JailPlan, directory: str, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the complete environment of a program. It contains no variables of the server."""
    home = directory if not plan["namespaces"] else rootfs.TMP
    return {"PATH": plan["path"], "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "USER": "sandbox",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **extra}  # fmt: skip


def _build_root(plan: JailPlan) -> None:
    socket.sethostname("sandbox")
    rootfs.build(plan["readable"])


def _enter_user_namespace(
    uid_inside: int, other_namespaces: int = 0, write_maps: Callable[[], None] | None = None
) -> None:
    """Enter a new user namespace, with all capabilities inside it and none outside.

    Args:
        uid_inside: User id inside the namespace.
        other_namespaces: Other namespaces to create.
        write_maps: Writes the user maps, if the namespace is to have more than one user.
    """
    uid, gid = os.geteuid(), os.getegid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root and is not writable
    syscalls.unshare(syscalls.CLONE_NEWUSER | other_namespaces)
    if write_maps:
        write_maps()
        return
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", f"{uid_inside} {uid} 1".encode())
    _write("/proc/self/gid_map", f"{uid_inside} {gid} 1".encode())


@contextlib.contextmanager
def _writer_of_user_maps(users: tuple[int, int] | None) -> Iterator[Callable[[], None] | None]:
    """Return a function that maps users of programs into the user namespace of this process, if there are any.

    Only a process outside of the namespace, with all privileges, can write such maps. It is started here.
    """
    if users is None:
        yield None
        return
    first, count = users
    maps = f"0 {NOBODY_UID} 1\n{first} {first} {count}".encode()
    parent = os.getpid()
    (request_reader, request_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
    if (helper := os.fork()) == 0:
        try:
            os.close(request_writer)
            if os.read(request_reader, 1):
                for kind in ("uid", "gid"):
                    _write(f"/proc/{parent}/{kind}_map", maps)
                os.write(answer_writer, b"1")
        finally:
            os._exit(0)
    os.close(request_reader)
    os.close(answer_writer)

    def write_maps() -> None:
        os.write(request_writer, b"1")
        if not os.read(answer_reader, 1):
            raise OSError("the users of programs could not be mapped")

    try:
        yield write_maps
    finally:
        os.close(request_writer)
        os.close(answer_reader)
        os.waitpid(helper, 0)


def _install_filter(program: str) -> None:
    if program:
        syscalls.seccomp(base64.b64decode(program))


def _write(path: str, value: bytes) -> None:
    with io.FileIO(path, "w") as file:
        file.write(value)
