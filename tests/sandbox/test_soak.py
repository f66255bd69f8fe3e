"""Correct programs, failing programs and attacks run next to each other: no result is wrong or lost, nothing grows.

pytest tests/sandbox/test_soak.py --soak-seconds=600
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from textwrap import dedent

import pytest

from sandbox.serving import Serving, serving, wait_until
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import ExecutionOutcome

pytestmark = pytest.mark.sandbox

CONCURRENT_REQUESTS = 8
WARM_UP_FRACTION = 0.2
"""Fraction of the time after which memory is measured for the first time. Caches are full by then."""
MAX_GROWTH = 1.25

PROGRAMS: dict[str, tuple[str, ExecutionOutcome]] = {
    "exception": ("1 / 0", ExecutionOutcome.FAILED),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", ExecutionOutcome.FAILED),
    "endless loop": ("while True: pass", ExecutionOutcome.TIMEOUT),
    "sleep": ("import time; time.sleep(60)", ExecutionOutcome.TIMEOUT),
    "too much memory": ("x = bytearray(10**10)", ExecutionOutcome.OUT_OF_MEMORY),
    "endless output": ("while True: print('x' * 10_000)", ExecutionOutcome.TIMEOUT),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ExecutionOutcome.TIMEOUT),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.close(1)\n    os.close(2)\n    time.sleep(600)",
        ExecutionOutcome.OK,
    ),
    "kills everything": (
        "import os, signal\nos.kill(-1, 9)\nos.kill(os.getpid(), signal.SIGKILL)",
        ExecutionOutcome.FAILED,
    ),
    "files": (
        """
        for number in range(500):
            with open(f"file{number}", "wb") as file:
                file.write(b"x" * 10_000)
        """,
        ExecutionOutcome.OK,
    ),
    "maps and forks": (
        """
        import mmap, os, time
        maps = [mmap.mmap(-1, 4096) for _ in range(5_000)]
        for _ in range(20):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
        """,
        ExecutionOutcome.TIMEOUT,
    ),
}
"""Name → Python program and its outcome."""


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving("--capacity", "4", "--sessions", "4", "--session-ttl", "5") as running:
        yield running


# Each function runs something and returns a wrong result, or None.


async def run_correct_program(client: SandboxClient, number: int) -> object:
    done = await client.run(f"print({number} * 7)", run_timeout=2)
    return None if (done.outcome, done.stdout) == (ExecutionOutcome.OK, f"{number * 7}\n") else done


async def run_command(client: SandboxClient, number: int) -> object:
    done = await client.run(f"yes {number} | head -3 | wc -l", "bash", run_timeout=2)
    return None if (done.outcome, done.stdout.strip()) == (ExecutionOutcome.OK, "3") else done


async def run_session(client: SandboxClient, number: int) -> object:
    session = client.new_session()
    await client.run(f"x = {number}", session_id=session)
    done = await client.run("x + 1", session_id=session)
    await client.end_session(session)
    return None if done.session_is_new or done.stdout == f"{number + 1}\n" else done


async def run_notebook(client: SandboxClient, number: int) -> object:
    notebook = await client.run_jupyter([f"y = {number}", "print(y)"])
    return None if [cell.stdout for cell in notebook.cells] == ["", f"{number}\n"] else notebook


def failing(name: str) -> Callable[[SandboxClient, int], Awaitable[object]]:
    code, outcome = PROGRAMS[name]

    async def run(client: SandboxClient, number: int) -> object:
        done = await client.run(dedent(code), run_timeout=0.5, memory_limit_mb=256)
        return None if done.outcome is outcome else done

    return run


async def test_soak(server: Serving, request: pytest.FixtureRequest, report_figure: Callable[[str], None]) -> None:
    seconds: float = request.config.getoption("soak_seconds")
    correct = {"program": run_correct_program, "command": run_command, "session": run_session, "notebook": run_notebook}
    kinds = [*correct.items()] * 3 + [(name, failing(name)) for name in PROGRAMS]
    done, wrong, chance = Counter[str](), list[str](), random.Random(1)
    ends_at = time.monotonic() + seconds
    memory_before = 0

    async def send_requests() -> None:
        while time.monotonic() < ends_at:
            name, run = chance.choice(kinds)
            number = chance.randrange(10**6)
            if (result := await run(client, number)) is not None:
                wrong.append(f"{name}: {result}")
            done[name] += 1

    def memory() -> int:
        return sum(front.memory_info().rss for front in server.fronts())

    async with SandboxClient(server.url) as client:
        senders = [asyncio.create_task(send_requests()) for _ in range(CONCURRENT_REQUESTS)]
        await asyncio.sleep(seconds * WARM_UP_FRACTION)
        processes, memory_before = len(server.processes()), memory()
        await asyncio.gather(*senders)
        ping = await client.ping()
    report_figure(f"{done.total():,} requests in {seconds:g} s, {len(wrong)} wrong")
    assert not wrong
    assert (ping.running, ping.waiting) == (0, 0)
    assert memory() < memory_before * MAX_GROWTH
    assert wait_until(lambda: len(server.processes()) <= processes)
