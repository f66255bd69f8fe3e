"""Build the root file system that programs see: a private root with read-only bind mounts of the host's paths.

It is built once, in the mount namespace of the zygote. Each program gets a copy of that namespace, with a private /tmp
and /proc. Paths that are not bound do not exist for a program: home directories, /sys, most of /etc, and all sockets of
the host are absent. Imports only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from toolroll.sandbox.server.isolation import landlock, syscalls

TMP = "/tmp"  # noqa: S108 (private to each program)
BELOW_TMP = "/run/readable"
"""Directory with the readable paths of the host's /tmp, which a program's /tmp hides. See `bind_paths_below_tmp`."""
SHARED_MEMORY = f"{TMP}/.shm"

_DEV_LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
    "shm": SHARED_MEMORY,
}  # fmt: skip
_ETC_FILES = {
    "passwd": "root:x:0:0::/:/bin/false\nsandbox:x:1000:1000::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build(readable: Iterable[str]) -> None:
    """Build the root file system and change to it. Requires a private mount namespace and the right to mount.

    Args:
        readable: Paths of the host that programs can read.
    """
    # Mounts made here are invisible outside; mounts made outside still propagate into this namespace.
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    # The root is changed twice: first to a directory from which the host's files can still be reached in /old, then
    # to the finished root.
    syscalls.mount("tmpfs", TMP, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=4m")
    os.chdir(TMP)
    os.mkdir("old")
    os.mkdir("new")
    syscalls.mount("new", "new", flags=syscalls.MS_BIND)
    syscalls.pivot_root(".", "old")
    os.chdir("/")
    _populate("/old", "/new", readable)
    syscalls.mount_read_only("/new", recursive=False)
    os.chdir("/new")
    syscalls.pivot_root(".", "tmp")
    syscalls.unmount(TMP)
    os.chdir("/")


def paths_below_tmp(readable: Iterable[str]) -> list[str]:
    """Return the readable paths of the host's /tmp."""
    return [path for path in readable if path.startswith(f"{TMP}/")]


def bind_paths_below_tmp(paths: Iterable[str]) -> None:
    """Bind readable paths of the host's /tmp into the program's private /tmp."""
    for path in paths:
        _bind(BELOW_TMP + path, path)


def _populate(old: str, new: str, readable: Iterable[str]) -> None:
    for name in ("proc", "dev", "etc", "tmp"):
        os.mkdir(f"{new}/{name}")
    for path in readable:
        target = new + (BELOW_TMP + path if Path(path).is_relative_to(TMP) else path)
        if _bind(old + path, target):
            syscalls.mount_read_only(target)
    # The kernel lets a program mount its own /proc only if a complete /proc is visible. The program's hides this one.
    for path in ("/proc", *landlock.DEVICES):
        _bind(old + path, new + path)
    for name, destination in _DEV_LINKS.items():
        os.symlink(destination, f"{new}/dev/{name}")
    for name, text in _ETC_FILES.items():
        Path(new, "etc", name).write_text(text)


def _bind(source: str, target: str) -> bool:
    """Bind-mount a file or directory, or copy a symbolic link. Return True if something was mounted.

    Missing sources are skipped. Called for each program, so it does not use pathlib, which is slow.
    """
    if not os.path.lexists(source):
        return False
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return False
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT))
    syscalls.mount(source, target, flags=syscalls.MS_BIND | syscalls.MS_REC)
    return True
