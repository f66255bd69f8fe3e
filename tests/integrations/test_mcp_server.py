"""Tests of `toolroll tools serve --mcp` with the client of the official SDK, over stdio and HTTP."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import doc_page
import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from toolroll.integrations.mcp.http import HttpServer, HttpSettings
from toolroll.integrations.mcp.sessions import ToolSessions
from toolroll.records.record import Record
from toolroll.tools.registry import initialize_tools_from_config

pytestmark = pytest.mark.process

TOOLROLL = str(Path(sys.executable).with_name("toolroll"))
TOOLS = '''
import os
import time
from pathlib import Path
from toolroll import BaseTool, Hidden, tool

LOG = Path(__file__).with_name("log")
print("printed by a module")
os.system("echo printed by a process")

class Count(BaseTool):
    """Counts the calls of an instance."""
    default_schema = {"type": "function", "function": {"name": "count"}}
    def log(self, event):
        with LOG.open("a") as file:
            file.write(event + "\\n")
    def new_state(self, **_):
        self.log("create")
        return [0]
    async def execute(self, instance_id, parameters, **_):
        self.state(instance_id)[0] += 1
        return str(self.state(instance_id)[0]), None, {}
    async def release(self, instance_id, **_):
        self.log("release")

@tool
def shout(secret: Hidden[str] = "") -> str:
    "Print."
    print("printed by a tool")
    os.system("echo printed by a process; cat")
    return secret

@tool
def nap() -> None:
    "Sleep."
    LOG.with_name("asleep").touch()
    time.sleep(60)
'''
CONFIG = "tools: [{class_name: served.Count}, {class_name: served.shout}, {class_name: served.nap}]"
CLIENT = """
import json, subprocess, sys, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def send(**message):
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
    server.stdin.flush()
send(id=1, method="initialize", params={"protocolVersion": "2025-06-18", "capabilities": {},
                                        "clientInfo": {"name": "plain", "version": "1"}})
server.stdout.readline()
send(method="notifications/initialized")
send(id=2, method="tools/call", params={"name": "count", "arguments": {}})
print(server.pid, json.loads(server.stdout.readline())["result"]["content"][0]["text"], flush=True)
send(id=3, method="tools/call", params={"name": "nap", "arguments": {}})
time.sleep(60)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "served.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(CONFIG)
    return tmp_path / "tools.yaml"


def log_of(config: Path) -> list[str]:
    return config.with_name("log").read_text().split()


def wait_for(condition: Any) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def texts(result: Any) -> list[str]:
    return [content.text for content in result.content]


