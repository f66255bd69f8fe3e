"""What a process goes through before it runs a program: everything that it could misuse is taken from it.

Twice. `move_in` is for a warm interpreter: a root with only what programs may read, an unprivileged user, a user
namespace in which it may make namespaces and nothing else. `enter` is for each program: a /tmp, a /proc, a network, a
user namespace of its own; then no capabilities, Landlock, seccomp, in this order, since each forbids what the steps
before it need. Both are for good. Where the kernel or the site allows no namespaces, `enter` keeps to Landlock, seccomp
and, for root, a user of the program's own.

A step that fails raises OSError, and the program is not run. Only the standard library is imported.
"""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from toolroll.sandbox.server import kernel, landlock, reserve, root
from toolroll.sandbox.server.spec import WORK, Limits, Plan, Spec

NOBODY = 65534
PER_PROGRAM = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET | kernel.CLONE_NEWCGROUP
)
"""The namespaces made by clone for each program. A user namespace follows in `enter`; a pid namespace is joined."""


def move_in(plan: Plan) -> None:
    """Put a warm interpreter into its place. Returns in a child of the caller, which itself only waits for it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if not plan["namespaces"]:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        _filter(plan["seccomp"])
        return
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET
    if os.geteuid() == 0:
        # The root is built as root: only root may look into every directory on the way.
        kernel.unshare(spaces)
        kernel.sethostname("sandbox")
        root.build(plan["readable"])
        become(NOBODY)
        _enter_user_namespace(0, kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    else:
        _enter_user_namespace(0, spaces | kernel.CLONE_NEWPID)
        kernel.sethostname("sandbox")
        root.build(plan["readable"])
    # A pid namespace of its own, so that it may enter those of programs and come back, and that all end with it.
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", root.TMP, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=16m")
    root.show_below_tmp(plan["readable"])
    _filter(plan["seccomp"])


def enter(plan: Plan, spec: Spec) -> str:
    """Put this process, which was just cloned for it, into the jail of a program. Its working directory."""
    with contextlib.suppress(OSError):  # when memory runs out on the machine, programs go before servers
        _write("/proc/self/oom_score_adj", b"1000")
    if plan["namespaces"]:
        limits = plan["limits"]
        hidden = kernel.MS_NOSUID | kernel.MS_NODEV
        options = f"mode=1777,size={limits['disk']},nr_inodes={limits['inodes']}"
        kernel.mount("tmpfs", root.TMP, "tmpfs", hidden, options)
        kernel.mount("proc", "/proc", "proc", hidden | kernel.MS_NOEXEC)
        root.show_below_tmp(plan["readable"])
        kernel.loopback_up()
        _enter_user_namespace(1000)
        os.mkdir(root.SHARED_MEMORY)
        directory = WORK
        os.mkdir(directory)
    else:
        directory = spec["directory"]
    os.chdir(directory)
    return directory


def lock(plan: Plan, directory: str, *, keep: Iterable[int] = ()) -> None:
    """Give up every right that the program shall not have, but the capabilities to `keep`.

    What this process starts is locked in with it. May be done twice: the second lock is inside the first.
    """
    kernel.drop_capabilities(keep)
    if plan["landlock"]:
        if plan["namespaces"]:
            landlock.restrict(plan["landlock"], ["/"], [root.TMP], ["/dev"], network=True)
        else:
            readable = [*plan["readable"], "/proc"]
            landlock.restrict(plan["landlock"], readable, [directory], landlock.DEVICES, network=False)
    _filter(plan["seccomp_of_program"])


def become(user: int) -> None:
    """Be another user, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


class OwnMemory(NamedTuple):
    """Bytes that a warm interpreter has, and so every clone of it. What one asks for on top is the program's."""

    address_space: int
    data: int
    """Of these, what is its alone and can be written."""


NONE = OwnMemory(0, 0)


def limit(limits: Limits, memory: int, *, own: OwnMemory = NONE, hard_memory: bool) -> None:
    """Set the limits of the process that becomes the program.

    Memory is limited twice for Python, so that a program which asks for too much gets a MemoryError that it can
    handle, and a traceback if it doesn't, instead of being killed.
    """
    kept_back = reserve.SIZE if own is not NONE else 0
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),  # timers too
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (resource.RLIMIT_DATA, memory + own.data + kept_back),
        (resource.RLIMIT_AS, memory + own.address_space + kept_back if hard_memory else resource.RLIM_INFINITY),
    ):
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY and (most == resource.RLIM_INFINITY or most > hard):
            most = hard
        is_memory = what in (resource.RLIMIT_DATA, resource.RLIMIT_AS) and most != resource.RLIM_INFINITY
        resource.setrlimit(what, (most - kept_back if is_memory else most, most))


def environment(plan: Plan, directory: str, more: Mapping[str, str] = {}) -> dict[str, str]:
    """All that a program finds in its environment: nothing of the server's."""
    home = directory if not plan["namespaces"] else root.TMP
    return {"PATH": plan["path"], "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "USER": "sandbox",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **more}  # fmt: skip


def _enter_user_namespace(inside: int, more: int = 0) -> None:
    """Be `inside` in a new user namespace, with every capability there and none outside."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and can't be written
    kernel.unshare(kernel.CLONE_NEWUSER | more)
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", f"{inside} {uid} 1".encode())
    _write("/proc/self/gid_map", f"{inside} {gid} 1".encode())


def _filter(program: str) -> None:
    if program:
        kernel.seccomp(base64.b64decode(program))


def _write(path: str, value: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)
