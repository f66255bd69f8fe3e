"""Tests of stateful interpreters: with sessions, without sessions, and with sessions that are lost."""

import asyncio
import contextlib
import math
import time
import urllib.request
from collections.abc import AsyncIterator

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sandbox.fault_server import FaultServer
from sandbox.proxy import Proxy
from sandbox.serving import Serving, name_process, serving, wait_until
from strategies import scaled

from toolroll.errors import InfraFault, PolicyFault
from toolroll.tools.instance import ToolInstance
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

pytestmark = pytest.mark.sandbox


def stateful(url: str, **more: object) -> SandboxFusionTool:
    return SandboxFusionTool({"sandbox_fusion_url": url, "stateful": True, "default_timeout": 5, **more})


async def run(instance: ToolInstance, code: str) -> str:
    return str((await instance.execute({"code": code})).response.text)


def sessions_of(url: str) -> int:
    """Return the number of sessions of the server, from its metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("toolroll_sandbox_sessions ")).split()[1]))


@contextlib.asynccontextmanager
async def tool_on(server: str, sandbox_url: str) -> AsyncIterator[SandboxFusionTool]:
    """Yield a stateful tool on a server with sessions, or on one without them such as SandboxFusion."""
    if server == "sessions":
        yield stateful(sandbox_url)
    else:
        async with Proxy(sandbox_url, plain=True) as proxy:
            yield stateful(proxy.url)


SERVERS = pytest.mark.parametrize("server", ["sessions", "plain SandboxFusion"])


@SERVERS
async def test_variables_last_for_twenty_turns(server: str, sandbox_url: str) -> None:
    async with tool_on(server, sandbox_url) as tool, ToolInstance(tool) as instance:
        assert await run(instance, "import math\nfacts = [1]\nprint('started')") == "started"
        for turn in range(1, 20):
            output = await run(instance, f"print('turn', {turn})\nfacts.append(facts[-1] * {turn})\nfacts[-1]")
            assert output == f"turn {turn}\n{math.factorial(turn)}"


@SERVERS
async def test_trajectories_do_not_share_variables(server: str, sandbox_url: str) -> None:
    async with tool_on(server, sandbox_url) as tool, ToolInstance(tool) as one, ToolInstance(tool) as two:
        for turn in range(5):
            await asyncio.gather(run(one, f"x = 'one {turn}'; open('f', 'w').write(x)"), run(two, f"x = 'two {turn}'"))
            assert await asyncio.gather(run(one, "x"), run(two, "x")) == [f"'one {turn}'", f"'two {turn}'"]
        assert (await run(two, "open('f')")).endswith("No such file or directory: 'f'")
        assert (await run(two, "y")).endswith("NameError: name 'y' is not defined")


@SERVERS
async def test_state_of_failed_program_is_kept(server: str, sandbox_url: str) -> None:
    async with tool_on(server, sandbox_url) as tool, ToolInstance(tool) as instance:
        await run(instance, "x = 1")
        failed = await run(instance, "print('before')\nx = 2\ndef f():\n    return x / 0\nf()")
        assert failed.startswith("before\nTraceback (most recent call last):\n")
        assert failed.endswith("ZeroDivisionError: division by zero")
        assert "return x / 0" in failed, "source lines of the program"
        assert "_replay" not in failed
        assert await run(instance, "x") == "2"
        assert "SyntaxError" in await run(instance, "x +")
        assert await run(instance, "x") == "2"


@SERVERS
async def test_timeout_keeps_earlier_variables(server: str, sandbox_url: str) -> None:
    tool_settings = {"default_timeout": 0.5}
    async with Proxy(sandbox_url, plain=server != "sessions") as proxy:
        tool = stateful(proxy.url, **tool_settings)
        async with ToolInstance(tool) as instance:
            await run(instance, "x = 1")
            assert "longer than 0.5 s" in await run(instance, "print('so far', flush=True)\nwhile True: pass")
            assert await run(instance, "x") == "1"


@SERVERS
async def test_concurrent_calls_run_in_order(server: str, sandbox_url: str) -> None:
    async with tool_on(server, sandbox_url) as tool, ToolInstance(tool) as instance:
        await run(instance, "order = []")
        await asyncio.gather(*(run(instance, f"order.append({number})") for number in range(8)))
        assert await run(instance, "order") == str(list(range(8)))


async def test_release_ends_session() -> None:
    with serving() as server:
        tool = stateful(server.url)
        for _ in range(4):
            async with ToolInstance(tool) as one, ToolInstance(tool) as two, ToolInstance(tool):
                await asyncio.gather(run(one, name_process("session")), run(two, name_process("session")))
                assert sessions_of(server.url) == len(server.processes_named("session")) == 2
            assert sessions_of(server.url) == 0
            assert wait_until(lambda: not server.processes_named("session"))


async def test_release_after_cancelled_call_ends_session() -> None:
    with serving() as server:
        tool = stateful(server.url, default_timeout=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), ToolInstance(tool) as instance:
                await run(instance, "import time; time.sleep(30)")
        assert wait_until(lambda: sessions_of(server.url) == 0)


async def test_model_is_informed_of_ended_session(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        await run(instance, "x = 1")
        output = await run(instance, "import os; os._exit(3)")
        assert output == (
            "[The program failed with exit status 3.]\n"
            "[The interpreter exited. All variables and functions of earlier programs are lost.]"
        )
        assert (await run(instance, "x")).endswith("NameError: name 'x' is not defined"), "the session is not rebuilt"
        await run(instance, "x = 2")
        assert await run(instance, "x") == "2"


async def test_memory_limit_applies_to_session(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url, memory_limit_mb=100)) as instance:
        output = await run(instance, "x = bytearray(400_000_000)\nlen(x)")
        assert "[The program was stopped: it exceeded its memory limit of 100 MB." in output


def restarted(server: Serving) -> "contextlib.AbstractContextManager[Serving]":
    """Kill the server and start another at the same address."""
    server.process.kill()
    server.process.wait()
    return serving("--port", server.url.rsplit(":", 1)[1])


async def test_session_is_rebuilt_after_server_restart() -> None:
    with serving() as first:
        tool = stateful(first.url)
        async with ToolInstance(tool) as instance:
            await run(instance, "x = 1")
            assert "ZeroDivisionError" in await run(instance, "x = 2; 1 / 0")
            await run(instance, "y = x + 1")
            with restarted(first) as second:
                assert await run(instance, "x, y") == "(2, 3)"
                assert sessions_of(second.url) == 1, "the empty session was ended"
                assert await run(instance, "y += 1; y") == "4"
            with pytest.raises(InfraFault, match=r"can't be reached|no complete response"):
                await instance.execute({"code": "y"}, deadline=asyncio.get_running_loop().time() + 1)


async def test_more_trajectories_than_sessions() -> None:
    with serving("--sessions", "2") as server:
        tool = stateful(server.url)
        async with contextlib.AsyncExitStack() as stack:
            instances = [await stack.enter_async_context(ToolInstance(tool)) for _ in range(4)]
            for turn in range(4):
                for number, instance in enumerate(instances):
                    assert await run(instance, f"x = globals().get('x', {number}) + 10; x") == str(
                        number + 10 * turn + 10
                    )


async def test_concurrent_trajectories_with_few_sessions() -> None:
    with serving("--sessions", "3") as server:
        tool = stateful(server.url)

        async def trajectory(number: int) -> list[str]:
            async with ToolInstance(tool) as instance:
                return [await run(instance, code) for code in (f"x = {number}", *["x += 100; x"] * 3)]

        outputs = await asyncio.gather(*(trajectory(number) for number in range(5)))
        assert outputs == [["[No output.]", *(str(number + 100 * turn) for turn in (1, 2, 3))] for number in range(5)]
        assert sessions_of(server.url) == 0


async def test_session_ended_between_calls_is_not_rebuilt(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        await run(instance, "x = 1")
        await run(instance, name_process("ends-early"))
        (process,) = [process for process in psutil.process_iter() if process.name() == "ends-early"]
        process.kill()
        await asyncio.to_thread(process.wait)
        await asyncio.to_thread(wait_until, lambda: sessions_of(sandbox_url) == 0)
        output = await run(instance, "print('x' in globals())")
        assert output == "False\n[The interpreter exited. All variables and functions of earlier programs are lost.]"
        assert (await run(instance, "x")).endswith("name 'x' is not defined")


async def test_replay_informs_model_of_ended_interpreter(sandbox_url: str) -> None:
    async with tool_on("plain SandboxFusion", sandbox_url) as tool, ToolInstance(tool) as instance:
        await run(instance, "x = 1")
        await run(instance, "print('bye', flush=True); import os; os._exit(0)")
        output = await run(instance, "print('hello')")
        assert output == "hello\n[The interpreter exited. All variables and functions of earlier programs are lost.]"
        assert await run(instance, "print('again')") == "again"


async def test_wait_for_previous_call_ends_at_deadline(sandbox_url: str) -> None:
    async with ToolInstance(stateful(sandbox_url)) as instance:
        first = asyncio.create_task(run(instance, "import time; time.sleep(6)"))
        await asyncio.sleep(0.1)
        with pytest.raises(PolicyFault, match="took all the time"):
            await instance.execute({"code": "1"}, deadline=time.monotonic() + 0.5)
        assert not first.done()
        await first


async def test_release_needs_no_slot_and_no_unused_session() -> None:
    with serving() as server:
        tool = stateful(server.url, rate_limit=1)
        async with ToolInstance(tool) as busy:
            async with ToolInstance(tool) as instance:
                await run(instance, "1")
                running = asyncio.create_task(run(busy, "import time; time.sleep(6)"))
                await asyncio.sleep(0.3)
            assert not running.done(), "the release waited for the slot"
            assert sessions_of(server.url) == 1
            await running
    async with FaultServer() as unused:
        async with ToolInstance(stateful(unused.url)):
            pass
        assert not unused.requests, "no session was started"


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


@settings(max_examples=scaled(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cells=CELLS)
@example(cells=["x = 1", "x;", "x", "import sys; sys.stdout.write('ab')"])
def test_replay_is_equivalent_to_session(sandbox_url: str, cells: list[str]) -> None:
    """The model reads the same text on a server without sessions, except for the frames of tracebacks."""

    async def compare() -> None:
        async with (
            tool_on("sessions", sandbox_url) as with_sessions,
            tool_on("plain", sandbox_url) as without_sessions,
            ToolInstance(with_sessions) as kept,
            ToolInstance(without_sessions) as replayed,
        ):
            for cell in cells:
                outputs = [await run(instance, cell) for instance in (kept, replayed)]
                ends = [text.splitlines()[-1] for text in outputs]
                assert ends[0] == ends[1]
                if "Traceback" not in outputs[0] and "SyntaxError" not in outputs[0]:
                    assert outputs[0] == outputs[1]

    asyncio.run(compare())
