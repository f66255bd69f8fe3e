"""Linux system calls that Python's os module lacks.

Each function makes one system call and raises OSError, with the name of the call, if it fails. This module imports only
the standard library: it runs in the interpreter that executes the model's code, which may have no other packages.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

from toolroll.sandbox.server.isolation.syscall_numbers import SYSCALL_NUMBERS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc_holding_gil = ctypes.PyDLL(None, use_errno=True)
_libc_holding_gil.syscall.restype = ctypes.c_long

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

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def _call(name: str, *arguments: object) -> int:
    return _checked(int(_libc.syscall(ctypes.c_long(_NR[name]), *arguments)), name)


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
    pidfd, sigchld, none = ctypes.c_int(-1), 17, ctypes.c_void_p(0)
    number, flags_ = ctypes.c_long(_NR["clone"]), ctypes.c_ulong(flags | CLONE_PIDFD | sigchld)
    # The GIL is held during the call. Otherwise it would belong to a thread that does not exist in the child.
    pid = int(_libc_holding_gil.syscall(number, flags_, none, ctypes.byref(pidfd), none, none))
    return (0, -1) if pid == 0 else (_checked(pid, "clone"), pidfd.value)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind-mount a file or directory."""
    arguments = source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    _checked(_libc.mount(*arguments), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount. Processes that still use it keep it until they close it."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def mount_read_only(path: str, *, recursive: bool = True) -> None:
    """Make a mount, and by default the mounts below it, read-only, nodev and nosuid."""
    attributes = struct.pack("=QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0)  # RDONLY | NOSUID | NODEV, clear, propagation, userns
    at_recursive = 0x8000 if recursive else 0
    _call("mount_setattr", ctypes.c_int(-100), ctypes.c_char_p(path.encode()), ctypes.c_uint(at_recursive),
          ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)))  # fmt: skip


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root directory and move the current root to `old`, a directory below `new`."""
    _call("pivot_root", ctypes.c_char_p(new.encode()), ctypes.c_char_p(old.encode()))


def prctl(option: int, argument: int) -> None:
    """Set an attribute of this process (PR_SET_*)."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def set_ids(user: int) -> None:
    """Set the real, effective and saved user and group ids of this thread, without supplementary groups.

    Unlike os.setresuid, does not wait for other threads, which libc may falsely expect after `clone`.
    """
    _call("setgroups", ctypes.c_size_t(0), None)
    for name in ("setresgid", "setresuid"):
        _call(name, *[ctypes.c_uint(user)] * 3)


CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7


def drop_capabilities(keep: Iterable[int] = ()) -> None:
    """Drop all capabilities except `keep`, and set no_new_privs so that executing a file grants none."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    kept = sum(1 << capability for capability in keep)
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; then ≥ 32
    _call("capset", ctypes.c_char_p(header), ctypes.c_char_p(sets))


def close_from(lowest: int) -> None:
    """Close all file descriptors from `lowest` upwards."""
    _call("close_range", ctypes.c_uint(lowest), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0))


def seccomp(program: bytes) -> None:
    """Install a seccomp filter irrevocably. `program` is BPF: an array of `struct sock_filter`."""
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value or 0
    filter_ = struct.pack("@HP", len(program) // 8, address)
    set_mode_filter = 1
    _call("seccomp", ctypes.c_uint(set_mode_filter), ctypes.c_uint(0), ctypes.c_char_p(filter_))


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI version, or 0 if it has no Landlock."""
    version = 1
    try:
        return _call("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint(version))
    except OSError:
        return 0


def landlock_create_ruleset(access_fs: int, access_net: int = 0, scoped: int = 0) -> int:
    """Create a ruleset that denies the given kinds of access unless a rule allows them.

    Returns:
        A file descriptor of the ruleset.
    """
    attributes = struct.pack("=QQQ", access_fs, access_net, scoped)
    size = 24 if scoped else 16 if access_net else 8  # older kernels reject fields that they do not know
    return _call("landlock_create_ruleset", ctypes.c_char_p(attributes), ctypes.c_size_t(size), ctypes.c_uint(0))


def landlock_allow_beneath(ruleset: int, path: str, access: int) -> None:
    """Allow `access` to a path and to everything below it."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, fd)
        _call("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint(0))
    finally:
        os.close(fd)


def landlock_restrict_self(ruleset: int) -> None:
    """Apply the ruleset to this process and its future children. Requires no_new_privs."""
    _call("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))


def setns(fd: int, kind: int) -> None:
    """Enter a namespace. A pid namespace applies only to children that are started afterwards."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def loopback_up() -> None:
    """Bring up the loopback interface, so that a program can connect to itself over 127.0.0.1."""
    af_inet, sock_dgram, siocsifflags, iff_up_running = 2, 2, 0x8914, 0x41
    # The C library directly: creating a Python socket object would take half of the time that enter() takes.
    handle = _checked(_libc.socket(af_inet, sock_dgram, 0), "socket")
    try:
        _checked(_libc.ioctl(handle, siocsifflags, struct.pack("=16sh22x", b"lo", iff_up_running)), "ioctl lo")
    finally:
        os.close(handle)
