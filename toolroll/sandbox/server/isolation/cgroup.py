"""Limit memory, number of processes and CPU share of all processes of a program together, with cgroups.

A cgroup is created when a program needs one and reused once it is empty: without processes, and without memory that is
still charged to it. (The in-memory files of a killed program are freed shortly after it ends.)

cgroup version 2 is used if the server's part of the tree is delegated to it with the memory controller (systemd:
`Delegate=yes`), otherwise version 1, otherwise none; see `CgroupPool.find`.

A server holds a lock on each directory that it creates. When a server starts, it removes the directories that are not
locked: they belonged to a server that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from toolroll.sandbox.server.isolation.owned_directory import lock

logger = logging.getLogger(__name__)

_CGROUP_NAME_PREFIX = "toolroll-"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
SERVER_CGROUP = "toolroll"
"""Name of the cgroup of the server's own processes, with version 2."""
_parent_of_programs: Path | None = None
"""Cgroup that this process has left, in which those of the programs are created."""
_EVENT_AND_USAGE_FILES = {1: ("memory.oom_control", "memory.usage_in_bytes"), 2: ("memory.events", "memory.current")}
"""Names of the files with the number of OOM kills and with the memory in use, by cgroup version."""
MAX_RESIDUAL_BYTES = 8 << 20
"""Memory that may still be charged to a cgroup that is reused. The kernel itself uses one or two megabytes."""


