"""The code interpreter, against the real sandbox: what the model reads, what every setting does, whose a fault is."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sandbox import fault_server
from sandbox.fault_server import FaultServer, answer
from sandbox.proxy import Proxy
from sandbox.serving import serving

from toolroll.errors import ConfigError, Fault, InfraFault, PolicyFault, SandboxRefused, SlotTimeout, fault_of
from toolroll.limiter.limiter import get_limiter
from toolroll.tools.base_tool import ToolResult
from toolroll.tools.instance import ToolInstance
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

CALLS = Path(__file__).parent / "calls.py"


async def call(tool: SandboxFusionTool, code: str, within: float | None = None, **more: Any) -> ToolResult:
    """One call, in a trajectory of its own."""
    deadline = None if within is None else time.monotonic() + within
    async with ToolInstance(tool) as instance:
        return await instance.execute({"code": code, **more}, deadline=deadline)


async def text(tool: SandboxFusionTool, code: str, **more: Any) -> str:
    """What the model reads."""
    return str((await call(tool, code, **more)).response.text)


async def nothing_in_use(tool: SandboxFusionTool, within: float = 20) -> bool:
    """Whether the limiter's count comes back to 0."""
    ends = time.monotonic() + within
    while (in_use := get_limiter(tool.resource, 1).in_use) and time.monotonic() < ends:
        await asyncio.sleep(0.02)
    return not in_use


@pytest.fixture
def tool(sandbox_url: str) -> SandboxFusionTool:
    return SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 5})


def with_schema(config: dict[str, Any], **properties: Any) -> SandboxFusionTool:
    """A tool whose schema offers the model more than the code."""
    properties = {"code": {"type": "string"}, **properties}
    function = {"name": "run", "parameters": {"type": "object", "properties": properties, "required": ["code"]}}
    return SandboxFusionTool(config, {"type": "function", "function": function})


# What it is


def test_tools_registration(tmp_path: Path) -> None:
    """The original's test plan: one schema, `code_interpreter`, is a SandboxFusionTool; by verl's old name too."""
    for name in (
        "toolroll.tools.sandbox_fusion_tool.SandboxFusionTool",
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
    ):
        config = tmp_path / "tools.yaml"
        config.write_text(
            f"""
            tools:
              - class_name: {name}
                config:
                  sandbox_fusion_url: http://127.0.0.1:8080/run_code
                  num_workers: 10
                  enable_global_rate_limit: true
                  rate_limit: 10
                  default_timeout: 30
                  default_language: python
                  memory_limit_mb: 1024
                  type: native
                tool_schema:
                  type: function
                  function:
                    name: code_interpreter
                    description: A tool for executing code.
                    parameters:
                      type: object
                      properties: {{code: {{type: string, description: The code to execute.}}}}
                      required: [code]
            """
        )
        (tool,) = initialize_tools_from_config(config)
        assert isinstance(tool, SandboxFusionTool)
        assert tool.name == "code_interpreter"
        assert tool.tool_schema == SandboxFusionTool({"sandbox_fusion_url": "http://x:1"}).tool_schema
        assert tool.resource == "http://127.0.0.1:8080"


