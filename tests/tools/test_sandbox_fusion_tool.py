"""Tests of SandboxFusionTool with a real sandbox: texts for the model, settings, attribution of faults."""

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

from toolroll.errors import (
    ConfigError,
    Fault,
    InfraFault,
    InvalidArguments,
    PolicyFault,
    SandboxRefused,
    SlotTimeout,
    fault_of,
)
from toolroll.limiter.registry import get_limiter
from toolroll.sandbox.limited import LimitedSandbox
from toolroll.tools.base_tool import ToolResult
from toolroll.tools.instance import ToolInstance
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

pytestmark = pytest.mark.sandbox

CALLS = Path(__file__).parent / "calls.py"


async def call(tool: SandboxFusionTool, code: str, within: float | None = None, **more: Any) -> ToolResult:
    """Make one call in a new trajectory."""
    deadline = None if within is None else time.monotonic() + within
    async with ToolInstance(tool) as instance:
        return await instance.execute({"code": code, **more}, deadline=deadline)


async def text(tool: SandboxFusionTool, code: str, **more: Any) -> str:
    """Return the text that the model reads."""
    return str((await call(tool, code, **more)).response.text)


async def all_slots_released(tool: SandboxFusionTool, within: float = 20) -> bool:
    """Return True if the limiter's number of used slots returns to 0."""
    give_up = time.monotonic() + within
    while (in_use := get_limiter(tool.resource, 1).in_use) and time.monotonic() < give_up:
        await asyncio.sleep(0.02)
    return not in_use


@pytest.fixture
def tool(sandbox_url: str) -> SandboxFusionTool:
    return SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 5})


def with_schema(config: dict[str, Any], **properties: Any) -> SandboxFusionTool:
    """Return a tool whose schema has further parameters."""
    properties = {"code": {"type": "string"}, **properties}
    function = {"name": "run", "parameters": {"type": "object", "properties": properties, "required": ["code"]}}
    return SandboxFusionTool(config, {"type": "function", "function": function})


# Configuration


@pytest.mark.unit
def test_tool_is_registered_by_both_names(tmp_path: Path) -> None:
    """The config of the original design loads, with our class name and with verl's."""
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


async def test_example_runs(root: Path, sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    (tool,) = initialize_tools_from_config(root / "examples/sandbox_fusion/tool_config.yaml")
    assert isinstance(tool, SandboxFusionTool)
    assert await text(tool, "print(6 * 7)") == "42"


@pytest.mark.unit
def test_defaults_of_original_design() -> None:
    settings = SandboxFusionTool({"sandbox_fusion_url": "http://x:1"}).settings
    assert (settings.rate_limit, settings.default_timeout, settings.default_language) == (10, 30, "python")
    assert (settings.enable_global_rate_limit, settings.stateful) == (True, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "missing key 'sandbox_fusion_url'"),
        ({"sandbox_fusion_url": []}, "sandbox_fusion_url"),
        ({"sandbox_fusion_url": "sandbox:8080"}, "Invalid sandbox URL: 'sandbox:8080'"),
        ({"sandbox_fusion_url": "http://x:1", "ratelimit": 3}, "did you mean 'rate_limit'?"),
        ({"sandbox_fusion_url": "http://x:1", "rate_limit": 0}, "rate_limit"),
        ({"sandbox_fusion_url": "http://x:1", "num_workers": 0}, "num_workers"),
        ({"sandbox_fusion_url": "http://x:1", "default_timeout": 0}, "default_timeout"),
        ({"sandbox_fusion_url": "http://x:1", "default_language": "pyhton"}, "default_language"),
        ({"sandbox_fusion_url": "http://x:1", "default_language": "cpp", "stateful": True}, "stateful requires"),
    ],
)
@pytest.mark.unit
def test_invalid_setting_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SandboxFusionTool(config)
    assert message in str(error.value)


# Text that the model reads


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
        ("import os; os.abort()", "[The program was terminated by signal 6 (SIGABRT). It produced no output.]"),
        ("import sys; print('a'); sys.exit('no')", "a\nno"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("print('ünïcode 中文 🎉')", "ünïcode 中文 🎉"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("import sys; sys.stdout.write('4'); sys.stdout.write('2')", "42"),
    ],
)
async def test_output(tool: SandboxFusionTool, code: str, expected: str) -> None:
    assert await text(tool, code) == expected


async def test_traceback_follows_output(tool: SandboxFusionTool) -> None:
    output = await text(tool, "print('so far')\ndef f():\n    return 1 / 0\nf()")
    assert output.startswith("so far\nTraceback (most recent call last):\n")
    assert "line 4, in <module>\n    f()\n" in output
    assert output.endswith("ZeroDivisionError: division by zero")
    assert "toolroll/" not in output


