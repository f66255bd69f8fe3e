"""Resources of a program are released exactly once, whatever fails, and its end is attributed to the right party."""

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolroll.sandbox.protocol import RunCodeRequest
from toolroll.sandbox.server.execution import output
from toolroll.sandbox.server.execution.executor import Executor
from toolroll.sandbox.server.execution.job import JobFailed
from toolroll.sandbox.server.execution.sessions import SessionTable
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle
from toolroll.sandbox.server.isolation import program_users
from toolroll.sandbox.server.isolation.cgroup import Cgroup
from toolroll.sandbox.server.isolation.program_users import ProgramUsers
from toolroll.sandbox.server.job_spec import JobSpec, ProgramSpec
from toolroll.sandbox.server.settings import ServerSettings

PROGRAM: ProgramSpec = {"filename": "main.py", "code": "", "files": {}, "stages": []}
REQUEST = RunCodeRequest(code="", language="python")
NO_FILES = OSError(errno.EMFILE, "too many open files")


class FakeCgroups:
    """Cgroup pool that creates no cgroups, or fails."""

    error: OSError | None = None

    def __init__(self) -> None:
        self.released: list[bool] = []

    def acquire(self, _: int) -> Any:
        if self.error:
            raise self.error
        return Cgroup(cast("Any", None), [], 2)  # its events cannot be read, as if it was removed

    def release(self, _: Cgroup, *, reusable: bool) -> None:
        self.released.append(reusable)


class FakeScratch:
    """Scratch directories that are not created."""

    def __init__(self) -> None:
        self.directories: list[str] = []

    def assign(self, spec: JobSpec) -> None:
        spec["directory"] = "scratch"
        self.directories.append("scratch")

    async def release(self, directory: str) -> None:
        self.directories.remove(directory)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    """Return an executor with user ids, scratch directories and cgroups. It starts no zygotes."""
    monkeypatch.setattr("toolroll.sandbox.server.execution.executor.ScratchDirectories", FakeScratch)
    isolation: Any = SimpleNamespace(plan={"namespaces": False}, users=ProgramUsers(), cgroups=FakeCgroups())
    return Executor(ServerSettings(), isolation, {})


def directories(executor: Executor) -> list[str]:
    return executor._scratch.directories  # type: ignore[union-attr]


async def released(executor: Executor) -> None:
    """Wait until the resources of ended programs are released."""
    await asyncio.sleep(0)
    await asyncio.gather(*executor._tasks)


async def test_user_of_program_that_did_not_start_is_free(executor: Executor) -> None:
    process = executor._create_process(REQUEST, "script", PROGRAM)
    process.failed("Resource temporarily unavailable")
    await released(executor)
    assert executor.isolation.users
    assert executor.isolation.users.acquire() == process.spec["user"]
    assert executor.isolation.cgroups.released == [True]  # type: ignore[union-attr]
    assert not directories(executor)


async def test_user_of_lost_program_is_free_without_processes(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_users, "MAX_USERS", 1)
    process = executor._create_process(REQUEST, "script", PROGRAM)
    process.failed("the zygote that ran the program died", is_lost=True)
    await released(executor)
    assert executor.isolation.cgroups.released == [False]  # type: ignore[union-attr]
    users, user = executor.isolation.users, process.spec["user"]
    assert users
    with monkeypatch.context() as patched:
        patched.setattr(program_users, "_users_of_processes", lambda: {user})
        with pytest.raises(OSError, match="in use"):
            users.acquire()
    assert users.acquire() == user
    with pytest.raises(OSError, match="in use"):
        users.acquire()


def test_users_of_processes_contain_own_user() -> None:
    assert os.getuid() in program_users._users_of_processes()


async def test_missing_cgroup_releases_user_and_directory(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCgroups, "error", NO_FILES)
    with pytest.raises(JobFailed, match="too many open files"):
        executor._create_process(REQUEST, "script", PROGRAM)
    await released(executor)
    assert executor.isolation.users
    assert executor.isolation.users._free == [executor.isolation.users.first]
    assert not directories(executor)


