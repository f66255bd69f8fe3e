"""Linux system calls that Python's os module lacks.

A call that fails raises OSError, with the name of the call. Calls can be prepared in the zygote and are then cheap to
make in a clone: see `make`. This module imports only the standard library: it runs in the interpreter that executes the
model's code, which may have no other packages.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from toolroll.sandbox.server.isolation.syscall_numbers import SYSCALL_NUMBERS

# PyDLL holds the GIL during a call. After `clone`, it would otherwise belong to a thread that the child does not have.
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long

_ARCH = platform.machine()
SUPPORTED = _ARCH in SYSCALL_NUMBERS
_NR = SYSCALL_NUMBERS.get(_ARCH, SYSCALL_NUMBERS["x86_64"])  # numbers from 424 are the same on every architecture

CLONE_PIDFD = 0x1000
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 0x1000, 0x4000, 0x40000, 0x80000
MNT_DETACH = 2
_AT_FDCWD = -100

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


Buffer = bytes | ctypes.Array[ctypes.c_char]
Argument = int | ctypes.c_int | Buffer | None
"""Argument of a system call: a number of at most 32 bits, a buffer or a null pointer. Values of ctypes can be changed
after the call was prepared."""


class PreparedCall(NamedTuple):
    """A system call for `make`."""

    description: str
    """Name of the call, for errors."""
    arguments: tuple[Argument, ...]
    """Number of the call, and its arguments."""
    result: ctypes.c_int | None
    """Receives the result, for the arguments of later calls."""


def prepare(name: str, *arguments: Argument, result: ctypes.c_int | None = None, description: str = "") -> PreparedCall:
    """Return a system call for `make`."""
    return PreparedCall(description or name, (_NR[name], *arguments), result)


def make(calls: Iterable[PreparedCall]) -> int:
    """Make prepared system calls and return the result of the last one.

    In a clone, each page of memory is copied when it is first written to, and Python writes to every object that it
    uses. Calls that were prepared before the clone use few objects.
    """
    value = 0
    for description, arguments, result in calls:
        value = _syscall(*arguments)
        if value < 0:
            _checked(value, description)
        if result is not None:
            result.value = value
    return value


def _call(name: str, *arguments: Argument, description: str = "") -> int:
    return _checked(int(_syscall(_NR[name], *arguments)), description or name)


def _checked(result: int, name: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def clone(flags: int) -> tuple[int, int]:
    """Fork this process into new namespaces.

    The process must have a single thread. Unlike os.fork, the child runs no fork handlers of Python or C libraries.

    Args:
        flags: CLONE_* flags. CLONE_PIDFD is added.

    Returns:
        (0, -1) in the child, (pid, pidfd) in the parent.
    """
    pidfd, sigchld = ctypes.c_int(-1), 17
    pid = int(_syscall(_NR["clone"], flags | CLONE_PIDFD | sigchld, None, ctypes.byref(pidfd), None, None))
    return (0, -1) if pid == 0 else (_checked(pid, "clone"), pidfd.value)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _call("unshare", flags)


def prepare_mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> PreparedCall:
    """Return a call that mounts a file system, or bind-mounts a file or directory."""
    arguments = source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None
    return prepare("mount", *arguments, description=f"mount {target}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind-mount a file or directory."""
    make((prepare_mount(source, target, kind, flags, options),))


def prepare_write(path: str, value: Buffer) -> list[PreparedCall]:
    """Return calls that write to an existing file."""
    fd = ctypes.c_int()
    return [_prepare_open(path, os.O_WRONLY, fd), prepare("write", fd, value, len(value), description=f"write {path}"),
            prepare("close", fd)]  # fmt: skip


def _prepare_open(path: str, flags: int, result: ctypes.c_int) -> PreparedCall:
    return prepare("openat", _AT_FDCWD, path.encode(), flags | os.O_CLOEXEC, result=result, description=f"open {path}")


def prepare_working_directory(path: str) -> list[PreparedCall]:
    """Return calls that create a directory and change to it."""
    return [prepare_mkdir(path), prepare("chdir", path.encode(), description=f"chdir {path}")]


def prepare_mkdir(path: str) -> PreparedCall:
    """Return a call that creates a directory."""
    return prepare("mkdirat", _AT_FDCWD, path.encode(), 0o777, description=f"mkdir {path}")


def unmount(target: str) -> None:
    """Detach a mount. Processes that still use it keep it until they close it."""
    _call("umount2", target.encode(), MNT_DETACH, description=f"umount {target}")


