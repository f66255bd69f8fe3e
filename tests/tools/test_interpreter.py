"""An interpreter that remembers: on our server, on a server that keeps no sessions, and when a session is lost."""

import asyncio
import contextlib
import math
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sandbox.proxy import Proxy
from sandbox.serving import Serving, serving, wait_until

from toolroll.errors import InfraFault, PolicyFault
from toolroll.tools.instance import ToolInstance
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool


def stateful(url: str, **more: object) -> SandboxFusionTool:
    return SandboxFusionTool({"sandbox_fusion_url": url, "stateful": True, "default_timeout": 5, **more})


async def say(instance: ToolInstance, code: str) -> str:
    return str((await instance.execute({"code": code})).response.text)


def sessions_of(url: str) -> int:
    """How many sessions the server keeps, by what it tells Prometheus."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("toolroll_sandbox_sessions ")).split()[1]))


@contextlib.asynccontextmanager
async def on(kind: str, sandbox_url: str) -> AsyncIterator[SandboxFusionTool]:
    """A stateful tool, on our server or on one that knows only what SandboxFusion knows."""
    if kind == "sessions":
        yield stateful(sandbox_url)
    else:
        async with Proxy(sandbox_url, plain=True) as proxy:
            yield stateful(proxy.url)


KINDS = pytest.mark.parametrize("kind", ["sessions", "plain SandboxFusion"])


@KINDS
async def test_twenty_turns_that_build_on_each_other(kind: str, sandbox_url: str) -> None:
    async with on(kind, sandbox_url) as tool, ToolInstance(tool) as instance:
        assert await say(instance, "import math\nfacts = [1]\nprint('begun')") == "begun"
        for turn in range(1, 20):
            said = await say(instance, f"print('turn', {turn})\nfacts.append(facts[-1] * {turn})\nfacts[-1]")
            assert said == f"turn {turn}\n{math.factorial(turn)}"


@KINDS
async def test_two_trajectories_never_see_each_others_variables(kind: str, sandbox_url: str) -> None:
    async with on(kind, sandbox_url) as tool, ToolInstance(tool) as one, ToolInstance(tool) as two:
        for turn in range(5):
            await asyncio.gather(say(one, f"x = 'one {turn}'; open('f', 'w').write(x)"), say(two, f"x = 'two {turn}'"))
            assert await asyncio.gather(say(one, "x"), say(two, "x")) == [f"'one {turn}'", f"'two {turn}'"]
        assert (await say(two, "open('f')")).endswith("No such file or directory: 'f'")
        assert (await say(two, "y")).endswith("NameError: name 'y' is not defined")


@KINDS
async def test_what_a_failed_program_did_before_it_failed_is_kept(kind: str, sandbox_url: str) -> None:
    async with on(kind, sandbox_url) as tool, ToolInstance(tool) as instance:
        await say(instance, "x = 1")
        failed = await say(instance, "print('before')\nx = 2\ndef f():\n    return x / 0\nf()")
        assert failed.startswith("before\nTraceback (most recent call last):\n")
        assert failed.endswith("ZeroDivisionError: division by zero")
        assert "return x / 0" in failed, "its own lines"
        assert "_replay" not in failed
        assert await say(instance, "x") == "2"
        assert "SyntaxError" in await say(instance, "x +")
        assert await say(instance, "x") == "2"


@KINDS
async def test_a_program_out_of_time_leaves_the_others_results(kind: str, sandbox_url: str) -> None:
    tool_settings = {"default_timeout": 0.5}
    async with Proxy(sandbox_url, plain=kind != "sessions") as proxy:
        tool = stateful(proxy.url, **tool_settings)
        async with ToolInstance(tool) as instance:
            await say(instance, "x = 1")
            assert "longer than 0.5 s" in await say(instance, "print('so far', flush=True)\nwhile True: pass")
            assert await say(instance, "x") == "1"


@KINDS
async def test_calls_at_once_go_one_after_another(kind: str, sandbox_url: str) -> None:
    async with on(kind, sandbox_url) as tool, ToolInstance(tool) as instance:
        await say(instance, "order = []")
        await asyncio.gather(*(say(instance, f"order.append({number})") for number in range(8)))
        assert await say(instance, "order") == str(list(range(8)))


async def test_a_session_is_gone_after_release() -> None:
    with serving() as server:
        tool, left = stateful(server.url), []
        for _ in range(4):
            async with ToolInstance(tool) as one, ToolInstance(tool) as two, ToolInstance(tool):
                await asyncio.gather(say(one, "1"), say(two, "1"))
                assert sessions_of(server.url) == 2
            assert sessions_of(server.url) == 0
            await asyncio.sleep(0.3)
            left.append(len(server.processes()))
        assert left[-1] <= left[0], f"processes, from time to time: {left}"


async def test_a_session_is_gone_after_release_though_its_call_was_cancelled() -> None:
    with serving() as server:
        tool = stateful(server.url, default_timeout=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), ToolInstance(tool) as instance:
                await say(instance, "import time; time.sleep(30)")
        assert wait_until(lambda: sessions_of(server.url) == 0)


async def test_a_program_that_ends_its_interpreter_is_told(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        await say(instance, "x = 1")
        said = await say(instance, "import os; os._exit(3)")
        assert said == (
            "[The program failed with exit status 3.]\n"
            "[The interpreter has ended: what earlier programs had defined is gone.]"
        )
        assert (await say(instance, "x")).endswith("NameError: name 'x' is not defined"), "and it isn't rebuilt"
        await say(instance, "x = 2")
        assert await say(instance, "x") == "2"


async def test_memory_is_the_sessions(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url, memory_limit_mb=100)) as instance:
        said = await say(instance, "x = bytearray(400_000_000)\nlen(x)")
        assert "[The program was stopped: it reached its memory limit of 100 MB." in said


def restarted(server: Serving) -> "contextlib.AbstractContextManager[Serving]":
    """The server, killed and started again at the same address."""
    server.process.kill()
    server.process.wait()
    return serving("--port", server.url.rsplit(":", 1)[1])


async def test_a_session_that_was_lost_with_its_server_is_rebuilt() -> None:
    with serving() as first:
        tool = stateful(first.url)
        async with ToolInstance(tool) as instance:
            await say(instance, "x = 1")
            assert "ZeroDivisionError" in await say(instance, "x = 2; 1 / 0")
            await say(instance, "y = x + 1")
            with restarted(first) as second:
                assert await say(instance, "x, y") == "(2, 3)"
                assert sessions_of(second.url) == 1, "the one that was found empty is gone"
                assert await say(instance, "y += 1; y") == "4"
            with pytest.raises(InfraFault, match="can't be reached"):
                await instance.execute({"code": "y"}, deadline=asyncio.get_running_loop().time() + 1)


async def test_more_trajectories_than_the_server_keeps_sessions_still_come_out_right() -> None:
    with serving("--sessions", "2") as server:
        tool = stateful(server.url)
        async with contextlib.AsyncExitStack() as stack:
            instances = [await stack.enter_async_context(ToolInstance(tool)) for _ in range(4)]
            for turn in range(4):
                for number, instance in enumerate(instances):
                    assert await say(instance, f"x = globals().get('x', {number}) + 10; x") == str(
                        number + 10 * turn + 10
                    )


async def test_many_at_once_for_few_sessions_come_out_right() -> None:
    with serving("--sessions", "3") as server:
        tool = stateful(server.url)

        async def trajectory(number: int) -> list[str]:
            async with ToolInstance(tool) as instance:
                return [await say(instance, code) for code in (f"x = {number}", *["x += 100; x"] * 3)]

        told = await asyncio.gather(*(trajectory(number) for number in range(5)))
        assert told == [["[No output.]", *(str(number + 100 * turn) for turn in (1, 2, 3))] for number in range(5)]
        assert sessions_of(server.url) == 0


async def test_a_session_that_its_program_ends_later_is_told_and_not_rebuilt(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        await say(instance, "x = 1")
        await say(instance, "import os, threading; threading.Timer(0.1, os._exit, [1]).start()")
        await asyncio.sleep(0.5)
        said = await say(instance, "print('x' in globals())")
        assert said == "False\n[The interpreter has ended: what earlier programs had defined is gone.]"
        assert (await say(instance, "x")).endswith("name 'x' is not defined")


async def test_without_sessions_a_program_that_ends_the_interpreter_is_told_too(sandbox_url: str) -> None:
    async with on("plain SandboxFusion", sandbox_url) as tool, ToolInstance(tool) as instance:
        await say(instance, "x = 1")
        await say(instance, "print('bye', flush=True); import os; os._exit(0)")
        said = await say(instance, "print('hello')")
        assert said == "hello\n[The interpreter has ended: what earlier programs had defined is gone.]"
        assert await say(instance, "print('again')") == "again"


async def test_a_call_waits_for_the_one_before_it_no_longer_than_its_deadline(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        first = asyncio.create_task(say(instance, "import time; time.sleep(4)"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(PolicyFault, match="took all the time"):
            await instance.execute({"code": "1"}, deadline=began + 0.5)
        assert time.monotonic() - began < 3
        await first


async def test_release_needs_no_slot_and_asks_nobody_where_nothing_was_run() -> None:
    with serving() as server:
        tool = stateful(server.url, rate_limit=1)
        async with ToolInstance(tool) as busy:
            async with ToolInstance(tool) as instance:
                await say(instance, "1")
                running = asyncio.create_task(say(busy, "import time; time.sleep(4)"))
                await asyncio.sleep(0.3)
                began = time.monotonic()
            assert time.monotonic() - began < 3
            assert sessions_of(server.url) == 1
            await running
    began = time.monotonic()
    async with ToolInstance(stateful(server.url)):
        pass
    assert time.monotonic() - began < 2, "though it is gone"


CELLS = st.lists(
    st.sampled_from(
        [
            "x = 1",
            "x += 1",
            "x",
            "print(x)",
            "print('a', end='')",
            "def f(): return x * 2",
            "f()",
            "del x",
            "1 / 0",
            "x = 5; raise ValueError(x)",
            "class A: pass\na = A()",
            "import math; math.pi",
            "[f() for _ in range(2)]",
            "x +",
            "import sys; print('e', file=sys.stderr)",
            "exit(3)",
            "None",
            "x;",
            "import sys; sys.stdout.write('ab')",
            "import pickle; pickle.loads(pickle.dumps(a)).__class__ is A",
            "if x > 2:\n    print('more')\nelse:\n    x = 9",
        ]
    ),
    max_size=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cells=CELLS)
@example(cells=["x = 1", "x;", "x", "import sys; sys.stdout.write('ab')"])
def test_replaying_comes_to_the_same_as_a_session(sandbox_url: str, cells: list[str]) -> None:
    """What the model reads is the same on a server without sessions, but for the frames of tracebacks."""

    async def both() -> None:
        async with (
            on("sessions", sandbox_url) as one,
            on("plain", sandbox_url) as two,
            ToolInstance(one) as kept,
            ToolInstance(two) as replayed,
        ):
            for cell in cells:
                said = [await say(instance, cell) for instance in (kept, replayed)]
                ends = [text.splitlines()[-1] for text in said]
                assert ends[0] == ends[1]
                if "Traceback" not in said[0] and "SyntaxError" not in said[0]:
                    assert said[0] == said[1]

    asyncio.run(both())
