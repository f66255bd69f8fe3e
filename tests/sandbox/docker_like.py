"""Run a command as it would run elsewhere: in a container of Docker's, or as a user without rights.

    docker_like.py [--user NUMBER] [--seccomp] COMMAND...

`--seccomp` refuses what Docker's default profile refuses to a container without capabilities: new namespaces, mounts,
and what else the sandbox could build its better tiers from. `--user` is for root: the command gets that user's number,
no groups and no capabilities. Where the interpreter lies below a directory that only root can enter (/root, mostly), it
is shown to all at its place, in a mount namespace of this command's own: nothing changes on the machine.
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
from toolroll.sandbox.server import kernel

NAMESPACES = "unshare setns mount umount umount2 pivot_root chroot"
NEW_MOUNTS = "mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick"
OTHERS = (
    "acct add_key bpf clock_settime delete_module finit_module init_module io_uring_enter io_uring_register "
    "io_uring_setup kexec_load keyctl lookup_dcookie mbind move_pages name_to_handle_at open_by_handle_at "
    "perf_event_open quotactl reboot request_key sethostname settimeofday swapon swapoff syslog userfaultfd"
)
CLONE_NEW = (
    kernel.CLONE_NEWNS, kernel.CLONE_NEWCGROUP, kernel.CLONE_NEWUTS, kernel.CLONE_NEWIPC, kernel.CLONE_NEWUSER,
    kernel.CLONE_NEWPID, kernel.CLONE_NEWNET,
)  # fmt: skip


def filter_calls() -> None:
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in f"{NAMESPACES} {NEW_MOUNTS} {OTHERS}".split():
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
    for flag in CLONE_NEW:
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    rules.load()


def closed_to_others(path: Path) -> Path | None:
    """The first directory on the way to a path that others can't enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def show_to_others(paths: list[Path]) -> None:
    """Put an open directory, with only these paths in it, over each closed one on their way."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    hidden = {path: closed for path in paths if (closed := closed_to_others(path))}
    held = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in hidden}
    for directory in set(hidden.values()):
        kernel.mount("tmpfs", str(directory), "tmpfs", options="mode=755,size=1m")
    for path, fd in held.items():
        path.mkdir(parents=True, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{fd}", str(path), flags=kernel.MS_BIND)
        os.close(fd)


def become(user: int) -> None:
    os.environ["HOME"] = tempfile.gettempdir()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", type=int)
    parser.add_argument("--seccomp", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if os.geteuid() == 0:
        needed = {sys.prefix, sys.base_prefix, str(Path(toolroll.__file__).parent)}
        show_to_others([Path(os.path.realpath(path)) for path in sorted(needed)])
    if asked.user is not None:
        become(asked.user)
    if asked.seccomp:
        filter_calls()
    os.execv(asked.command[0], asked.command)


if __name__ == "__main__":
    main()