@dataclass
class Cgroup:
    """The cgroup of one program: one directory, or in version 1 one for each controller."""

    memory: Path
    """Directory of the memory controller."""
    directories: list[Path]
    version: int
    descriptors: list[int] = field(default_factory=list)
    """Open `cgroup.procs` files. A process writes "0" to each to enter the cgroup, and needs no permission for that."""
    locks: list[int] = field(default_factory=list)
    """Open and locked directories."""
    memory_limit: int = -1
    _events: int = -1
    _usage: int = -1

    def open(self) -> None:
        """Open the files that are read and written for each program."""
        self.descriptors = [os.open(directory / "cgroup.procs", os.O_WRONLY) for directory in self.directories]
        paths = [self.memory / name for name in _EVENT_AND_USAGE_FILES[self.version]]
        self._events, self._usage = (os.open(path, os.O_RDONLY) for path in paths)

    def set_memory_limit(self, limit: int) -> None:
        """Limit memory and swap together to `limit` bytes."""
        if limit == self.memory_limit:
            return
        if self.version == 2:
            (self.memory / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.memory / "memory.swap.max").write_text("0")
        else:
            with contextlib.suppress(OSError):  # socket buffers are limited separately
                (self.memory / "memory.kmem.tcp.limit_in_bytes").write_text(str(limit // 8))
            # The limit with swap, which may not exist, must never be below the one without. To lower both, the one
            # without is written first. To raise both, its first write fails and its second one succeeds.
            for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
                with contextlib.suppress(OSError):
                    (self.memory / name).write_text(str(limit))
            (self.memory / "memory.limit_in_bytes").write_text(str(limit))
        self.memory_limit = limit

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel's OOM killer has ever ended in this cgroup."""
        found = re.search(rb"^oom_kill (\d+)", os.pread(self._events, 4096, 0), re.MULTILINE)
        return int(found[1]) if found else 0

    def memory_in_use(self) -> int:
        """Return the number of bytes that are charged to the cgroup."""
        return int(os.pread(self._usage, 32, 0))

    def remove(self) -> None:
        """Remove the cgroup. Directories that still contain processes are left in place."""
        for directory in self.directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
        for descriptor in (*self.descriptors, *self.locks, self._events, self._usage):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors, self.locks, self._events, self._usage = [], [], -1, -1


class CgroupPool:
    """The cgroups of one server. All have the same CPU share and the same limit of processes.

    Args:
        version: cgroup version, 1 or 2.
        parents: Controller → directory in which to create cgroups. In version 2 all controllers have the same one.
        max_processes: Maximum number of processes in one cgroup.
        max_spare: Maximum number of unused cgroups to keep for reuse.
    """

    def __init__(self, version: int, parents: dict[str, Path], max_processes: int, max_spare: int) -> None:
        self.version = version
        self.parents = parents
        self.max_processes = max_processes
        self.max_spare = max_spare
        self._spare: list[Cgroup] = []

    @classmethod
    def find(cls, max_processes: int, max_spare: int) -> CgroupPool | None:
        """Return a pool for this machine, or None if this process cannot create cgroups.

        Args:
            max_processes: Maximum number of processes in one cgroup.
            max_spare: Maximum number of unused cgroups to keep for reuse.
        """
        for version, find_parents in ((2, _version_2_parents), (1, _version_1_parents)):
            try:
                pool = cls(version, find_parents(), max_processes, max_spare)
                pool._remove_abandoned()
                pool.release(pool.acquire(1 << 30))
                return pool
            except OSError as error:
                logger.debug("cgroup version %d is not usable: %s", version, error)
        return None

    def acquire(self, memory_limit: int) -> Cgroup:
        """Return an empty cgroup whose memory is limited to `memory_limit` bytes.

        Raises:
            OSError: If no cgroup can be created.
        """
        while self._spare:
            cgroup = self._spare.pop(0)  # the one that was released first, and most likely has no memory left
            try:
                if cgroup.memory_in_use() <= min(MAX_RESIDUAL_BYTES, memory_limit // 8):
                    cgroup.set_memory_limit(memory_limit)
                    return cgroup
            except OSError as error:
                logger.debug("Not reusing cgroup %s, which was removed: %s", cgroup.memory, error)
            cgroup.remove()
        return self._create(memory_limit)

    def release(self, cgroup: Cgroup, *, reusable: bool = True) -> None:
        """Return a cgroup to the pool, or remove it if it is not `reusable` because processes may be left in it."""
        if reusable and len(self._spare) < self.max_spare:
            self._spare.append(cgroup)
        else:
            cgroup.remove()

    def close(self) -> None:
        """Remove all unused cgroups."""
        for cgroup in self._spare:
            cgroup.remove()
        self._spare.clear()

    def _create(self, memory_limit: int) -> Cgroup:
        name = f"{_CGROUP_NAME_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        directories = list(dict.fromkeys(parent / name for parent in self.parents.values()))
        cgroup = Cgroup(self.parents["memory"] / name, directories, self.version)
        for directory in directories:
            directory.mkdir()
            try:
                cgroup.locks.append(lock(directory))
            except (BlockingIOError, FileNotFoundError):  # a starting server took it for an abandoned one
                cgroup.remove()
                return self._create(memory_limit)
        (self.parents["pids"] / name / "pids.max").write_text(str(self.max_processes))
        cgroup.open()
        cgroup.set_memory_limit(memory_limit)
        return cgroup

    def _remove_abandoned(self) -> None:
        for parent in dict.fromkeys(self.parents.values()):
            for directory in parent.glob(f"{_CGROUP_NAME_PREFIX}*-*"):
                with contextlib.suppress(OSError):
                    descriptor = lock(directory)
                    try:
                        directory.rmdir()
                    finally:
                        os.close(descriptor)


def _cgroups_of_this_process() -> dict[str, str]:
    """Return controller → path of this process's cgroup. Version 2 has the empty string as controller."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}


def _version_1_parents() -> dict[str, Path]:
    own = _cgroups_of_this_process()
    parents = {name: _CGROUP_ROOT / name / own.get(name, "/").lstrip("/") for name in ("memory", "pids", "cpu")}
    if not os.access(parents["cpu"], os.W_OK):
        del parents["cpu"]
    if denied := [str(path) for path in parents.values() if not os.access(path, os.W_OK)]:
        raise PermissionError(f"not writable: {', '.join(denied)}")
    return parents


def enter_server_cgroup(left: Path | None = None) -> Path:
    """Move this process out of its cgroup, with version 2, so that programs can get cgroups in there.

    Only a cgroup without processes can limit its children. If it contains processes of others, it cannot be used.

    Args:
        left: Cgroup that the process which started this one has left, if it has.

    Returns:
        The cgroup that was left, in which those of the programs are created. Later calls return the same one.

    Raises:
        OSError: If this process cannot be moved, or version 2 is not mounted.
    """
    global _parent_of_programs
    if parent := _parent_of_programs or left:
        _parent_of_programs = parent
        return parent
    own = _cgroups_of_this_process().get("")
    if own is None or not (_CGROUP_ROOT / "cgroup.controllers").exists():
        raise FileNotFoundError(f"not mounted at {_CGROUP_ROOT}")
    cgroup = _CGROUP_ROOT / own.lstrip("/")
    if (cgroup / "cgroup.type").exists():  # absent only in the root cgroup
        (cgroup / SERVER_CGROUP).mkdir(exist_ok=True)
        (cgroup / SERVER_CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    _parent_of_programs = cgroup
    return cgroup


def _version_2_parents() -> dict[str, Path]:
    parent = enter_server_cgroup()
    (parent / "cgroup.subtree_control").write_text("+memory +pids")
    with contextlib.suppress(OSError):
        (parent / "cgroup.subtree_control").write_text("+cpu")
    return {"memory": parent, "pids": parent}
