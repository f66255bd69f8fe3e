"""Tests of the sessions behind an MCP server, without a transport."""

import asyncio
import base64
import sys
from collections import Counter
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import anyio
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import Client, MCPError
from strategies import scaled
from typer.testing import CliRunner

from toolroll import BaseTool, Hidden, InfraFault, PolicyFault, ToolResponse, ToolResult, tool
from toolroll.cli.app import app
from toolroll.errors import ConfigError, Fault, MissingExtra
from toolroll.integrations.mcp.http import HttpSettings
from toolroll.integrations.mcp.process import create_kwargs_by_tool
from toolroll.integrations.mcp.protocol import build_server
from toolroll.integrations.mcp.session import CANCELLED
from toolroll.integrations.mcp.sessions import ToolSessions
from toolroll.records.record import Record
from toolroll.records.writer import RecordWriter

SCHEMA = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"fail": {"type": "string"}}}},
}


class Count(BaseTool[list[int]]):
    """Counts the calls of an instance, and its own creations and releases."""

    def __init__(self, create_failures: int = 0, create_s: float = 0, cancel_create_s: float = 0) -> None:
        super().__init__({}, SCHEMA)
        self.create_s, self.cancel_create_s = create_s, cancel_create_s
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.create_failures = create_failures
        self.executing: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        assert instance_id is not None
        self.created[instance_id] += 1
        try:
            await asyncio.sleep(self.create_s)
        except asyncio.CancelledError:
            await asyncio.sleep(self.cancel_create_s)
            raise
        if self.create_failures:
            self.create_failures -= 1
            raise ConnectionError("no room")
        self.instances[instance_id] = [kwargs.get("start", 0)]
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        assert not self.released[instance_id]
        self.executing[instance_id] += 1
        try:
            match parameters.get("fail"):
                case "policy":
                    raise PolicyFault("Not like that.")
                case "infra":
                    raise InfraFault("The service is down: \ud800.")
                case "hang":
                    await asyncio.sleep(3600)
            state = self.state(instance_id)
            state[0] += 1
            return ToolResult(ToolResponse(text=str(state[0])), 0.5, {})
        finally:
            self.executing[instance_id] -= 1

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.state(instance_id)[0])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        assert not self.executing[instance_id], "released during a call"
        self.released[instance_id] += 1


@tool
def draw(size: int, color: Hidden[str]) -> ToolResponse:
    """Draw a square."""
    return ToolResponse(text=f"{color} square", image=[PIL.Image.new("RGB", (size, size), color)])


async def test_state_lasts_for_a_session_and_is_its_own() -> None:
    count = Count()
    async with ToolSessions([count], create_kwargs={"count": {"start": 10}}) as sessions:
        first, second = sessions.open(), sessions.open()
        answers = [(await session.call("count", {})).answer for session in (first, first, second, first)]
        sessions.open()
        assert answers == ["11", "12", "11", "13"]
        assert len(count.created) == 2, "a session without calls has no instance"
    assert count.released == count.created


async def test_concurrent_first_calls_share_an_instance() -> None:
    count = Count()
    async with ToolSessions([count]) as sessions:
        session = sessions.open()
        records = await asyncio.gather(*(session.call("count", {}) for _ in range(3)))
    assert sorted(record.answer for record in records) == ["1", "2", "3"]
    assert len(count.created) == 1


STEPS = st.lists(st.sampled_from(["call", "policy", "infra", "hang", "cancel", "end"]), max_size=6)


@settings(max_examples=scaled(50))
@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(0, 2))
async def test_every_created_instance_is_released_once(scripts: list[list[str]], create_failures: int) -> None:
    count = Count(create_failures)
    sessions = ToolSessions([count])

    async def client(script: list[str]) -> None:
        session = sessions.open()
        calls = []
        for step in script:
            if step == "end":
                sessions.end(session)
            elif step == "cancel" and calls:
                calls[-1].cancel()
            else:
                calls.append(asyncio.create_task(session.call("count", {"fail": step})))
            await asyncio.sleep(0)
        sessions.end(session)
        await asyncio.gather(*calls, return_exceptions=True)

    await asyncio.gather(*map(client, scripts))
    await sessions.close()
    assert count.released == count.created
    assert all(number == 1 for number in count.created.values())
    assert count.instances.keys() <= count.released.keys()


