"""A warm interpreter, as the front has it: what ends one program ends no other."""

import asyncio
import marshal
import os
import sys
import time
from collections.abc import AsyncIterator

import pytest

from toolroll.sandbox.server import tier
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
    time.sleep(0.7)  # it hears nothing meanwhile
    second, _ = begin(interpreter, 1)
    time.sleep(0.5)
    first.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(first.gone, second.gone)
    assert (first.status, second.status) == (0, 0)


async def test_a_program_that_is_ended_is_ended(interpreter: Interpreter) -> None:
    one, begun = begin(interpreter, 60)
    await begun.wait()
    other, _ = begin(interpreter, 0.5)
    one.kill()
    async with asyncio.timeout(10):
        await asyncio.gather(one.gone, other.gone)
    assert (one.status, other.status) == (9, 0)