def mount_read_only(path: str, *, recursive: bool = True) -> None:
    """Make a mount, and by default the mounts below it, read-only, nodev and nosuid."""
    attributes = struct.pack("=QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0)  # RDONLY | NOSUID | NODEV, clear, propagation, userns
    at_recursive = 0x8000 if recursive else 0
    _call("mount_setattr", _AT_FDCWD, path.encode(), at_recursive, attributes, len(attributes))


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root directory and move the current root to `old`, a directory below `new`."""
    _call("pivot_root", new.encode(), old.encode())


def prepare_prctl(option: int, argument: int) -> PreparedCall:
    """Return a call that sets an attribute of this process (PR_SET_*)."""
    return prepare("prctl", option, argument, 0, 0, 0, description=f"prctl {option}")


def prctl(option: int, argument: int) -> None:
    """Set an attribute of this process (PR_SET_*)."""
    make((prepare_prctl(option, argument),))


def prepare_set_ids(user: int | ctypes.c_int) -> list[PreparedCall]:
    """Return calls that do what `set_ids` does."""
    return [prepare("setgroups", 0, None), *(prepare(name, user, user, user) for name in ("setresgid", "setresuid"))]


def set_ids(user: int) -> None:
    """Set the real, effective and saved user and group ids of this thread, without supplementary groups.

    Unlike os.setresuid, does not wait for other threads, which libc may falsely expect after `clone`.
    """
    make(prepare_set_ids(user))


CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7


def prepare_drop_capabilities(keep: Iterable[int] = ()) -> list[PreparedCall]:
    """Return calls that drop all capabilities except `keep`, and ensure that executing a file grants none."""
    kept = sum(1 << capability for capability in keep)
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; then ≥ 32
    return [prepare_prctl(PR_SET_NO_NEW_PRIVS, 1), prepare("capset", header, sets)]


def close_from(lowest: int) -> None:
    """Close all file descriptors from `lowest` upwards."""
    _call("close_range", lowest, 0xFFFFFFFF, 0)


def prepare_seccomp(program: bytes) -> PreparedCall:
    """Return a call that installs a seccomp filter irrevocably. `program` is BPF: an array of `struct sock_filter`."""
    set_mode_filter, header = 1, struct.Struct("@HP")
    argument = ctypes.create_string_buffer(header.size + len(program))
    argument.raw = header.pack(len(program) // 8, ctypes.addressof(argument) + header.size) + program
    return prepare("seccomp", set_mode_filter, 0, argument)


RLIMIT = struct.Struct("=qq")
"""Soft and hard resource limit. -1 is infinity."""


def prepare_rlimit(kind: int, limit: Buffer) -> PreparedCall:
    """Return a call that sets a resource limit of this process to an `RLIMIT`."""
    this_process = 0
    return prepare("prlimit64", this_process, kind, limit, None, description=f"prlimit64 {kind}")


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI version, or 0 if it has no Landlock."""
    version = 1
    try:
        return _call("landlock_create_ruleset", None, 0, version)
    except OSError:
        return 0


def prepare_landlock(access_fs: int, access_net: int, scoped: int, rules: Mapping[str, int]) -> list[PreparedCall]:
    """Return calls that restrict this process and its future children. They require no_new_privs.

    Args:
        access_fs: Kinds of access to files that are denied unless a rule allows them.
        access_net: Kinds of access to the network that are denied.
        scoped: Operations on processes outside of the domain that are denied.
        rules: Path → kinds of access to it, and to everything below it, that are allowed.
    """
    attributes = struct.pack("=QQQ", access_fs, access_net, scoped)
    size = 24 if scoped else 16 if access_net else 8  # older kernels reject fields that they do not know
    ruleset = ctypes.c_int()
    calls = [prepare("landlock_create_ruleset", attributes, size, 0, result=ruleset)]
    for path, access in rules.items():
        path_beneath, fd_offset = 1, 8
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, -1))
        fd = ctypes.c_int.from_buffer(rule, fd_offset)
        calls += [_prepare_open(path, os.O_PATH, fd), prepare("landlock_add_rule", ruleset, path_beneath, rule, 0),
                  prepare("close", fd)]  # fmt: skip
    return [*calls, prepare("landlock_restrict_self", ruleset, 0), prepare("close", ruleset)]


def setns(fd: int, kind: int) -> None:
    """Enter a namespace. A pid namespace applies only to children that are started afterwards."""
    _call("setns", fd, kind)


def prepare_loopback_up() -> list[PreparedCall]:
    """Return calls that bring up the loopback interface, so that a program can connect to itself over 127.0.0.1."""
    af_inet, sock_dgram, siocsifflags, iff_up_running = 2, 2, 0x8914, 0x41
    fd = ctypes.c_int()
    request = struct.pack("=16sh22x", b"lo", iff_up_running)
    return [prepare("socket", af_inet, sock_dgram, 0, result=fd),
            prepare("ioctl", fd, siocsifflags, request, description="ioctl lo"), prepare("close", fd)]  # fmt: skip