async def test_the_example_runs_as_it_is(root: Path, sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    (tool,) = initialize_tools_from_config(root / "examples/sandbox_fusion/tool_config.yaml")
    assert isinstance(tool, SandboxFusionTool)
    assert await text(tool, "print(6 * 7)") == "42"


def test_the_defaults_are_the_designs() -> None:
    settings = SandboxFusionTool({"sandbox_fusion_url": "http://x:1"}).settings
    assert (settings.rate_limit, settings.default_timeout, settings.default_language) == (10, 30, "python")
    assert (settings.enable_global_rate_limit, settings.stateful) == (True, False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "the key 'sandbox_fusion_url' is missing"),
        ({"sandbox_fusion_url": []}, "sandbox_fusion_url"),
        ({"sandbox_fusion_url": "sandbox:8080"}, "'sandbox:8080' is no sandbox's URL"),
        ({"sandbox_fusion_url": "http://x:1", "ratelimit": 3}, "did you mean 'rate_limit'?"),
        ({"sandbox_fusion_url": "http://x:1", "rate_limit": 0}, "rate_limit"),
        ({"sandbox_fusion_url": "http://x:1", "num_workers": 0}, "num_workers"),
        ({"sandbox_fusion_url": "http://x:1", "default_timeout": 0}, "default_timeout"),
        ({"sandbox_fusion_url": "http://x:1", "default_language": "pyhton"}, "default_language"),
        ({"sandbox_fusion_url": "http://x:1", "default_language": "cpp", "stateful": True}, "stateful needs"),
    ],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        SandboxFusionTool(config)
    assert says in str(error.value)


# What the model reads


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("'a' + 'b'", "'ab'"),
        ("print('one')\n[2]", "one\n[2]"),
        ("6 * 7;", "[No output.]"),
        ("x = 1", "[No output.]"),
        ("", "[No output.]"),
        ("# thinking", "[No output.]"),
        ("None", "[No output.]"),
        ("```python\nprint(42)\n```", "42"),
        ("```\n42\n```", "42"),
        ("```py\n42", "42"),
        ("import sys; sys.exit(3)", "[The program failed with exit status 3.]"),
        ("import os; os.abort()", "[The program was ended by signal 6 (SIGABRT). It had written nothing.]"),
        ("import sys; print('a'); sys.exit('no')", "a\nno"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("print('ünïcode 中文 🎉')", "ünïcode 中文 🎉"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("import sys; sys.stdout.write('4'); sys.stdout.write('2')", "42"),
    ],
)
async def test_what_the_model_reads(tool: SandboxFusionTool, code: str, expected: str) -> None:
    assert await text(tool, code) == expected


async def test_a_traceback_with_the_output_before_it(tool: SandboxFusionTool) -> None:
    said = await text(tool, "print('so far')\ndef f():\n    return 1 / 0\nf()")
    assert said.startswith("so far\nTraceback (most recent call last):\n")
    assert "line 4, in <module>\n    f()\n" in said
    assert said.endswith("ZeroDivisionError: division by zero")
    assert "toolroll/" not in said


async def test_an_expression_at_the_end_fails_with_its_own_line(tool: SandboxFusionTool) -> None:
    said = await text(tool, "x = 0\n\n1 / x")
    assert "line 3, in <module>\n    1 / x\n    ~~^~~\n" in said
    assert "line 1\n    1 +\n" in await text(tool, "1 +")


async def test_of_a_long_traceback_the_end_is_shown(tool: SandboxFusionTool) -> None:
    said = await text(tool, "raise ValueError('a' * 10_000 + 'the end')")
    assert said.startswith("[...]\n")
    assert said.endswith("the end")
    assert len(said) < 4100


@pytest.mark.alone
async def test_a_program_out_of_time_with_its_output_so_far(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 0.5})
    result = await call(tool, "print('so far', flush=True)\nwhile True:\n    pass")
    said = str(result.response.text)
    assert said.startswith("so far\n")
    assert re.search("line [23], in <module>", said), "where it was"
    assert said.endswith("[The program was stopped: it took longer than 0.5 s.]")
    assert (result.metrics["outcome"], result.metrics["exit_status"]) == ("timeout", None)
    silent = await text(tool, "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(9)")
    assert silent == "[The program was stopped: it took longer than 0.5 s. It had written nothing.]"


async def test_a_program_out_of_memory(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "memory_limit_mb": 100})
    result = await call(tool, "print('so far', flush=True)\nx = bytearray(400_000_000)\nprint(len(x))")
    said = str(result.response.text)
    assert said.startswith("so far\n")
    assert said.endswith("[The program was stopped: it reached its memory limit of 100 MB.]")
    assert result.metrics["outcome"] == "out_of_memory"
    roomy = SandboxFusionTool({"sandbox_fusion_url": sandbox_url})
    assert await text(roomy, "x = bytearray(400_000_000)\nprint(len(x))") == "400000000"


