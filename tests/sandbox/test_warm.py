"""A warm interpreter, as the front has it: what ends one program ends no other."""

import asyncio
import contextlib
import marshal
import os
import select
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from sandbox.serving import wait_until
from toolroll.sandbox.server import tier, warm
from toolroll.sandbox.server.interpreter import Interpreter
from toolroll.sandbox.server.process import Process, file_of
from toolroll.sandbox.server.server import prefixes
from toolroll.sandbox.server.settings import ServerSettings
from toolroll.sandbox.server.spec import SPEC_FORMAT, Spec


@pytest.fixture
async def interpreter() -> AsyncIterator[Interpreter]:
    where = await asyncio.to_thread(prefixes, sys.executable)
    isolation = await tier.find(ServerSettings(), tier.readable_paths(sys.executable, where, []))
    if isolation.cgroups:
        isolation.cgroups.close()
    if not isolation.plan["namespaces"]:
        pytest.skip("NOT TESTED: there are no namespaces here")
    started = Interpreter(isolation.plan, sys.executable, ())
    await started.start()
    yield started
    started.close()


def begin(interpreter: Interpreter, seconds: float) -> tuple[Process, asyncio.Event]:
    """A program that takes so long, and when it has begun."""
    spec: Spec = {
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
    begun = asyncio.Event()
    process = Process(begun=begun.set)
    null, content = os.open(os.devnull, os.O_RDWR), file_of(marshal.dumps(dict(spec), SPEC_FORMAT))
    interpreter.give(process, [null, null, null, content, null], [])
    os.close(null)
    os.close(content)
    return process, begun


async def test_a_program_that_is_ended_just_as_it_ends_does_not_take_the_next_one_along(
    interpreter: Interpreter,
) -> None:
    """The next may be in the same pid namespace before the front hears that the first has ended."""
    first, begun = begin(interpreter, 0.2)
    await begun.wait()
    select.select([interpreter._front], [], [], 10)  # it has ended, and the front has yet to hear it
    second, _ = begin(interpreter, 1)
    time.sleep(0.5)
    first.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(first.gone, second.gone)
    assert (first.status, second.status) == (0, 0)


async def test_many_are_ended_at_once_and_the_others_go_on(interpreter: Interpreter) -> None:
    """More than there is room for in the socket to the interpreter."""
    many = [begin(interpreter, 60) for _ in range(40)]
    other, others_beginning = begin(interpreter, 1)
    for begun in [*(begun for _, begun in many), others_beginning]:
        await begun.wait()
    with contextlib.suppress(BlockingIOError):
        while True:  # a job that it has never heard of
            interpreter._front.send(warm.ORDER.pack(warm.END, 10**9, 0))
    for process, _ in many:
        process.kill()
    async with asyncio.timeout(20):
        await asyncio.gather(*(process.gone for process, _ in many), other.gone)
    assert {process.status for process, _ in many} == {9}
    assert other.status == 0


async def test_an_interpreter_that_does_not_end_a_program_is_replaced(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolroll.sandbox.server.interpreter.ANSWER_WITHIN", 0.5)
    one, begun = begin(interpreter, 60)
    await begun.wait()
    below = [psutil.Process(interpreter.pid), *psutil.Process(interpreter.pid).children(recursive=True)]
    for process in below[:2]:  # the interpreter itself, and who waits for it
        process.suspend()
    one.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(one.gone, interpreter.ended.wait())
    assert one.status is None
    assert "died" in one.failure
    assert wait_until(lambda: not any(process.is_running() for process in below[1:]))


async def test_a_program_that_is_ended_is_ended(interpreter: Interpreter) -> None:
    one, begun = begin(interpreter, 60)
    await begun.wait()
    other, _ = begin(interpreter, 0.5)
    one.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(one.gone, other.gone)
    assert (one.status, other.status) == (9, 0)
