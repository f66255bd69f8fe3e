"""Limits on all processes of a program together: memory, how many they are, and one share of the processors.

A cgroup is made for a program that needs one and used again when it is empty: of processes, and of what was charged to
them. (The files of a killed program, which are in memory, go a moment after it.) Version 2 where the server was given a
part of the tree with the memory controller (systemd: `Delegate=yes`), else version 1, else none: `Cgroups.find` says
which. What a server that was killed has left behind is cleared away by the next one: its directories are those that
nobody holds a lock on. (A server in another container sees them, and not the process that they belong to.)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "toolroll-"
_TREE = Path("/sys/fs/cgroup")
LEFT = 8 << 20
"""Bytes that may still be charged to a cgroup that is used again. The kernel's own are one or two million."""


@dataclass
class Cgroup:
    """One program's own."""

    memory: Path
    directories: list[Path]
    version: int
    descriptors: list[int] = field(default_factory=list)
    """Files that a process writes "0" to, to enter. Opened here, so that it needs no right of its own to."""
    held: list[int] = field(default_factory=list)
    """The directories, open and locked."""
    limit: int = -1
    _events: int = -1
    _usage: int = -1

    def open(self) -> None:
        """Open what is read and written for each program."""
        self.descriptors = [os.open(directory / "cgroup.procs", os.O_WRONLY) for directory in self.directories]
        events, usage = "memory.oom_control", "memory.usage_in_bytes"
        if self.version == 2:
            events, usage = "memory.events", "memory.current"
        self._events = os.open(self.memory / events, os.O_RDONLY | os.O_CLOEXEC)
        self._usage = os.open(self.memory / usage, os.O_RDONLY | os.O_CLOEXEC)

    def set_memory(self, most: int) -> None:
        """Limit the memory, swap included, to so many bytes."""
        if most == self.limit:
            return
        if self.version == 2:
            (self.memory / "memory.max").write_text(str(most))
            with contextlib.suppress(OSError):
                (self.memory / "memory.swap.max").write_text("0")
        else:
            with contextlib.suppress(OSError):  # what is on its way between sockets is counted apart
                (self.memory / "memory.kmem.tcp.limit_in_bytes").write_text(str(most // 8))
            with_swap = self.memory / "memory.memsw.limit_in_bytes"
            names = ["memory.limit_in_bytes", with_swap.name] if with_swap.exists() else ["memory.limit_in_bytes"]
            for name in names if most > self.limit else reversed(names):
                with contextlib.suppress(OSError):  # the second of them, where the first was in its way
                    (self.memory / name).write_text(str(most))
            (self.memory / names[0]).write_text(str(most))
        self.limit = most

    def memory_kills(self) -> int:
        """How many processes the kernel has ended here for want of memory, ever."""
        found = re.search(rb"^oom_kill (\d+)", os.pread(self._events, 4096, 0), re.MULTILINE)
        return int(found[1]) if found else 0

    def memory_in_use(self) -> int:
        """How many bytes are charged to it."""
        return int(os.pread(self._usage, 32, 0))

    def remove(self) -> None:
        """Take it away. Only what is empty can be."""
        for descriptor in (*self.descriptors, self._events, self._usage):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors, self._events, self._usage = [], -1, -1
        for directory in self.directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
        for descriptor in self.held:
            os.close(descriptor)
        self.held = []


class Cgroups:
    """The cgroups of this server."""

    def __init__(self, version: int, parents: dict[str, Path], processes: int, keep: int) -> None:
        self.version = version
        self.parents = parents
        """Controller → directory; in version 2 one for all. Each cgroup has the same share of the processors."""
        self.processes = processes
        self.keep = keep
        self._spare: list[Cgroup] = []
        self._name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._made = 0

    @classmethod
    def find(cls, processes: int, keep: int) -> Cgroups | None:
        """Cgroups on this machine, if this process may make such.

        Args:
            processes: How many processes each may have.
            keep: How many to keep for later while they aren't needed.
        """
        for version, parents in ((2, _version_2()), (1, _version_1())):
            if parents is None:
                continue
            found = cls(version, parents, processes, keep)
            try:
                found._clear_away()
                found.give_back(found.take(1 << 30))
            except OSError as error:
                logger.debug("cgroup version %d can't be used: %s", version, error)
                continue
            return found
        return None

    def take(self, memory: int) -> Cgroup:
        """A cgroup with nothing in it, limited to so many bytes."""
        while self._spare:
            cgroup = self._spare.pop(0)  # the one that has had the longest to be empty
            try:
                if cgroup.memory_in_use() <= min(LEFT, memory // 8):
                    cgroup.set_memory(memory)
                    return cgroup
            except OSError as error:
                logger.debug("%s can't be used again: %s", cgroup.memory, error)  # somebody has cleared it away
            cgroup.remove()
        cgroup = self._make()
        cgroup.set_memory(memory)
        return cgroup

    def give_back(self, cgroup: Cgroup) -> None:
        """Hand in a cgroup whose processes have all ended."""
        if len(self._spare) < self.keep:
            self._spare.append(cgroup)
        else:
            cgroup.remove()

    def close(self) -> None:
        """Remove those that are not in use."""
        for cgroup in self._spare:
            cgroup.remove()
        self._spare.clear()

    def _make(self) -> Cgroup:
        self._made += 1
        name = f"{self._name}-{self._made}"
        directories = list(dict.fromkeys(parent / name for parent in self.parents.values()))
        cgroup = Cgroup(self.parents["memory"] / name, directories, self.version)
        try:
            for directory in directories:
                directory.mkdir()
                cgroup.held.append(_hold(directory))
        except _NotOurs:  # a server that is just beginning took it for one that was left behind
            cgroup.remove()
            return self._make()
        (self.parents["pids"] / name / "pids.max").write_text(str(self.processes))
        cgroup.open()
        return cgroup

    def _clear_away(self) -> None:
        for parent in dict.fromkeys(self.parents.values()):
            for left in parent.glob(f"{_PREFIX}*-*"):
                with contextlib.suppress(OSError, _NotOurs):
                    held = _hold(left)
                    try:
                        left.rmdir()
                    finally:
                        os.close(held)


class _NotOurs(Exception):
    """Somebody else holds the directory, or has removed it."""


def _hold(directory: Path) -> int:
    """Open a directory and lock it. The lock ends with the process, if not before."""
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _NotOurs from None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise _NotOurs from None
    if not directory.exists():
        os.close(opened)
        raise _NotOurs
    return opened


def _own() -> dict[str, str]:
    """Controller → this process's cgroup; version 2 under the empty name."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}


def _version_1() -> dict[str, Path] | None:
    own = _own()
    parents = {name: _TREE / name / own.get(name, "/").lstrip("/") for name in ("memory", "pids", "cpu")}
    if not os.access(parents["cpu"], os.W_OK):
        del parents["cpu"]
    return parents if all(os.access(path, os.W_OK) for path in parents.values()) else None


def _version_2() -> dict[str, Path] | None:
    own = _own().get("")
    if own is None or not (_TREE / "cgroup.controllers").exists():
        return None
    parent = _TREE / own.lstrip("/")
    try:
        if (parent / "cgroup.type").exists():  # the root alone has none
            # Only a cgroup without processes of its own can limit those below it: this one moves down first. Where
            # others are in it too, they are not ours to move, and it can't be used.
            (parent / "toolroll").mkdir(exist_ok=True)
            (parent / "toolroll" / "cgroup.procs").write_text(str(os.getpid()))
        (parent / "cgroup.subtree_control").write_text("+memory +pids")
        with contextlib.suppress(OSError):
            (parent / "cgroup.subtree_control").write_text("+cpu")
    except OSError as error:
        logger.debug("cgroup version 2 can't be used: %s", error)
        return None
    return {"memory": parent, "pids": parent}
