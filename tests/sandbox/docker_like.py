"""Run a command with the restrictions of a Docker container, or as an unprivileged user.

    docker_like.py [--user UID] [--seccomp] COMMAND...

`--seccomp` blocks the system calls that Docker's default profile blocks for a container without capabilities: new
namespaces, mounts, and others that the stronger isolation tiers need. `--user` requires root: the command runs with
this user id, without groups and capabilities. If the interpreter is below a directory that only root can enter (usually
/root), it is made visible at the same path in a separate mount namespace, so that the machine is not changed.
"""

from __future__ import annotations

import argparse
import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

import pyseccomp

import toolroll
from toolroll.sandbox.server.isolation import syscalls

NAMESPACES = "unshare setns mount umount umount2 pivot_root chroot"
NEW_MOUNTS = "mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick"
OTHERS = (
    "acct add_key bpf clock_settime delete_module finit_module init_module io_uring_enter io_uring_register "
    "io_uring_setup kexec_load keyctl lookup_dcookie mbind move_pages name_to_handle_at open_by_handle_at "
    "perf_event_open quotactl reboot request_key sethostname settimeofday swapon swapoff syslog userfaultfd"
)
CLONE_NEW = (
    syscalls.CLONE_NEWNS, syscalls.CLONE_NEWCGROUP, syscalls.CLONE_NEWUTS, syscalls.CLONE_NEWIPC,
    syscalls.CLONE_NEWUSER, syscalls.CLONE_NEWPID, syscalls.CLONE_NEWNET,
)  # fmt: skip


def install_seccomp_filter() -> None:
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in f"{NAMESPACES} {NEW_MOUNTS} {OTHERS}".split():
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    for flag in CLONE_NEW:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    rules.load()


def inaccessible_parent(path: Path) -> Path | None:
    """Return the first parent directory of a path that other users cannot enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def make_visible(paths: list[Path]) -> None:
    """Mount a readable directory that contains only these paths over each inaccessible parent directory."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    hidden = {path: parent for path in paths if (parent := inaccessible_parent(path))}
    descriptors = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in hidden}
    for directory in set(hidden.values()):
        syscalls.mount("tmpfs", str(directory), "tmpfs", options="mode=755,size=1m")
    for path, fd in descriptors.items():
        path.mkdir(parents=True, exist_ok=True)
        syscalls.mount(f"/proc/self/fd/{fd}", str(path), flags=syscalls.MS_BIND)
        os.close(fd)


def become_user(uid: int) -> None:
    os.environ["HOME"] = tempfile.gettempdir()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", type=int)
    parser.add_argument("--seccomp", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.geteuid() == 0:
        needed = {sys.prefix, sys.base_prefix, str(Path(toolroll.__file__).parent)}
        make_visible([Path(os.path.realpath(path)) for path in sorted(needed)])
    if options.user is not None:
        become_user(options.user)
    if options.seccomp:
        install_seccomp_filter()
    os.execv(options.command[0], options.command)


if __name__ == "__main__":
    main()
