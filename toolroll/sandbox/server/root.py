"""The file system that programs see: a root of its own, with the machine's read-only parts bound into it.

It is built once, in a mount namespace of the warm interpreter's; every program gets a copy of that namespace, with a
/tmp and a /proc of its own. What is not bound here does not exist for a program: no home directories, no /etc but a few
files, no /sys, no sockets of the machine. Only the standard library is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from toolroll.sandbox.server import kernel, landlock

TMP = "/tmp"  # noqa: S108 (every program has its own)
BELOW_TMP = "/run/readable"
"""Where parts of the machine's own /tmp are kept that programs may read: their /tmp hides them (`show_below_tmp`)."""
SHARED_MEMORY = f"{TMP}/.shm"

_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_ETC = {
    "passwd": "root:x:0:0::/:/bin/false\nsandbox:x:1000:1000::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build(readable: Iterable[str]) -> None:
    """Make the root, and change to it. The mount namespace must be the caller's own, and its to change."""
    # Changes here must not show outside; changes outside (a medium unmounted) may show here.
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_SLAVE)
    # Twice: first to a place beside which the whole machine is still in sight, then to what is left of it.
    kernel.mount("tmpfs", TMP, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    os.chdir(TMP)
    for name in ("old", "new"):
        Path(name).mkdir()
    kernel.mount("new", "new", flags=kernel.MS_BIND)
    kernel.pivot_root(".", "old")
    os.chdir("/")
    _fill(Path("/old"), Path("/new"), readable)
    kernel.mount_read_only("/new", recursive=False)
    os.chdir("/new")
    kernel.pivot_root(".", "tmp")
    kernel.unmount("/tmp")  # noqa: S108
    os.chdir("/")


def show_below_tmp(readable: Iterable[str]) -> None:
    """Bring back into a program's own /tmp what was below the machine's /tmp and may be read."""
    for path in readable:
        kept = BELOW_TMP + path
        if not path.startswith(f"{TMP}/") or not os.path.lexists(kept):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(kept):
            os.symlink(os.readlink(kept), path)
            continue
        if os.path.isdir(kept):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT))
        kernel.mount(kept, path, flags=kernel.MS_BIND | kernel.MS_REC)


def _fill(old: Path, new: Path, readable: Iterable[str]) -> None:
    for name in ("proc", "dev", "etc", "tmp"):
        (new / name).mkdir()
    for path in map(Path, readable):
        kept = Path(f"{BELOW_TMP}{path}") if path.is_relative_to(TMP) else path
        if target := _bind(old / path.relative_to("/"), new / kept.relative_to("/")):
            kernel.mount_read_only(str(target))
    # A program may mount a /proc of its own only where a whole one is in sight; its own hides this one.
    _bind(old / "proc", new / "proc")
    for device in landlock.DEVICES:
        _bind(old / device[1:], new / device[1:])
    for name, target_of in (_LINKS | {"shm": SHARED_MEMORY}).items():
        (new / "dev" / name).symlink_to(target_of)
    for name, text in _ETC.items():
        (new / "etc" / name).write_text(text)


def _bind(source: Path, target: Path) -> Path | None:
    """Show a file or directory at another place, a link as the same link. What isn't there is left out."""
    if not source.is_symlink() and not source.exists():
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return None
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    kernel.mount(str(source), str(target), flags=kernel.MS_BIND | kernel.MS_REC)
    return target