@pytest.mark.virtual_time
@pytest.mark.parametrize("timeout_s", [0.5, 5])
async def test_hung_call_ends_at_the_call_timeout(timeout_s: float) -> None:
    async with ToolSessions([Count()], call_timeout_s=timeout_s) as sessions:
        record = await sessions.open().call("count", {"fail": "hang"})
    assert (record.fault, record.answer) == (Fault.POLICY, f"The tool call timed out after {timeout_s:g} s.")
    assert timeout_s <= record.seconds <= timeout_s + 2


@pytest.mark.virtual_time
async def test_calls_wait_once_for_a_creation_that_hangs() -> None:
    count = Count(create_s=3600)
    async with ToolSessions([count], call_timeout_s=5) as sessions:
        session = sessions.open()
        records = await asyncio.gather(*(session.call("count", {}) for _ in range(4)))
    assert [record.fault for record in records] == [Fault.INFRA] * 4
    assert {record.error for record in records} == {"Creating the tools timed out after 5 s."}
    assert max(record.seconds for record in records) < 5.1
    assert count.released == count.created


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("create_s", "fault", "error"),
    [
        (0.25, Fault.POLICY, "The tool call timed out after 4.75 s."),
        (3, Fault.INFRA, "The call started too late: creating the tools took 3.00 s of its 5 s."),
    ],
)
async def test_call_timeout_includes_the_creation(create_s: float, fault: Fault, error: str) -> None:
    async with ToolSessions([Count(create_s=create_s)], call_timeout_s=5) as sessions:
        began = asyncio.get_running_loop().time()
        record = await sessions.open().call("count", {"fail": "hang"})
        assert asyncio.get_running_loop().time() - began < 7
    assert (record.fault, record.error) == (fault, error)


@pytest.mark.virtual_time
async def test_closed_sessions_have_rolled_back_their_creation() -> None:
    count = Count(create_s=3600, cancel_create_s=8)
    async with ToolSessions([count]) as sessions:
        call = asyncio.create_task(sessions.open().call("count", {}))
        await asyncio.sleep(1)
    assert count.released == count.created
    assert (await call).error == CANCELLED


@pytest.mark.virtual_time
async def test_ending_a_session_cancels_its_running_call() -> None:
    count = Count()
    async with ToolSessions([count]) as sessions:
        session = sessions.open()
        call = asyncio.create_task(session.call("count", {"fail": "hang"}))
        await asyncio.sleep(1)
        sessions.end(session)
        record = await call
        assert (record.fault, record.error) == (None, CANCELLED)
        assert (await session.call("count", {})).error == CANCELLED
    assert count.released == count.created


async def test_creation_that_failed_is_tried_again_by_the_next_call() -> None:
    async with ToolSessions([Count(create_failures=1)]) as sessions:
        session = sessions.open()
        failed = await session.call("count", {})
        assert failed.fault is Fault.INFRA
        assert "no room" in (failed.error or "")
        assert (await session.call("count", {})).answer == "1"


async def test_calls_hold_slots_of_the_tool() -> None:
    running: list[int] = [0, 0]

    @tool(limits={"limit": 2, "resource": "test_mcp_sessions"})
    async def work() -> None:
        """Work."""
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.01)
        running[0] -= 1

    async with ToolSessions([work]) as sessions:
        clients = [sessions.open() for _ in range(3)]
        records = await asyncio.gather(*(client.call("work", {}) for client in clients for _ in range(2)))
    assert running[1] == 2
    assert all(record.fault is None and "queue_wait" in record.metrics for record in records)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("cuont", {}, "Unknown tool 'cuont'. Did you mean 'count'?"),
        ("count", {"fail": 3}, "'fail' must be a string"),
        ("count", {"fail": "\ud83d"}, "half of a character"),
        ("count", {"fail": "policy"}, "Not like that."),
    ],
)
async def test_policy_fault_is_a_text_for_the_model(name: str, arguments: dict[str, Any], text: str) -> None:
    async with ToolSessions([Count()]) as sessions:
        record = await sessions.open().call(name, arguments)
    assert record.fault is Fault.POLICY
    assert text in record.answer


async def test_arguments_may_be_nested_deeply() -> None:
    value: Any = 1
    for _ in range(2 * sys.getrecursionlimit()):
        value = [value]
    async with ToolSessions([Count()]) as sessions:
        record = await sessions.open().call("count", {"fail": value})
    assert "nested too deeply" in record.answer