async def test_output_that_was_cut_is_marked(tool: SandboxFusionTool) -> None:
    result = await call(tool, "print('x' * 3_000_000)")
    said = str(result.response.text)
    assert said.endswith("x\n[The output was cut here: it was too long.]")
    assert result.metrics["truncated"] is True
    assert result.metrics["stdout_bytes"] == 1024 * 1024


async def test_another_language(sandbox_url: str) -> None:
    bash = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "bash"})
    assert await text(bash, "echo $((6 * 7))") == "42"
    cpp = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "cpp"})
    said = await text(cpp, "int main() { return x; }")
    assert "error: 'x' was not declared" in said.replace("‘", "'").replace("’", "'")
    assert said.endswith("[The program did not compile.]")


async def test_the_metrics_of_a_call(tool: SandboxFusionTool) -> None:
    _, reward, metrics = await call(tool, "import sys\nprint('é')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert reward is None
    assert metrics["outcome"] == "failed"
    assert metrics["exit_status"] == 3
    assert (metrics["stdout_bytes"], metrics["stderr_bytes"], metrics["truncated"]) == (3, 4, False)
    assert metrics["attempts"] == 1
    assert 0 < metrics["execution_time"] < 5
    assert 0 <= metrics["queue_wait"] < 5
    json.dumps(metrics)


async def test_the_row_of_the_data_set_may_say_more(tool: SandboxFusionTool) -> None:
    async with ToolInstance(tool, create_kwargs={"ground_truth": "72"}) as instance:
        assert (await instance.execute('{"code": "1", "executes": "True"}')).response.text == "1"
        assert await instance.calc_reward() == 0.0


# What the model may choose


@pytest.mark.alone
async def test_language_and_time_where_the_schema_offers_them(sandbox_url: str) -> None:
    config = {"sandbox_fusion_url": sandbox_url, "default_timeout": 1}
    open_tool = with_schema(config, language={"type": "string"}, timeout={"type": "number"})
    assert await text(open_tool, "echo hi", language="bash") == "hi"
    stopped = await text(open_tool, "import time; time.sleep(5)", timeout=0.2)
    assert "longer than 0.2 s" in stopped
    began = time.monotonic()
    assert "longer than 1 s" in await text(open_tool, "import time; time.sleep(5)", timeout=100), (
        "no more than is given"
    )
    assert time.monotonic() - began < 4


async def test_what_the_schema_does_not_offer_is_ignored(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 0.5})
    assert await text(tool, "print(1)", language="bash", timeout=1e9) == "1"


async def test_a_language_that_there_is_not_is_the_models_fault(sandbox_url: str) -> None:
    tool = with_schema({"sandbox_fusion_url": sandbox_url}, language={"type": "string"})
    with pytest.raises(PolicyFault, match="did you mean 'python'"):
        await call(tool, "1", language="pyton")
    with pytest.raises(PolicyFault, match="can't run cuda"):
        await call(tool, "1", language="cuda")


async def test_what_else_a_sandbox_refuses_is_not_the_models_fault(sandbox_url: str) -> None:
    config = {"sandbox_fusion_url": sandbox_url, "memory_limit_mb": 4096}
    with pytest.raises(SandboxRefused, match="memory_limit_MB is 4096"):
        await call(with_schema(config, language={"type": "string"}), "1", language="bash")


async def test_languages_have_other_names_too(sandbox_url: str) -> None:
    tool = with_schema({"sandbox_fusion_url": sandbox_url, "default_language": "sh"}, language={"type": "string"})
    assert await text(tool, "echo hi") == "hi"
    assert await text(tool, "console.log(6 * 7)", language="JavaScript") == "42"


