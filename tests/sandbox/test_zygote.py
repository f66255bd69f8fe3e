"""The server's handle on a zygote: ending one program affects no other."""

import asyncio
import contextlib
import os
import select
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from sandbox.serving import wait_until
from toolroll.sandbox.server.execution import isolation_tiers
from toolroll.sandbox.server.interpreter import zygote
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle
from toolroll.sandbox.server.job_spec import JobSpec
from toolroll.sandbox.server.settings import ServerSettings

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def zygote_handle() -> AsyncIterator[ZygoteHandle]:
    isolation = await isolation_tiers.find(ServerSettings(python=sys.executable))
    if isolation.cgroups:
        isolation.cgroups.close()
    if not isolation.plan["namespaces"]:
        pytest.skip("NOT TESTED: this machine has no namespaces")
    handle = ZygoteHandle(isolation.plan, sys.executable, ())
    await handle.start()
    yield handle
    handle.close()


def start_program(zygote_handle: ZygoteHandle, seconds: float) -> tuple[SandboxProcess, asyncio.Event]:
    """Start a program that takes `seconds`. Return its process and an event that is set when it has started."""
    spec: JobSpec = {
        "kind": "script",
        "filename": "main.py",
        "code": f"import time; time.sleep({seconds})",
        "files": {},
        "fetch": [],
        "fetch_limit": 0,
        "memory": 1 << 30,
        "memory_by_rlimit": True,
        "stages": [],
    }
    started = asyncio.Event()
    process = SandboxProcess(spec)
    process.on_start = started.set
    null = os.open(os.devnull, os.O_RDWR)
    zygote_handle.submit(process, b"", [null, null, null])
    os.close(null)
    return process, started


async def test_late_kill_spares_the_next_program(zygote_handle: ZygoteHandle) -> None:
    """The next program may be in the same pid namespace before the server learns that the first one has ended."""
    first, started = start_program(zygote_handle, 0.2)
    await started.wait()
    select.select([zygote_handle._socket], [], [], 10)  # its exit event was sent, and is not read yet
    second, _ = start_program(zygote_handle, 1)
    time.sleep(0.5)
    first.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(first.exited, second.exited)
    assert (first.wait_status, second.wait_status) == (0, 0)


async def test_many_kills_spare_other_programs(zygote_handle: ZygoteHandle) -> None:
    """More requests than the socket to the zygote can hold."""
    many = [start_program(zygote_handle, 60) for _ in range(40)]
    other, other_started = start_program(zygote_handle, 1)
    for started in [*(started for _, started in many), other_started]:
        await started.wait()
    with contextlib.suppress(BlockingIOError):
        while True:  # an unknown job
            zygote_handle._socket.send(zygote.REQUEST.pack(zygote.KILL, 10**9, 0))
    for process, _ in many:
        process.kill()
    async with asyncio.timeout(20):
        await asyncio.gather(*(process.exited for process, _ in many), other.exited)
    assert {process.wait_status for process, _ in many} == {9}
    assert other.wait_status == 0


async def test_unresponsive_zygote_is_replaced(zygote_handle: ZygoteHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.sandbox.server.interpreter.zygote_handle.ZYGOTE_RESPONSE_TIMEOUT_S", 0.5)
    one, started = start_program(zygote_handle, 60)
    await started.wait()
    below = [psutil.Process(zygote_handle.pid), *psutil.Process(zygote_handle.pid).children(recursive=True)]
    for process in below[:2]:  # the zygote itself, and the process that waits for it
        process.suspend()
    one.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(one.exited, zygote_handle.closed.wait())
    assert one.wait_status is None
    assert "died" in one.failure
    assert wait_until(lambda: not any(process.is_running() for process in below[1:]))


async def test_kill_ends_the_program(zygote_handle: ZygoteHandle) -> None:
    one, started = start_program(zygote_handle, 60)
    await started.wait()
    other, _ = start_program(zygote_handle, 0.5)
    one.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(one.exited, other.exited)
    assert (one.wait_status, other.wait_status) == (9, 0)