async def test_session_becomes_a_record(tmp_path: Path) -> None:
    kwargs = {"draw": {"color": "red"}, "count": {"ground_truth": "72"}}
    with RecordWriter(tmp_path) as writer:
        async with ToolSessions([draw, Count()], create_kwargs=kwargs, records=writer) as sessions:
            session = sessions.open("agent 1.0")
            await session.call("draw", {"size": 8})
            await session.call("count", {})
            await session.call("count", {"fail": "policy"})
            broken = sessions.open()
            await broken.call("count", {"fail": "infra"})
            sessions.open()  # without calls, hence without a record
    records = [Record.parse(line) for line in (tmp_path / "0.jsonl").read_bytes().splitlines()]
    assert len(records) == 2
    [good, bad] = sorted(records, key=lambda record: len(record.calls), reverse=True)
    assert (good.outcome, good.finish_reason, good.score, good.gts) == ("ok", "stop", 1.5, "72")
    assert [message["role"] for message in good.messages] == ["assistant", "tool"] * 3
    assert [call["answer"] for call in good.calls] == ["red square", "1", "Not like that."]
    assert good.fields["extra"]["client"] == "agent 1.0"
    assert len(list((tmp_path / "images").iterdir())) == 1
    summary = good.summary()
    assert (summary.turns, summary.calls, summary.policy_faults) == (3, 3, 1)
    assert (bad.outcome, bad.error, bad.score) == ("infra", "The service is down: \ud800.", None)


async def test_answers_have_the_form_of_mcp() -> None:
    async with ToolSessions([draw, Count()], create_kwargs={"draw": {"color": "red"}}) as sessions:
        session = sessions.open()
        async with Client(build_server(sessions, lambda _: session)) as client:
            drawing, counting = (await client.list_tools()).tools
            assert (drawing.name, drawing.description, counting.name) == ("draw", "Draw a square.", "count")
            assert drawing.input_schema["properties"].keys() == {"size"}, "the model does not see hidden parameters"

            [image, text] = (await client.call_tool("draw", {"size": 8})).content
            assert image.type == "image"
            assert PIL.Image.open(BytesIO(base64.b64decode(image.data))).size == (8, 8)
            assert text.type == "text"
            assert text.text == "red square"

            rejected = await client.call_tool("count", {"fail": "policy"})
            assert rejected.is_error
            assert [content.text for content in rejected.content if content.type == "text"] == ["Not like that."]

            with pytest.raises(
                MCPError, match="not caused by the arguments of the call: The service is down"
            ) as failed:
                await client.call_tool("count", {"fail": "infra"})
            assert failed.value.error.data == {"fault": "infra"}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_client_cancels_its_call(mode: Any) -> None:
    count = Count()
    async with ToolSessions([count]) as sessions:
        session = sessions.open()
        async with Client(build_server(sessions, lambda _: session), mode=mode) as client:
            with anyio.move_on_after(10) as cancelled:
                async with anyio.create_task_group() as group:
                    group.start_soon(client.call_tool, "count", {"fail": "hang"})
                    while not count.executing.total():
                        await asyncio.sleep(0)
                    cancelled.cancel()
            async with asyncio.timeout(30):
                while count.executing.total():
                    await asyncio.sleep(0)
            assert not (await client.call_tool("count", {})).is_error
    assert count.released == count.created


@pytest.mark.parametrize(
    ("create", "expected"),
    [
        ({}, {}),
        ({"eggs": 6}, {"a": {"eggs": 6}, "b": {"eggs": 6}}),
        ({"a": {"eggs": 6}}, {"a": {"eggs": 6}}),
        ({"a": 6}, {"a": {"a": 6}, "b": {"a": 6}}),
    ],
)
def test_create_kwargs_are_for_all_tools_or_by_name(create: dict[str, Any], expected: dict[str, Any]) -> None:
    assert create_kwargs_by_tool(create, ["a", "b"]) == expected


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_invalid_timeout_is_rejected(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="tools serve: call_timeout: "):
        ToolSessions([Count()], call_timeout_s=timeout_s)


def test_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    monkeypatch.delitem(sys.modules, "toolroll.integrations.mcp")
    with pytest.raises(MissingExtra, match=r"toolroll\[mcp\]"):
        import_module("toolroll.integrations.mcp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "tools serve: no protocol selected. Add --mcp."),
        (["--mcp", "--http", "8090x"], "--http: invalid address '8090x'. Expected HOST:PORT"),
        (["--mcp", "--http", "[::]:8090"], "Cannot listen on :: without a token"),
        (["--mcp", "--create", "[]"], "--create: expected a JSON object"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tools", "serve", "tools.yaml", *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_other_machines_need_a_token() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 0\.0\.0\.0 without a token.*Set TOOLROLL_MCP_TOKEN"):
        HttpSettings(host="0.0.0.0")
    assert HttpSettings(host="0.0.0.0", token="secret").token == "secret"