async def test_traceback_of_last_expression_has_its_line(tool: SandboxFusionTool) -> None:
    output = await text(tool, "x = 0\n\n1 / x")
    assert "line 3, in <module>\n    1 / x\n    ~~^~~\n" in output
    assert "line 1\n    1 +\n" in await text(tool, "1 +")


async def test_long_traceback_is_truncated_to_its_end(tool: SandboxFusionTool) -> None:
    output = await text(tool, "raise ValueError('a' * 10_000 + 'the end')")
    assert output.startswith("[...]\n")
    assert output.endswith("the end")
    assert len(output) < 4100


async def test_timeout_keeps_output(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 2})
    result = await call(tool, "print('so far', flush=True)\nwhile True:\n    pass")
    output = str(result.response.text)
    assert output.startswith("so far\n")
    assert re.search("line [23], in <module>", output), "the line that was running"
    assert output.endswith("[The program was stopped: it took longer than 2 s.]")
    assert (result.metrics["outcome"], result.metrics["exit_status"]) == ("timeout", None)
    silent = await text(tool, "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)")
    assert silent == "[The program was stopped: it took longer than 2 s. It produced no output.]"


async def test_out_of_memory(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "memory_limit_mb": 100})
    result = await call(tool, "print('so far', flush=True)\nx = bytearray(400_000_000)\nprint(len(x))")
    output = str(result.response.text)
    assert output.startswith("so far\n")
    assert output.endswith("[The program was stopped: it exceeded its memory limit of 100 MB.]")
    assert result.metrics["outcome"] == "out_of_memory"
    without_limit = SandboxFusionTool({"sandbox_fusion_url": sandbox_url})
    assert await text(without_limit, "x = bytearray(400_000_000)\nprint(len(x))") == "400000000"


async def test_truncated_output_is_marked(tool: SandboxFusionTool) -> None:
    result = await call(tool, "print('x' * 3_000_000)")
    output = str(result.response.text)
    assert output.endswith("x\n[The output was truncated because it was too long.]")
    assert result.metrics["truncated"] is True
    assert result.metrics["stdout_bytes"] == 1024 * 1024


async def test_other_languages(sandbox_url: str) -> None:
    bash = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "bash"})
    assert await text(bash, "echo $((6 * 7))") == "42"
    cpp = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "cpp"})
    output = await text(cpp, "int main() { return x; }")
    assert "error: 'x' was not declared" in output.replace("‘", "'").replace("’", "'")
    assert output.endswith("[The program did not compile.]")


