"""Isolate a process before it runs a program.

Isolation has two steps, which cannot be undone:

1. `isolate_zygote`, once for each zygote: a root file system with only the readable paths, an unprivileged user, and a
   user namespace that permits only to create further namespaces.
2. `ProgramJail.enter` and `ProgramJail.drop_privileges`, for each program: a private /tmp, /proc, network and user
   namespace; then no capabilities, Landlock and seccomp. The order matters, since each restriction forbids the steps
   before it.

Without namespaces, a program is isolated by Landlock, seccomp and, if the server runs as root, a separate user.

A step that fails raises OSError, and the program does not run.

A clone copies every page of the zygote's memory that it writes to, and Python writes to every object that it uses. This
takes longer than the system calls. The zygote therefore prepares whatever does not depend on the program.

Imports only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from toolroll.sandbox.server.isolation import landlock, rootfs, syscalls
from toolroll.sandbox.server.isolation.memory_headroom import HEADROOM_BYTES
from toolroll.sandbox.server.job_spec import WORK, JailPlan, JobSpec

NOBODY_UID = 65534
_ZYGOTE_UID = 0
"""User and group id of the zygote in its user namespace."""
_PROGRAM_ID_MAP = b"1000 %10d 1"
"""Map of user or group ids of a program's user namespace, from the id in the zygote's."""
STACK_BYTES = 8 << 20
"""Soft limit of the stack size, which programs can raise."""
_SIGNALS_THAT_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
PROGRAM_NAMESPACES = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWNET
"""Namespaces created when the zygote clones itself. `enter` adds a user namespace; a pid namespace is joined."""
_ZYGOTE_NAMESPACES = PROGRAM_NAMESPACES | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
"""Namespaces of the zygote. Programs share its host name and the root of its cgroups, which they cannot change."""


def reset_process_attributes() -> None:
    """Give this process the attributes of a login shell. Those of the server depend on how it was started."""
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in _SIGNALS_THAT_PYTHON_IGNORES:
            signal.signal(number, signal.SIG_DFL)
    for kind, soft_limit in ((resource.RLIMIT_STACK, STACK_BYTES), (resource.RLIMIT_CPU, resource.RLIM_INFINITY)):
        hard = _hard_limit(kind)
        resource.setrlimit(kind, (_at_most(soft_limit, hard), hard))


def restore_default_signals() -> None:
    """Restore the signals that Python ignores, before another program is executed."""
    for number in _SIGNALS_THAT_PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)


def isolate_zygote(plan: JailPlan) -> None:
    """Isolate a zygote. With namespaces, returns in a child process, and the caller only waits for that child."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not plan["namespaces"]:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        syscalls.make(_prepare_filter(plan["seccomp"]))
        return
    if os.geteuid() == 0:
        # The root file system is built as root: only root can traverse every directory of the host.
        syscalls.unshare(_ZYGOTE_NAMESPACES)
        _build_root(plan)
        with _writer_of_user_maps(plan["users"]) as write_maps:
            syscalls.set_ids(NOBODY_UID)
            _enter_user_namespace_as_root(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID, write_maps)
    else:
        _enter_user_namespace_as_root(_ZYGOTE_NAMESPACES | syscalls.CLONE_NEWPID)
        _build_root(plan)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # again, because a change of user clears it
    # The zygote has its own pid namespace: it can enter the pid namespaces of programs and return, and all of them end
    # together with it.
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    syscalls.mount("tmpfs", rootfs.TMP, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=16m")
    rootfs.bind_paths_below_tmp(rootfs.paths_below_tmp(plan["readable"]))
    syscalls.make(_prepare_filter(plan["seccomp"]))


class MemoryUse(NamedTuple):
    """Memory of a process, in bytes."""

    address_space: int
    data: int
    """Private writable part of the address space."""

    @classmethod
    def current(cls) -> MemoryUse:
        """Return the memory of this process."""
        with open("/proc/self/statm") as file:
            size, _, _, _, _, data, _ = file.read().split()
        return cls(*(int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in (size, data)))


class ProgramJail:
    """The jail of programs. Created by the zygote after `isolate_zygote`; its methods are called in clones.

    Args:
        plan: How programs are isolated.
        zygote_memory: Memory of the zygote, which its clones inherit.
    """

    def __init__(self, plan: JailPlan, zygote_memory: MemoryUse) -> None:
        self.plan = plan
        limits = plan["limits"]
        # If the machine runs out of memory, programs are killed before servers.
        self._prefer_for_oom_kill = syscalls.prepare_write("/proc/self/oom_score_adj", b"1000")
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        tmpfs_options = f"mode=1777,size={limits['disk']},nr_inodes={limits['inodes']}"
        self._set_up_system = [
            syscalls.prepare_mount("tmpfs", rootfs.TMP, "tmpfs", flags, tmpfs_options),
            syscalls.prepare_mount("proc", "/proc", "proc", flags | syscalls.MS_NOEXEC),
            *syscalls.prepare_loopback_up(),
        ]
        self._paths_below_tmp = rootfs.paths_below_tmp(plan["readable"])
        self._user = ctypes.c_int()
        self._set_user = syscalls.prepare_set_ids(self._user)
        self._id_map = ctypes.create_string_buffer(len(_PROGRAM_ID_MAP % 0))
        self._become_user = [
            *_prepare_user_namespace(self._id_map, self._id_map),
            syscalls.prepare_mkdir(rootfs.SHARED_MEMORY),
            *syscalls.prepare_working_directory(WORK),
        ]
        self._drop_privileges = self._prepare_drop_privileges(WORK) if plan["namespaces"] else []
        self._inherited = zygote_memory
        self._data_limit = _MemoryLimit(resource.RLIMIT_DATA)
        self._address_space_limit = _MemoryLimit(resource.RLIMIT_AS)
        self._rlimits = [self._data_limit.call, self._address_space_limit.call]
        for kind, limit in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_FSIZE, limits["disk"]),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 1024),  # also limits timers
            (resource.RLIMIT_MEMLOCK, 1 << 16),
        ):
            limit = _at_most(limit, _hard_limit(kind))
            self._rlimits.append(syscalls.prepare_rlimit(kind, syscalls.RLIMIT.pack(limit, limit)))

    def enter(self, spec: JobSpec) -> str:
        """Move this process, a fresh clone of the zygote, into the jail of its program.

        Returns:
            The program's working directory, which is now the current directory.
        """
        try:  # noqa: SIM105 (needs less memory than contextlib.suppress)
            syscalls.make(self._prefer_for_oom_kill)
        except OSError:
            pass
        if not self.plan["namespaces"]:
            os.chdir(spec["directory"])
            return spec["directory"]
        syscalls.make(self._set_up_system)
        rootfs.bind_paths_below_tmp(self._paths_below_tmp)
        user = spec.get("user", _ZYGOTE_UID)
        if user != _ZYGOTE_UID:
            self._user.value = user
            syscalls.make(self._set_user)
        self._id_map.raw = _PROGRAM_ID_MAP % user
        syscalls.make(self._become_user)
        return WORK

    def drop_privileges(self, directory: str, *, keep: Iterable[int] = ()) -> None:
        """Drop every right that the program must not have, for this process and its future children.

        Can be called twice: the second set of restrictions applies in addition to the first.

        Args:
            directory: Working directory of the program.
            keep: Capabilities to keep, without namespaces.
        """
        syscalls.make(self._drop_privileges or self._prepare_drop_privileges(directory, keep))

    def _prepare_drop_privileges(self, directory: str, keep: Iterable[int] = ()) -> list[syscalls.PreparedCall]:
        calls = syscalls.prepare_drop_capabilities(keep)
        if self.plan["landlock"] and self.plan["namespaces"]:
            calls += landlock.prepare(self.plan["landlock"], ["/"], rootfs.TMP, ["/dev"], network=True)
        elif self.plan["landlock"]:
            readable = [*self.plan["readable"], "/proc"]
            calls += landlock.prepare(self.plan["landlock"], readable, directory, landlock.DEVICES, network=False)
        return calls + _prepare_filter(self.plan["seccomp_of_program"])

    def set_rlimits(self, spec: JobSpec, *, is_python: bool) -> None:
        """Set the resource limits of the process that becomes the program.

        This must not happen before `enter`: the limits that a process has when it creates a user namespace apply to all
        namespaces that its user creates, together.

        Args:
            spec: The program.
            is_python: Whether the process remains a clone of the zygote. Then memory that it has inherited does not
                count, and the soft limit is lower than the hard limit by the memory headroom: the program gets a
                MemoryError that it can handle, or a traceback, instead of being killed.
        """
        memory = spec["memory"]
        if is_python:
            self._data_limit.set(memory + self._inherited.data, HEADROOM_BYTES)
            if spec["memory_by_rlimit"]:
                self._address_space_limit.set(memory + self._inherited.address_space, HEADROOM_BYTES)
        elif spec["memory_by_rlimit"]:
            # The address space is not limited: garbage-collected runtimes reserve far more of it than they use.
            self._data_limit.set(memory, 0)
        syscalls.make(self._rlimits)