async def test_sdk_client_calls_tools_over_stdio(config: Path, tmp_path: Path) -> None:
    options = ["--create", '{"shout": {"secret": "72"}}', "--records", str(tmp_path / "records")]
    server = StdioServerParameters(command=TOOLROLL, args=["tools", "serve", str(config), "--mcp", *options])
    with (tmp_path / "stderr").open("w") as stderr:
        async with Client(stdio_client(server, errlog=stderr)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert list(tools) == ["count", "shout", "nap"]
            assert "secret" not in json.dumps(tools["shout"].input_schema)
            assert texts(await client.call_tool("shout", {})) == ["72"]
            assert [texts(await client.call_tool("count", {})) for _ in range(2)] == [["1"], ["2"]]
            assert (await client.call_tool("shout", {"secret": "1"})).is_error
    assert log_of(config) == ["create", "release"]
    printed = (tmp_path / "stderr").read_text()
    assert [printed.count(f"printed by a {what}") for what in ("module", "tool", "process")] == [1, 1, 2]
    [line] = next((tmp_path / "records").glob("*/0.jsonl")).read_bytes().splitlines()
    assert [call["answer"] for call in Record.parse(line).calls][:3] == ["72", "1", "2"]


@pytest.mark.parametrize("end", ["kill the client", "stop the server"])
def test_server_ends_during_a_call(config: Path, end: str) -> None:
    command = [sys.executable, "-c", CLIENT, TOOLROLL, "tools", "serve", str(config), "--mcp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid, answer = client.stdout.readline().split()
        assert answer == "1"
        wait_for(config.with_name("asleep").exists)
        if end == "stop the server":
            os.kill(int(pid), signal.SIGTERM)
            wait_for(lambda: has_ended(int(pid)))
        client.kill()
    wait_for(lambda: has_ended(int(pid)))
    assert log_of(config) == ["create", "release"]


async def test_http_server_needs_the_token_and_ends_on_signal(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLROLL_MCP_TOKEN", "right")
    with listening(["tools", "serve", str(config), "--mcp", "--http", "127.0.0.1:0"]) as (process, url):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx2.post(url, headers=headers, json={}).status_code == 401
        async with connect(url, token="right") as client:
            call = asyncio.create_task(client.call_tool("nap", {}))
            await asyncio.to_thread(wait_for, config.with_name("asleep").exists)
            assert texts(await client.call_tool("count", {})) == ["1"]
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 30) == 0
            with pytest.raises(MCPError):
                await call
    assert log_of(config) == ["create", "release"]


@contextmanager
def listening(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server, and yield its process and its URL."""
    with subprocess.Popen([TOOLROLL, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, next(found[1] for line in process.stderr if (found := re.search(r"serving on (\S+):", line)))
        finally:
            process.kill()


@asynccontextmanager
async def connect(url: str, mode: str = "auto", token: str = "") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


@asynccontextmanager
async def http_server(config: Path, **settings: Any) -> AsyncIterator[str]:
    """Serve in this process."""
    async with ToolSessions(initialize_tools_from_config(config)) as sessions:
        server, stop = HttpServer(sessions, HttpSettings(**settings)), asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))
        try:
            yield server.url
        finally:
            stop.set()
            await serving


@pytest.fixture
def importable(config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(config.parent))
    yield
    sys.modules.pop("served", None)


@pytest.mark.usefixtures("importable")
async def test_http_sessions_have_their_own_state(config: Path) -> None:
    async with http_server(config) as url, connect(url) as first:
        async with connect(url, "legacy") as second:
            answers = [texts(await client.call_tool("count", {})) for client in (first, second, first)]
            assert first.protocol_version == "2025-11-25", "a version with sessions"
        assert answers == [["1"], ["1"], ["2"]]
        await asyncio.to_thread(wait_for, lambda: log_of(config) == ["create", "create", "release"])
        assert texts(await first.call_tool("count", {})) == ["3"]
    assert log_of(config) == ["create", "create", "release", "release"]


@pytest.mark.usefixtures("importable")
async def test_call_without_a_session_has_its_own_instances(config: Path) -> None:
    async with http_server(config) as url, connect(url, "2026-07-28") as client:
        assert [texts(await client.call_tool("count", {})) for _ in range(2)] == [["1"], ["1"]]
    assert sorted(log_of(config)) == ["create", "create", "release", "release"]


@pytest.mark.usefixtures("importable")
async def test_idle_http_session_is_released(config: Path) -> None:
    initialize = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "plain", "version": "1"},
    }
    async with http_server(config, idle_timeout_s=0.5) as url, httpx2.AsyncClient() as http:

        async def send(method: str, params: Any, headers: dict[str, str]) -> httpx2.Response:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            accept = {"Accept": "application/json, text/event-stream"}
            return await http.post(url, json=message, headers={**accept, **headers})

        status = 404
        while status == 404:  # the session ended before the call, on a busy machine
            session = {"Mcp-Session-Id": (await send("initialize", initialize, {})).headers["Mcp-Session-Id"]}
            called = await send("tools/call", {"name": "count", "arguments": {}}, session)
            status = called.status_code
        assert '"text":"1"' in called.text
        await asyncio.to_thread(wait_for, lambda: "release" in log_of(config))
        assert (await send("tools/list", {}, session)).status_code == 404
    assert log_of(config) == ["create", "release"]


@pytest.mark.usefixtures("importable")
async def test_web_pages_cannot_call_the_tools(config: Path) -> None:
    async with http_server(config) as url, httpx2.AsyncClient() as http:
        for headers in ({"Origin": "https://example.com"}, {"Host": "example.com"}):
            response = await http.post(url, json={}, headers=headers)
            assert response.status_code in (403, 421)


def test_documentation_page_works_as_printed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (root / "docs/mcp-server.md").read_text()
    for title, body in doc_page.files(page).items():
        (tmp_path / title).write_text(body)
    [play] = doc_page.commands(page)
    assert doc_page.trimmed(doc_page.run(play, tmp_path)) == doc_page.trimmed(play.output)
    [record] = [Record.parse(path.read_bytes()) for path in tmp_path.glob("sessions/*/0.jsonl")]
    assert record.score == 1.0

    [start] = re.findall(r"^toolroll (tools serve .*)$", page, re.MULTILINE)
    monkeypatch.setenv("TOOLROLL_MCP_TOKEN", "change-me")
    monkeypatch.chdir(tmp_path)
    with listening(shlex.split(start.replace(":8090", ":0"))) as (_, url):
        monkeypatch.setenv("MCP_URL", url.replace("0.0.0.0", "127.0.0.1"))
        shown = doc_page.run(doc_page.Command("python play_http.py", ""), tmp_path)
    assert shown.splitlines() == play.output.splitlines()[1:]