async def test_metrics_of_call(tool: SandboxFusionTool) -> None:
    _, reward, metrics = await call(tool, "import sys\nprint('é')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert reward is None
    assert metrics["outcome"] == "failed"
    assert metrics["exit_status"] == 3
    assert (metrics["stdout_bytes"], metrics["stderr_bytes"], metrics["truncated"]) == (3, 4, False)
    assert metrics["attempts"] == 1
    assert metrics["execution_time"] > 0
    assert metrics["queue_wait"] >= 0
    json.dumps(metrics)


async def test_unknown_create_kwargs_and_arguments_are_ignored(tool: SandboxFusionTool) -> None:
    async with ToolInstance(tool, create_kwargs={"ground_truth": "72"}) as instance:
        assert (await instance.execute('{"code": "1", "executes": "True"}')).response.text == "1"
        assert await instance.calc_reward() == 0.0


# Parameters of the schema


@pytest.mark.unit
@pytest.mark.parametrize("code", [5, 1.5, None, ["print(1)"], {"a": 1}])
async def test_code_that_is_not_text(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool converts the code to text, as the original did. The default schema rejects it before that."""
    programs = []

    async def run(self: LimitedSandbox, code: str, *args: Any, **options: Any) -> None:
        programs.append(code)
        raise InfraFault("no sandbox")

    monkeypatch.setattr(LimitedSandbox, "run", run)
    config = {"sandbox_fusion_url": "http://x:1"}
    tool = SandboxFusionTool(config)
    instance_id, _ = await tool.create()
    with pytest.raises(InfraFault, match="no sandbox"):
        await tool.execute(instance_id, {"code": code})
    async with ToolInstance(with_schema(config, code={"description": "Code of any type."})) as instance:
        with pytest.raises(InfraFault, match="no sandbox"):
            await instance.execute({"code": code})
    async with ToolInstance(tool) as instance:
        with pytest.raises(InvalidArguments, match="'code' must be a string, not "):
            await instance.execute({"code": code})
    assert programs == [str(code)] * 2


async def test_schema_with_language_and_timeout(sandbox_url: str) -> None:
    config = {"sandbox_fusion_url": sandbox_url, "default_timeout": 1}
    tool = with_schema(config, language={"type": "string"}, timeout={"type": "number"})
    assert await text(tool, "echo hi", language="bash") == "hi"
    stopped = await text(tool, "import time; time.sleep(60)", timeout=0.2)
    assert "longer than 0.2 s" in stopped
    assert "longer than 1 s" in await text(tool, "import time; time.sleep(60)", timeout=100), "at most default_timeout"


async def test_parameters_outside_schema_are_ignored(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_timeout": 0.5})
    assert await text(tool, "print(1)", language="bash", timeout=1e9) == "1"


async def test_unavailable_language_is_policy_fault(sandbox_url: str) -> None:
    tool = with_schema({"sandbox_fusion_url": sandbox_url}, language={"type": "string"})
    with pytest.raises(PolicyFault, match="Did you mean 'python'"):
        await call(tool, "1", language="pyton")
    with pytest.raises(PolicyFault, match="does not support cuda"):
        await call(tool, "1", language="cuda")


async def test_other_rejections_are_infra_faults(sandbox_url: str) -> None:
    config = {"sandbox_fusion_url": sandbox_url, "memory_limit_mb": 4096}
    with pytest.raises(SandboxRefused, match="memory_limit_MB=4096"):
        await call(with_schema(config, language={"type": "string"}), "1", language="bash")


async def test_language_aliases(sandbox_url: str) -> None:
    tool = with_schema({"sandbox_fusion_url": sandbox_url, "default_language": "sh"}, language={"type": "string"})
    assert await text(tool, "echo hi") == "hi"
    assert await text(tool, "console.log(6 * 7)", language="JavaScript") == "42"


async def test_unavailable_default_language_is_infra_fault(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "default_language": "cuda"})
    with pytest.raises(SandboxRefused, match="'cuda' is not available"):
        await call(tool, "1")


async def test_too_long_program_is_policy_fault(tool: SandboxFusionTool) -> None:
    with pytest.raises(PolicyFault, match="The maximum is 1000000"):
        await call(tool, "#" * 100_000_000)
    assert await text(tool, "1 #" + "x" * 900_000) == "1"


# Effects of the settings


async def call_concurrently(tool: SandboxFusionTool, count: int, code: str = "1") -> list[str]:
    return await asyncio.gather(*(text(tool, code) for _ in range(count)))


async def test_num_workers_limits_requests_of_process(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "num_workers": 4, "rate_limit": 100})
        assert await call_concurrently(tool, 100) == ["1"] * 100
        assert (proxy.max_in_flight, proxy.max_connections) == (4, 4)


async def test_num_workers_defaults_to_rate_limit(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        await call_concurrently(SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 3}), 60)
        assert proxy.max_in_flight == 3


async def test_without_global_limit_num_workers_applies(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        config = {"sandbox_fusion_url": proxy.url, "rate_limit": 1, "enable_global_rate_limit": False, "num_workers": 5}
        one, two = SandboxFusionTool(config), SandboxFusionTool(config)  # rate_limit=1 must not apply
        slow = "import time; time.sleep(0.2)"
        await asyncio.gather(call_concurrently(one, 10, slow), call_concurrently(two, 10, slow))
        assert proxy.max_in_flight == 5, "the limit is per process and not per tool"


async def test_multiple_urls_share_load_and_limit(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as first, Proxy(sandbox_url) as second:
        urls = [first.url, second.url + "/run_code"]
        tool = SandboxFusionTool({"sandbox_fusion_url": urls, "rate_limit": 4})
        same = SandboxFusionTool({"sandbox_fusion_url": list(reversed(urls)), "rate_limit": 4})
        assert tool.resource == same.resource
        await asyncio.gather(call_concurrently(tool, 50), call_concurrently(same, 50))
        assert min(first.requests, second.requests) > 30
        assert 4 >= max(first.max_in_flight, second.max_in_flight) >= 2


async def test_token_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(environment={"TOOLROLL_SANDBOX_TOKEN": "s3cret"}) as server:
        with pytest.raises(SandboxRefused, match="Check the token"):
            await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1")
        monkeypatch.setenv("TOOLROLL_SANDBOX_TOKEN", "s3cret")
        assert await text(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1") == "1"


@contextlib.asynccontextmanager
async def processes(jobs: list[dict[str, Any]]) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Start processes that call the tool (calls.py) when they receive a line, and wait until they are ready."""
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
                while (line := await one.stdout.readline()) != b"ready\n":  # skips messages of Ray
                    assert line, "the process exited"
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
        outputs = await asyncio.gather(*(one.communicate() for one in running))
    lines = [[line for line in out.splitlines() if line.startswith(b'{"outcomes"')] for out, _ in outputs]
    return [dict(json.loads(one)) for (one,) in lines]


@pytest.mark.ray
async def test_rate_limit_applies_to_cluster(cluster: str, sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        config = {"sandbox_fusion_url": proxy.url, "rate_limit": 8, "num_workers": 50}
        job = {"config": config, "calls": [["print(6 * 7)", "42"]] * 200, "concurrency": 50, "deadline": 60}
        async with processes([job] * 3) as running:
            proxy.max_in_flight = 0
            done = await results(running, 60)
        assert [one["outcomes"] for one in done] == [["ok"] * 200] * 3
        assert proxy.max_in_flight == 8, "all slots are used, and not more"


# Faults


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


@pytest.mark.unit
@pytest.mark.virtual_time
@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
async def test_broken_sandbox_is_infra_fault_by_deadline(script: list[fault_server.Behaviour]) -> None:
    async with FaultServer(script) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "default_timeout": 0.5})
        start = time.monotonic()
        with pytest.raises(InfraFault) as error:
            await call(tool, "1", within=1.0)
        assert time.monotonic() - start < 3
        assert fault_of(error.value) is Fault.INFRA
        assert server.url in str(error.value)
        assert error.value.metrics["queue_wait"] < 1
        assert await all_slots_released(tool)
        assert not tool.instances


async def test_unreachable_sandbox_is_infra_fault(sandbox_url: str) -> None:
    async with FaultServer() as server:
        pass
    tool = SandboxFusionTool({"sandbox_fusion_url": server.url})
    with pytest.raises(InfraFault, match="can't be reached") as error:
        await call(tool, "1", within=2.0)
    assert error.value.metrics["attempts"] > 1
    assert await all_slots_released(tool)


@pytest.mark.unit
@pytest.mark.virtual_time
@pytest.mark.parametrize("failure", ["429", "502", "503", "SandboxError", "dies"])
async def test_transient_failure_is_retried(failure: str) -> None:
    async with FaultServer([*BROKEN[failure] * 2, answer()]) as server:
        result = await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1 + 1", within=20)
        assert result.response.text == "2"
        assert result.metrics["attempts"] == 3
        assert len({one["idempotency_key"] for one in server.requests}) == 1


@pytest.mark.unit
@pytest.mark.virtual_time
async def test_no_slot_by_deadline_raises_slot_timeout() -> None:
    async with FaultServer([fault_server.after(2, answer())]) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "rate_limit": 1})
        first = asyncio.create_task(call(tool, "1"))
        await asyncio.sleep(0.2)
        with pytest.raises(SlotTimeout) as error:
            await call(tool, "2", within=0.5)
        assert error.value.metrics["queue_wait"] >= 0.4
        assert (await first).response.text == "2"
        assert len(server.requests) == 1