class _MemoryLimit:
    """A limit that differs between programs, infinite unless it is set."""

    def __init__(self, kind: int) -> None:
        self.hard = _hard_limit(kind)
        self.value = ctypes.create_string_buffer(syscalls.RLIMIT.pack(self.hard, self.hard), syscalls.RLIMIT.size)
        self.call = syscalls.prepare_rlimit(kind, self.value)

    def set(self, limit: int, headroom: int) -> None:
        hard = _at_most(limit + headroom, self.hard)
        self.value.raw = syscalls.RLIMIT.pack(hard - headroom, hard)


def _hard_limit(kind: int) -> int:
    return resource.getrlimit(kind)[1]


def _at_most(limit: int, hard: int) -> int:
    """Return the lower of two resource limits, of which either can be infinite."""
    if resource.RLIM_INFINITY in (limit, hard):
        return hard if limit == resource.RLIM_INFINITY else limit
    return min(limit, hard)


def environment(plan: JailPlan, directory: str, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the complete environment of a program. It contains no variables of the server."""
    home = directory if not plan["namespaces"] else rootfs.TMP
    return {"PATH": plan["path"], "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "USER": "sandbox",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **extra}  # fmt: skip


def _build_root(plan: JailPlan) -> None:
    socket.sethostname("sandbox")
    rootfs.build(plan["readable"])


def _enter_user_namespace_as_root(other_namespaces: int, write_maps: Callable[[], None] | None = None) -> None:
    """Enter a new user namespace as its root, with all capabilities inside it and none outside.

    Args:
        other_namespaces: Other namespaces to create.
        write_maps: Writes the user maps, if the namespace is to have more than one user.
    """
    if write_maps:
        syscalls.make(_prepare_unshare_user(other_namespaces))
        write_maps()
    else:
        uid_map, gid_map = (b"%d %d 1" % (_ZYGOTE_UID, number) for number in (os.geteuid(), os.getegid()))
        syscalls.make(_prepare_user_namespace(uid_map, gid_map, other_namespaces))


def _prepare_user_namespace(
    uid_map: syscalls.Buffer, gid_map: syscalls.Buffer, other_namespaces: int = 0
) -> list[syscalls.PreparedCall]:
    """Return calls that enter a new user namespace with one user and one group."""
    return [
        *_prepare_unshare_user(other_namespaces),
        *syscalls.prepare_write("/proc/self/setgroups", b"deny"),
        *syscalls.prepare_write("/proc/self/uid_map", uid_map),
        *syscalls.prepare_write("/proc/self/gid_map", gid_map),
    ]


def _prepare_unshare_user(other_namespaces: int) -> list[syscalls.PreparedCall]:
    return [
        # Otherwise /proc/self belongs to root and is not writable.
        syscalls.prepare_prctl(syscalls.PR_SET_DUMPABLE, 1),
        syscalls.prepare("unshare", syscalls.CLONE_NEWUSER | other_namespaces),
    ]


@contextlib.contextmanager
def _writer_of_user_maps(users: tuple[int, int] | None) -> Iterator[Callable[[], None] | None]:
    """Return a function that maps users of programs into the user namespace of this process, if there are any.

    Only a process outside of the namespace, with all privileges, can write such maps. It is started here.
    """
    if users is None:
        yield None
        return
    first, count = users
    maps = f"0 {NOBODY_UID} 1\n{first} {first} {count}".encode()
    parent = os.getpid()
    (request_reader, request_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
    if (helper := os.fork()) == 0:
        try:
            os.close(request_writer)
            if os.read(request_reader, 1):
                for kind in ("uid", "gid"):
                    syscalls.make(syscalls.prepare_write(f"/proc/{parent}/{kind}_map", maps))
                os.write(answer_writer, b"1")
        finally:
            os._exit(0)
    os.close(request_reader)
    os.close(answer_writer)

    def write_maps() -> None:
        os.write(request_writer, b"1")
        if not os.read(answer_reader, 1):
            raise OSError("the users of programs could not be mapped")

    try:
        yield write_maps
    finally:
        os.close(request_writer)
        os.close(answer_reader)
        os.waitpid(helper, 0)


def _prepare_filter(program: str) -> list[syscalls.PreparedCall]:
    return [syscalls.prepare_seccomp(base64.b64decode(program))] if program else []