class FakeZygote:
    """Zygote that starts no interpreter. The test reads and writes its end of the session's channel."""

    plan: Any = {"namespaces": True}  # noqa: RUF012
    channel: socket.socket

    def submit(self, process: SandboxProcess, stdin: bytes, output_fds: Sequence[int]) -> None:
        self.channel = socket.socket(fileno=os.dup(output_fds[3]))
        process.on_start()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("call", "possible"), [("pipe", 0), ("pipe", 2), ("socketpair", 0)])
async def test_session_without_descriptors_releases_all(
    call: str, possible: int, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.OutputReader(1).close()  # opens what all readers of this event loop share
    before, module = open_descriptors(), os if call == "pipe" else socket
    create, calls = getattr(module, call), [None] * possible + [NO_FILES]

    def fail() -> Any:
        if error := calls.pop(0):
            raise error
        return create()

    monkeypatch.setattr(module, call, fail)
    with pytest.raises(JobFailed, match="too many open files"):
        executor._start_session(REQUEST, cast("ZygoteHandle", FakeZygote()))
    monkeypatch.undo()
    await released(executor)
    assert open_descriptors() == before
    assert executor.isolation.users
    assert executor.isolation.users._free == [executor.isolation.users.first]
    assert not directories(executor)


class FakeInterpreter:
    """A session in a table, whose interpreter is the test."""

    def __init__(self, executor: Executor) -> None:
        self.zygote = FakeZygote()
        self.table = SessionTable(600)
        self.crashes: list[bool] = []
        self.table.on_closed = lambda _, crashed: self.crashes.append(crashed)
        with self.table.starting("name"):
            create = lambda: executor._start_session(REQUEST, cast("ZygoteHandle", self.zygote))  # noqa: E731
            self.session, _ = self.table.get_or_create("name", create)

    async def run_cell(self, *, ends: bool = False) -> None:
        """Run a cell, which replies or ends the interpreter."""
        running = asyncio.create_task(self.session.run("", "script", 10))
        await asyncio.sleep(0)
        self.end() if ends else self.send(b'{"ok": true}')
        await running

    def send(self, reply: bytes) -> None:
        self.zygote.channel.send(struct.pack(">I", len(reply)) + reply)

    def end(self, status: int = 0) -> None:
        self.zygote.channel.close()
        self.session.process.ended(status, 0.0)


@pytest.fixture
async def interpreter(executor: Executor) -> AsyncIterator[FakeInterpreter]:
    interpreter = FakeInterpreter(executor)
    yield interpreter
    interpreter.end()


async def test_program_that_ends_between_cells_has_crashed(interpreter: FakeInterpreter) -> None:
    await interpreter.run_cell()
    interpreter.end()
    await asyncio.sleep(0)
    assert interpreter.crashes == [True]


async def test_end_in_a_cell_is_only_part_of_its_result(interpreter: FakeInterpreter) -> None:
    await interpreter.run_cell()
    await interpreter.run_cell(ends=True)
    assert interpreter.session.has_ended
    assert interpreter.crashes == [False]


async def test_unsolicited_reply_is_a_crash(interpreter: FakeInterpreter) -> None:
    await interpreter.run_cell()
    interpreter.send(b'{"ok": true}')
    async with asyncio.timeout(10):
        while not interpreter.session.has_ended:
            await asyncio.sleep(0.001)
    interpreter.end(9)
    await asyncio.sleep(0)
    assert interpreter.crashes == [True]


async def test_expired_session_has_not_crashed(interpreter: FakeInterpreter) -> None:
    await interpreter.run_cell()
    interpreter.table.ttl_s = 0
    interpreter.table.end_idle()
    interpreter.end(9)
    await asyncio.sleep(0)
    assert interpreter.crashes == [False]