@pytest.mark.unit
@pytest.mark.virtual_time
async def test_deadline_is_sent_to_sandbox() -> None:
    async with FaultServer() as server:
        await call(SandboxFusionTool({"sandbox_fusion_url": server.url}), "1", within=12)
        (deadline,) = re.findall(r"X-Toolroll-Deadline: (\S+)", server.heads[0])
        assert abs(float(deadline) - time.time() - 12) < 2


async def test_cancelled_call_keeps_slot_until_program_ends(
    sandbox_url: str,
) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 1, "default_timeout": 5})
        first = asyncio.create_task(call(tool, "import time; time.sleep(3)"))
        await asyncio.sleep(0.4)
        start = time.monotonic()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert time.monotonic() - start < 2
        assert await text(tool, "1") == "1"
        assert time.monotonic() - start > 2, "the sandbox was still busy"
        assert proxy.max_in_flight == 1


@pytest.mark.unit
@pytest.mark.virtual_time
async def test_expired_call_keeps_slot_until_sandbox_answers() -> None:
    async with FaultServer([fault_server.after(3, answer()), answer()]) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "rate_limit": 1, "default_timeout": 5})
        start = time.monotonic()
        with pytest.raises(InfraFault, match="no complete response by the deadline"):
            await call(tool, "1", within=0.5)
        assert time.monotonic() - start < 2.5
        assert await text(tool, "1") == "2"
        assert time.monotonic() - start > 2.9
        assert server.max_in_flight == 1


