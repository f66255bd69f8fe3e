"""The system calls that Python's os module lacks, and nothing else.

Each function does one call, raises OSError with the call's name when it fails, and knows nothing of what it is used
for. Only the standard library is imported: this file runs in the interpreter that executes the model's code, which may
have nothing else installed. Numbers are for x86_64 and aarch64; those from 424 up are the same everywhere.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_held = ctypes.PyDLL(None, use_errno=True)  # the same, called without giving up the interpreter's lock
_held.syscall.restype = ctypes.c_long

_ARCH = platform.machine()
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "seccomp": 317, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "seccomp": 277, "capset": 91},
}
SUPPORTED = _ARCH in _NUMBERS
_NR = _NUMBERS.get(_ARCH, _NUMBERS["x86_64"]) | {
    "close_range": 436,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

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
    result = int(_libc.syscall(ctypes.c_long(_NR[name]), *arguments))
    return _checked(result, name)


def _checked(result: int, name: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def clone(flags: int) -> tuple[int, int]:
    """Fork with new namespaces: (0, -1) in the child, (pid, pidfd) in the parent. CLONE_PIDFD is added.

    The caller must have one thread only. Unlike after os.fork, nothing is called in the child that Python or a C
    library has registered for it.
    """
    pidfd, sigchld, none = ctypes.c_int(-1), 17, ctypes.c_void_p(0)
    number, flags_ = ctypes.c_long(_NR["clone"]), ctypes.c_ulong(flags | CLONE_PIDFD | sigchld)
    # Held: the child must not come back to an interpreter whose lock belongs to a thread that doesn't exist in it.
    pid = int(_held.syscall(number, flags_, none, ctypes.byref(pidfd), none, none))
    return (0, -1) if pid == 0 else (_checked(pid, "clone"), pidfd.value)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind a directory."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(result, f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount away, now for everybody who looks and later for those who still use it."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def mount_read_only(path: str, *, recursive: bool = True) -> None:
    """Make a mount, and everything mounted below it, read-only, without devices and set-uid."""
    attributes = struct.pack("=QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0)  # RDONLY | NOSUID | NODEV, clear, propagation, userns
    at_recursive = 0x8000 if recursive else 0
    _call("mount_setattr", ctypes.c_int(-100), ctypes.c_char_p(path.encode()), ctypes.c_uint(at_recursive),
          ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)))  # fmt: skip


def pivot_root(new: str, old: str) -> None:
    """Make `new`, a mount, the root; the former root is then at `old`, below it."""
    _call("pivot_root", ctypes.c_char_p(new.encode()), ctypes.c_char_p(old.encode()))


def sethostname(name: str) -> None:
    """Name the machine, as seen from this UTS namespace."""
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), "sethostname")


def prctl(option: int, argument: int) -> None:
    """Set a property of this process."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7


def drop_capabilities(keep: Iterable[int] = ()) -> None:
    """Give up every capability but these, and the way to get one by executing a file."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    kept = sum(1 << capability for capability in keep)
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; then those above 31
    _call("capset", ctypes.c_char_p(header), ctypes.c_char_p(sets))


def close_from(lowest: int) -> None:
    """Close every descriptor from this one up."""
    _call("close_range", ctypes.c_uint(lowest), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0))


def seccomp(program: bytes) -> None:
    """Filter this process's system calls, for good. `program` is what libseccomp exports."""
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value or 0
    filter_ = struct.pack("@HP", len(program) // 8, address)
    set_mode_filter = 1
    _call("seccomp", ctypes.c_uint(set_mode_filter), ctypes.c_uint(0), ctypes.c_char_p(filter_))


def landlock_abi() -> int:
    """Which Landlock the kernel has; 0 for none."""
    version = 1
    try:
        return _call("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint(version))
    except OSError:
        return 0


def landlock_create_ruleset(access_fs: int, access_net: int = 0, scoped: int = 0) -> int:
    """A ruleset that denies what it handles until a rule allows it. Zero fields at the end are for older kernels."""
    attributes = struct.pack("=QQQ", access_fs, access_net, scoped)
    size = 24 if scoped else 16 if access_net else 8
    return _call("landlock_create_ruleset", ctypes.c_char_p(attributes), ctypes.c_size_t(size), ctypes.c_uint(0))


def landlock_allow_beneath(ruleset: int, path: str, access: int) -> None:
    """Allow `access` to what is at and below a path."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, fd)
        _call("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint(0))
    finally:
        os.close(fd)


def landlock_restrict_self(ruleset: int) -> None:
    """Put this process, and what it will start, under the ruleset. Needs no_new_privs."""
    _call("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))


def setns(fd: int, kind: int) -> None:
    """Enter a namespace; for a pid namespace, only what is started from now on does."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def loopback_up() -> None:
    """Switch the loopback interface on, so that a program may talk to itself over 127.0.0.1."""
    af_inet, sock_dgram, siocsifflags, iff_up_running = 2, 2, 0x8914, 0x41
    # By the C library: Python's own socket would be half the cost of all this.
    handle = _checked(_libc.socket(af_inet, sock_dgram, 0), "socket")
    try:
        _checked(_libc.ioctl(handle, siocsifflags, struct.pack("=16sh22x", b"lo", iff_up_running)), "ioctl lo")
    finally:
        os.close(handle)