async def test_what_the_setting_names_and_the_sandbox_lacks_is_not_the_models_fault(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "cuda"})
    with pytest.raises(SandboxRefused, match="has no cuda"):
        await call(tool, "1")


async def test_a_program_of_any_length_is_the_models_own(tool: SandboxFusionTool) -> None:
    with pytest.raises(PolicyFault, match="1000000 are the most"):
        await call(tool, "#" * 100_000_000)
    assert await text(tool, "1 #" + "x" * 900_000) == "1"


# What every setting does, seen from outside


async def at_once(tool: SandboxFusionTool, count: int, code: str = "1") -> list[str]:
    return await asyncio.gather(*(text(tool, code) for _ in range(count)))


async def test_num_workers_is_how_many_this_process_has_open(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "num_workers": 4, "rate_limit": 100})
        assert await at_once(tool, 100) == ["1"] * 100
        assert (proxy.most, proxy.most_connections) == (4, 4)


async def test_num_workers_is_the_limit_unless_it_is_set(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        await at_once(SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 3}), 60)
        assert proxy.most == 3


async def test_without_the_global_limit_each_process_has_its_workers(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        config = {"sandbox_fusion_url": proxy.url, "rate_limit": 1, "enable_global_rate_limit": False, "num_workers": 5}
        one, two = SandboxFusionTool(config), SandboxFusionTool(config)  # a limit of 1 would be seen
        slow = "import time; time.sleep(0.2)"
        await asyncio.gather(at_once(one, 10, slow), at_once(two, 10, slow))
        assert proxy.most == 5, "of the process, not of each tool"


async def test_several_urls_share_the_work_and_the_limit(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as first, Proxy(sandbox_url) as second:
        urls = [first.url, second.url + "/run_code"]
        tool = SandboxFusionTool({"sandbox_fusion_url": urls, "rate_limit": 4})
        same = SandboxFusionTool({"sandbox_fusion_url": list(reversed(urls)), "rate_limit": 4})
        assert tool.resource == same.resource
        await asyncio.gather(at_once(tool, 50), at_once(same, 50))
        assert min(first.requests, second.requests) > 30
        assert 4 >= max(first.most, second.most) >= 2


async def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(environment={"TOOLROLL_SANDBOX_TOKEN": "s3cret"}) as server:
        with pytest.raises(SandboxRefused, match="Is the token right"):
            await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1")
        monkeypatch.setenv("TOOLROLL_SANDBOX_TOKEN", "s3cret")
        assert await text(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1") == "1"


@contextlib.asynccontextmanager
async def processes(jobs: list[dict[str, Any]]) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Processes that call the tool (calls.py), all ready. They begin at a line."""
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, CALLS, json.dumps(job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24
        )
        for job in jobs
    ]
    try:
        for one in running:
            assert one.stdout is not None
            async with asyncio.timeout(60):
                while (line := await one.stdout.readline()) != b"ready\n":  # Ray has things to say, too
                    assert line, "it ended"
        yield running
    finally:
        for one in running:
            if one.returncode is None:
                one.kill()
            await one.wait()


async def results(running: list[asyncio.subprocess.Process], within: float) -> list[dict[str, Any]]:
    for one in running:
        assert one.stdin is not None
        one.stdin.write(b"go\n")
    async with asyncio.timeout(within):
        said = await asyncio.gather(*(one.communicate() for one in running))
    lines = [[line for line in out.splitlines() if line.startswith(b'{"outcomes"')] for out, _ in said]
    return [dict(json.loads(one)) for (one,) in lines]


async def test_rate_limit_is_the_clusters(cluster: str, sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        config = {"sandbox_fusion_url": proxy.url, "rate_limit": 8, "num_workers": 50}
        job = {"config": config, "calls": [["print(6 * 7)", "42"]] * 200, "concurrency": 50, "deadline": 60}
        async with processes([job] * 3) as running:
            proxy.most = 0
            done = await results(running, 60)
        assert [one["outcomes"] for one in done] == [["ok"] * 200] * 3
        assert proxy.most == 8, "no more, and all of them used"


# Whose fault


BROKEN: dict[str, list[fault_server.Behaviour]] = {
    "429": [answer(429, b"full")],
    "429 for ever": [answer(429, b"full", {"Retry-After": "1000"})],
    "500": [answer(500, b"Internal Server Error")],
    "502": [answer(502, b"Bad Gateway")],
    "503": [answer(503, b"ending")],
    "garbage": [answer(200, b"<html>what?</html>")],
    "other JSON": [answer(200, {"status": "Fine"})],
    "SandboxError": [answer(200, {"status": "SandboxError", "message": "no disk"})],
    "half an answer": [fault_server.raw(fault_server.whole()[:-20])],
    "half an answer, then nothing": [fault_server.hang(fault_server.whole()[:-20])],
    "nothing": [fault_server.hang()],
    "dies": [fault_server.raw(b"")],
    "a byte at a time": [fault_server.drip(fault_server.whole(), 0.5)],
}


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
async def test_a_broken_sandbox_is_told_by_the_deadline(script: list[fault_server.Behaviour]) -> None:
    async with FaultServer(script) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "default_timeout": 0.5})
        began = time.monotonic()
        with pytest.raises(InfraFault) as error:
            await call(tool, "1", within=1.0)
        assert time.monotonic() - began < 3
        assert fault_of(error.value) is Fault.INFRA
        assert server.url in str(error.value)
        assert error.value.metrics["queue_wait"] < 1
        assert await nothing_in_use(tool)
        assert not tool.instances


async def test_a_sandbox_that_is_not_there(sandbox_url: str) -> None:
    async with FaultServer() as server:
        pass
    tool = SandboxFusionTool({"sandbox_fusion_url": server.url})
    with pytest.raises(InfraFault, match="can't be reached") as error:
        await call(tool, "1", within=0.5)
    assert error.value.metrics["attempts"] > 1
    assert await nothing_in_use(tool)


@pytest.mark.parametrize("trouble", ["429", "502", "503", "SandboxError", "dies"])
async def test_trouble_that_passes_is_not_noticed(trouble: str) -> None:
    async with FaultServer([*BROKEN[trouble] * 2, answer()]) as server:
        result = await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1 + 1", within=20)
        assert result.response.text == "2"
        assert result.metrics["attempts"] == 3
        assert len({one["idempotency_key"] for one in server.requests}) == 1


async def test_no_slot_by_the_deadline() -> None:
    async with FaultServer([fault_server.after(2, answer())]) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "rate_limit": 1})
        first = asyncio.create_task(call(tool, "1"))
        await asyncio.sleep(0.2)
        with pytest.raises(SlotTimeout) as error:
            await call(tool, "2", within=0.5)
        assert error.value.metrics["queue_wait"] >= 0.4
        assert (await first).response.text == "2"
        assert len(server.requests) == 1


async def test_a_deadline_is_told_to_the_sandbox() -> None:
    async with FaultServer() as server:
        await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1", within=12)
        assert abs(server.requests[0]["deadline"] - time.time() - 12) < 2


async def test_who_is_cancelled_leaves_at_once_and_the_slot_follows_when_the_program_has_ended(
    sandbox_url: str,
) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 1, "default_timeout": 5})
        first = asyncio.create_task(call(tool, "import time; time.sleep(3)"))
        await asyncio.sleep(0.4)
        began = time.monotonic()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert time.monotonic() - began < 2
        assert await text(tool, "1") == "1"
        assert time.monotonic() - began > 2, "it had to wait: the sandbox was not done"
        assert proxy.most == 1


async def test_who_leaves_at_the_deadline_leaves_the_slot_to_the_sandbox_until_it_has_answered() -> None:
    async with FaultServer([fault_server.after(3, answer()), answer()]) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "rate_limit": 1, "default_timeout": 5})
        began = time.monotonic()
        with pytest.raises(InfraFault, match="no complete answer by the deadline"):
            await call(tool, "1", within=0.5)
        assert time.monotonic() - began < 2.5
        assert await text(tool, "1") == "2"
        assert time.monotonic() - began > 2.9
        assert server.most == 1


async def test_an_endless_program_is_the_models_fault_however_near_the_deadline_is(tool: SandboxFusionTool) -> None:
    began = time.monotonic()
    result = await call(tool, "print('so far', flush=True)\nwhile True: pass", within=4)
    assert time.monotonic() - began < 4
    assert result.metrics["outcome"] == "timeout"
    assert str(result.response.text).startswith("so far\n")
    assert str(result.response.text).endswith("it took longer than 3 s.]"), "what it really had"


@pytest.mark.alone
async def test_time_that_the_wait_for_a_slot_took_is_not_the_models_fault(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "rate_limit": 1, "default_timeout": 3})
    first = asyncio.create_task(call(tool, "import time; time.sleep(2)"))
    await asyncio.sleep(0.2)
    with pytest.raises(InfraFault, match="as it waited"):
        await call(tool, "while True: pass", within=4)
    await first


async def test_one_who_waits_and_is_cancelled_takes_nothing_with_it(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 2, "default_timeout": 5})
        calls = [asyncio.create_task(call(tool, "import time; time.sleep(0.2)")) for _ in range(20)]
        await asyncio.sleep(0.1)
        for one in calls[2:]:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert proxy.requests == 2
        assert await nothing_in_use(tool, 1)
        assert await at_once(tool, 10) == ["1"] * 10


# All of it at once


@pytest.mark.alone
async def test_5000_calls_while_programs_crash_and_the_sandbox_is_restarted(cluster: str) -> None:
    """4 processes, a limit of 16, 1 % crash, 1 % run out of time, and the sandbox is killed and started again."""
    programs = {
        "crash": ("raise ValueError({0})", "…ValueError: {0}"),
        "hang": ("print({0}, flush=True)\nwhile True: pass", "…longer than 0.5 s"),
        "fine": ("print({0} ** 2)", None),
    }

    def one(number: int) -> list[str]:
        kind = "crash" if number % 100 == 50 else "hang" if number % 100 == 99 else "fine"
        code, expected = programs[kind]
        return [code.format(number), str(number**2) if expected is None else expected.format(number)]

    everything = [one(number) for number in range(5000)]
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(serving())
        port = first.url.rsplit(":", 1)[1]
        async with Proxy(first.url) as proxy:
            config = {"sandbox_fusion_url": proxy.url, "rate_limit": 16, "default_timeout": 0.5}
            jobs = [
                {"config": config, "calls": everything[part::4], "concurrency": 64, "deadline": 60} for part in range(4)
            ]
            async with processes(jobs) as running:
                proxy.most = 0
                finishing = asyncio.create_task(results(running, 240))
                while proxy.requests < 2000 and not finishing.done():
                    await asyncio.sleep(0.01)
                first.process.kill()
                first.process.wait()
                second = await asyncio.to_thread(servers.enter_context, serving("--port", port))
                done = await finishing
            outcomes = [outcome for one in done for outcome in one["outcomes"]]
            assert len(outcomes) == 5000
            assert [outcome for outcome in outcomes if outcome not in ("ok", "infra")] == []
            assert outcomes.count("ok") > 4900
            assert 8 < proxy.most <= 16
            assert proxy.in_flight == 0
        assert [one["left"] for one in done] == [dict.fromkeys(done[0]["left"], 0)] * 4
        names = [process.name() for process in second.processes()]
        assert len(names) < 12, f"programs are left: {names}"