@pytest.mark.timing  # on a busy machine, the program does not have its time, which is an infra fault
async def test_endless_program_is_stopped_before_deadline(tool: SandboxFusionTool) -> None:
    start = time.monotonic()
    result = await call(tool, "print('so far', flush=True)\nwhile True: pass", within=4)
    assert time.monotonic() - start < 4
    assert result.metrics["outcome"] == "timeout"
    assert str(result.response.text).startswith("so far\n")
    stopped = re.search(r"it took longer than (\S+) s\.\]$", str(result.response.text))
    assert stopped
    assert float(stopped[1]) <= 1, "the CPU time that fits into the time left"


@pytest.mark.unit
@pytest.mark.virtual_time
@pytest.mark.parametrize(("within", "ended_by_deadline"), [(None, None), (60, None), (3, True)])
async def test_timeout_before_the_time_limit_is_marked(within: float | None, ended_by_deadline: bool | None) -> None:
    async with FaultServer([answer(body=fault_server.program(status="TimeLimitExceeded"))]) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "default_timeout": 5})
        metrics = (await call(tool, "1", within=within)).metrics
    assert metrics["outcome"] == "timeout"
    assert metrics.get("ended_by_deadline") is ended_by_deadline


@pytest.mark.timing
async def test_timeout_caused_by_slot_wait_is_infra_fault(sandbox_url: str) -> None:
    tool = SandboxFusionTool({"sandbox_fusion_url": sandbox_url, "rate_limit": 1, "default_timeout": 3})
    first = asyncio.create_task(call(tool, "import time; time.sleep(2)"))
    await asyncio.sleep(0.2)
    with pytest.raises(InfraFault, match="because it waited"):
        await call(tool, "while True: pass", within=4)
    await first


async def test_cancelled_waiters_leave_queue(sandbox_url: str) -> None:
    async with Proxy(sandbox_url) as proxy:
        tool = SandboxFusionTool({"sandbox_fusion_url": proxy.url, "rate_limit": 2, "default_timeout": 5})
        calls = [asyncio.create_task(call(tool, "import time; time.sleep(0.2)")) for _ in range(20)]
        await asyncio.sleep(0.1)
        for one in calls[2:]:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert proxy.requests == 2
        assert await all_slots_released(tool, 1)
        assert await call_concurrently(tool, 10) == ["1"] * 10


# Load test


@pytest.mark.ray
async def test_1000_calls_with_crashes_and_sandbox_restart(cluster: str) -> None:
    """4 processes, a limit of 16, 1 % of programs crash, 1 % time out, and the sandbox is killed and restarted."""
    programs = {
        "crash": ("raise ValueError({0})", "…ValueError: {0}"),
        "hang": ("print({0}, flush=True)\nwhile True: pass", "…longer than 2 s"),
        "fine": ("print({0} ** 2)", None),
    }

    def one(number: int) -> list[str]:
        kind = "crash" if number % 100 == 50 else "hang" if number % 100 == 99 else "fine"
        code, expected = programs[kind]
        return [code.format(number), str(number**2) if expected is None else expected.format(number)]

    calls = [one(number) for number in range(1000)]
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(serving())
        port = first.url.rsplit(":", 1)[1]
        async with Proxy(first.url) as proxy:
            config = {"sandbox_fusion_url": proxy.url, "rate_limit": 16, "default_timeout": 2}
            jobs = [{"config": config, "calls": calls[part::4], "concurrency": 64, "deadline": 60} for part in range(4)]
            async with processes(jobs) as running:
                proxy.max_in_flight = 0
                finishing = asyncio.create_task(results(running, 900))
                while proxy.requests < 400 and not finishing.done():
                    await asyncio.sleep(0.01)
                first.process.kill()
                first.process.wait()
                second = await asyncio.to_thread(servers.enter_context, serving("--port", port))
                done = await finishing
            outcomes = [outcome for one in done for outcome in one["outcomes"]]
            assert len(outcomes) == 1000
            assert [outcome for outcome in outcomes if outcome not in ("ok", "infra")] == []
            assert outcomes.count("ok") > 950
            assert 8 < proxy.max_in_flight <= 16
            assert proxy.in_flight == 0
        assert [one["unreleased"] for one in done] == [dict.fromkeys(done[0]["unreleased"], 0)] * 4
        names = [process.name() for process in second.processes()]
        assert len(names) < 12, f"programs are still running: {names}"
