"""MCP servers behind a URL: both transports of the SDK, and a server whose HTTP responses are chosen by the test."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from free_port import free_port

from toolroll import (
    BaseTool,
    ConfigError,
    InfraFault,
    PolicyFault,
    ResourceLimits,
    ToolInstance,
    get_limiter,
    initialize_tools_from_config,
)
from toolroll.errors import CallTimeout
from toolroll.limiter.leased_limiter import LocalLedgerLimiter
from toolroll.limiter.ledger.feedback import Rejection, rejection_of
from toolroll.tools.mcp import http_exchange, server
from toolroll.tools.mcp.http import MessageStream
from toolroll.tools.mcp.mcp_tool import load_mcp_tools

SDK_SERVER = """
import sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("http")

@server.tool()
async def echo(text: str) -> str:
    "Return a text."
    return text

server.run(sys.argv[1], port=int(sys.argv[2]))
"""
MESSAGE_LIMIT = 16 << 20
CONCURRENT_CALLS = 260


def load(url: str, **settings: Any) -> BaseTool[Any]:
    [tool] = load_mcp_tools({"type": "mcp", "url": url, **settings})
    return tool


async def call(tool: BaseTool[Any], **arguments: Any) -> str:
    async with ToolInstance(tool) as instance:
        return (await instance.execute(arguments)).response.text or ""


@contextmanager
def sdk_server(transport: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", SDK_SERVER, transport, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def call_when_up(tool: BaseTool[Any], **arguments: Any) -> str:
    give_up = time.monotonic() + 30
    while True:
        try:
            return await call(tool, **arguments)
        except InfraFault:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("server_transport", "path", "transport"), [("streamable-http", "mcp", "http"), ("sse", "sse", "sse")]
)
async def test_server_of_the_sdk_answers_and_is_reconnected(server_transport: str, path: str, transport: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/{path}"
    with sdk_server(server_transport, port) as process:
        give_up = time.monotonic() + 30
        while True:
            try:
                echo = load(url, transport=transport)
                break
            except ConfigError:
                assert time.monotonic() < give_up
                await asyncio.sleep(0.1)
        assert await call(echo, text="over HTTP") == "over HTTP"
        answers = await asyncio.gather(*(call(echo, text=str(number)) for number in range(50)))
        assert answers == [str(number) for number in range(50)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(2):
            with pytest.raises(InfraFault, match="MCP server http://"):
                await call(echo, text="gone")
    with sdk_server(server_transport, port):
        assert await call_when_up(echo, text="back") == "back"


class Responder(BaseHTTPRequestHandler):
    """Serves a tool whose arguments are the HTTP response to the call. With SSE, an error status only."""

    protocol_version = "HTTP/1.1"
    server: "ResponderServer"

    def do_GET(self) -> None:
        self.record_token()
        if self.path != "/sse":
            self.respond(405)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.server.streams.append(self.wfile)
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        self.server.stopping.wait(60)

    def do_DELETE(self) -> None:
        self.record_token()
        self.respond(200)

    def do_POST(self) -> None:
        self.record_token()
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "method" not in message:  # a reply
            self.respond(202)
            self.server.replied.set()
            return
        arguments: dict[str, Any] = message.get("params", {}).get("arguments", {})
        status, content_type = arguments.get("status", 200), arguments.get("type", "application/json")
        time.sleep(arguments.get("delay", 0))
        if arguments.get("held"):
            self.server.holding.set()
            self.server.released.wait(60)
        if arguments.get("together"):
            self.server.barrier.wait(60)
        if arguments.get("drop"):
            self.close_connection = True
            return
        if "hang" in arguments:
            self.hang(sends_events=arguments["hang"] == "events")
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
        match message["method"]:
            case "initialize":
                self.server.sessions += 1
                info = {"name": "responder", "version": "1"}
                capabilities: dict[str, Any] = {"tools": {}}
                answer["result"] = {
                    "protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info
                }  # fmt: skip
            case "tools/list" if self.server.list_status != 200:
                status = self.server.list_status
            case "tools/list":
                answer["result"] = {"tools": [{"name": "respond", "inputSchema": {"type": "object"}}]}
            case "tools/call" if "code" in arguments:
                answer["error"] = {"code": arguments["code"], "message": "not like that"}
            case "tools/call" if "result" in arguments:
                answer["result"] = arguments["result"]
            case "tools/call" if arguments.get("emoji"):
                answer["result"] = {"content": [{"type": "text", "text": "one: \U0001f600, half: \ud83d"}]}
            case "tools/call":
                text = self.headers.get("Mcp-Session-Id", "") + "x" * arguments.get("size", 0)
                answer["result"] = {"content": [{"type": "text", "text": text}]}
            case "server/discover":
                answer["error"] = {"code": -32601, "message": "unknown method"}
            case _:
                status = 202
        body = json.dumps(answer).encode() if arguments.get("json", True) else b"<html>"
        if self.path == "/messages" and status == 200:
            self.server.streams[-1].write(b"event: message\ndata: " + body + b"\n\n")
            status = 202
        if "event-stream" in content_type:
            body = b"data: " + body + b"\n\n"
        if arguments.get("changed"):
            body = b'data: {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n\n' + body
        if arguments.get("ping"):
            body = b'data: {"jsonrpc": "2.0", "id": 1, "method": "ping"}\n\n' + body
            self.respond(status, content_type, body, pause_after=b"}\n\n")
        elif arguments.get("gzip"):
            self.respond(status, content_type, gzip.compress(body, compresslevel=1), encoding="gzip")
        else:
            self.respond(status, content_type, body, missing=arguments.get("missing", 0))

    def hang(self, *, sends_events: bool) -> None:
        """Send nothing, or events without end, until the client closes the connection."""
        if sends_events:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
        self.connection.settimeout(0.05)
        while not self.server.stopping.is_set():
            if sends_events:
                self.wfile.write(b": still running\n\n")
            with suppress(TimeoutError):
                if not self.connection.recv(1):
                    break
        self.close_connection = True
        self.server.hung_up.set()

    def respond(
        self,
        status: int,
        content_type: str = "",
        body: bytes = b"",
        encoding: str = "identity",
        missing: int = 0,
        pause_after: bytes = b"",
    ) -> None:
        """Send a response. After the text `pause_after`, wait for a reply of the client."""
        self.send_response(status)
        if status != 202:
            self.send_header("Content-Type", content_type)
        self.send_header("Content-Encoding", encoding)
        self.send_header("Retry-After", "7")
        self.send_header("Mcp-Session-Id", f"session{self.server.sessions}")
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        if pause_after:
            start, _, body = body.partition(pause_after)
            self.wfile.write(start + pause_after)
            assert self.server.replied.wait(30)
        self.wfile.write(body)
        self.close_connection = missing > 0

    def record_token(self) -> None:
        self.server.tokens.append((self.command, self.headers.get("Authorization")))

    def log_message(self, *_: Any) -> None:
        pass


class ResponderServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONCURRENT_CALLS

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Responder)
        self.sessions = 0
        self.list_status = 200
        self.streams: list[Any] = []
        self.tokens: list[tuple[str, str | None]] = []
        """Method and Authorization header of each request."""
        self.barrier = threading.Barrier(CONCURRENT_CALLS)
        self.replied = threading.Event()
        """Set when the client has replied to a request."""
        self.holding, self.released = threading.Event(), threading.Event()
        """Set when a call is held, and when it may end."""
        self.hung_up = threading.Event()
        """Set when the client has closed the connection of a request that hangs."""
        self.stopping = threading.Event()


@pytest.fixture
def responder_server() -> Iterator[ResponderServer]:
    with ResponderServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.stopping.set()
        server.shutdown()


@pytest.fixture
def responder(responder_server: ResponderServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(server, "_servers", {})  # a server of an earlier test may have had the same port
    return f"http://127.0.0.1:{responder_server.server_port}"


INVALID_PARAMS, INVALID_REQUEST, SERVER_ERROR, INTERNAL_ERROR = -32602, -32600, -32000, -32603


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": INVALID_PARAMS}, "^not like that$"),
        ({"code": INVALID_REQUEST}, "^not like that$"),
        ({"code": SERVER_ERROR}, "^not like that$"),
        ({"code": INTERNAL_ERROR}, "^not like that$"),
        ({"code": INVALID_PARAMS, "status": 400}, r"^not like that \(HTTP status 400\)$"),
        ({"status": 413, "json": False}, r"\(HTTP status 413\)$"),
        ({"status": 422, "json": False}, r"\(HTTP status 422\)$"),
    ],
)
async def test_rejected_arguments_are_policy_faults(responder: str, arguments: dict[str, Any], message: str) -> None:
    respond = load(f"{responder}/mcp")
    assert await call(respond) == "session2", "the first session listed the tools"
    with pytest.raises(PolicyFault, match=message):
        await call(respond, **arguments)
    assert await call(respond) == "session2"


@pytest.mark.parametrize("status", [202, 302, 401, 403, 405, 408, 429, 500, 502, 503])
async def test_failing_servers_are_infra_faults(responder: str, status: int) -> None:
    respond = load(f"{responder}/mcp")
    for arguments in ({"json": False}, {"code": INVALID_PARAMS}):
        with pytest.raises(InfraFault, match=rf"\(HTTP status {status}\)\.$"):
            await call(respond, status=status, **arguments)
    assert await call(respond) == "session2"


@pytest.mark.parametrize(
    ("arguments", "expected", "retry_after"),
    [
        ({"status": 429, "json": False}, InfraFault, 7),
        ({"status": 503, "code": INVALID_PARAMS}, InfraFault, 7),
        ({"drop": True}, InfraFault, 0),
        ({"hang": "silently"}, CallTimeout, 0),
    ],
)
async def test_rejected_call_counts_for_a_limit_that_adapts(
    responder: str, arguments: dict[str, Any], expected: type[Exception], retry_after: float
) -> None:
    limits = ResourceLimits.model_validate({"resource": f"{responder} {arguments}", "limit": {"min": 1, "max": 8}})
    config = {"type": "mcp", "url": f"{responder}/mcp", "call_timeout": 0.5 if "hang" in arguments else 60}
    [respond] = load_mcp_tools(config, limits=limits)
    with pytest.raises(expected) as raised:
        await call(respond, **arguments)
    assert rejection_of(raised.value) == Rejection(retry_after)
    limiter = get_limiter(str(limits.resource), limits)
    assert isinstance(limiter, LocalLedgerLimiter)
    async with asyncio.timeout(10):
        while limiter.status().rejected != 1:
            await asyncio.sleep(0.02)


async def test_server_that_cannot_list_changed_tools_is_replaced(
    responder_server: ResponderServer, responder: str
) -> None:
    respond = load(f"{responder}/mcp")
    assert await call(respond, type="text/event-stream", changed=True) == "session2"
    responder_server.list_status = 503
    with pytest.raises(InfraFault, match="cannot list its tools"):
        await call(respond)
    responder_server.list_status = 200
    assert await call(respond) == "session3"


async def test_page_of_a_proxy_is_an_infra_fault(responder: str) -> None:
    with pytest.raises(InfraFault, match="text/html"):
        await call(load(f"{responder}/mcp"), type="text/html", json=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"status": 404, "json": False},
        {"status": 404, "code": -32001},
        {"status": 400, "code": SERVER_ERROR},
        {"status": 400, "code": INVALID_REQUEST},
    ],
)
async def test_forgotten_session_is_replaced_after_an_infra_fault(responder: str, arguments: dict[str, Any]) -> None:
    for scope in ("process", "trajectory"):
        async with ToolInstance(load(f"{responder}/mcp", scope=scope)) as instance:
            before = (await instance.execute({})).response.text
            with pytest.raises(InfraFault, match=f"HTTP status {arguments['status']}"):
                await instance.execute(arguments)
            after = (await instance.execute({})).response.text
            assert after != before


@pytest.mark.parametrize("scope", ["process", "trajectory"])
async def test_unknown_session_ends_no_other_call(
    responder_server: ResponderServer, responder: str, scope: str
) -> None:
    async with ToolInstance(load(f"{responder}/mcp", scope=scope)) as instance:
        other = asyncio.create_task(instance.execute({"held": True}))
        assert await asyncio.to_thread(responder_server.holding.wait, 30)
        with pytest.raises(InfraFault, match="HTTP status 404"):
            await instance.execute({"status": 404, "json": False})
        assert (await instance.execute({})).response.text == "session3"
        closed = [method for method, _ in responder_server.tokens].count("DELETE")
        assert not other.done()
        responder_server.released.set()
        assert (await other).response.text == "session2"
        async with asyncio.timeout(30):
            while [method for method, _ in responder_server.tokens].count("DELETE") == closed:
                await asyncio.sleep(0.02)
        assert (await instance.execute({})).response.text == "session3"


async def test_reply_to_the_server_does_not_change_the_fault(responder: str) -> None:
    respond = load(f"{responder}/mcp")
    with pytest.raises(PolicyFault, match=r"^not like that$"):
        await call(respond, code=INVALID_PARAMS, ping=True, type="text/event-stream")


@pytest.mark.parametrize("response", ["none", "events"])
async def test_request_of_a_timed_out_call_ends(
    responder_server: ResponderServer, responder: str, response: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "REQUEST_DEADLINE_MARGIN_S", 0.1)
    respond = load(f"{responder}/mcp")
    assert await call(respond) == "session2"
    tasks = len(asyncio.all_tasks())
    with pytest.raises(CallTimeout):
        await call(load(f"{responder}/mcp", call_timeout=0.5), hang=response)
    assert await asyncio.to_thread(responder_server.hung_up.wait, 30)
    assert await call(respond) == "session2"
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.02)


async def test_failing_call_does_not_change_the_fault_of_another(
    responder_server: ResponderServer, responder: str
) -> None:
    respond = load(f"{responder}/mcp")
    rejected = asyncio.create_task(call(respond, code=INVALID_PARAMS, held=True))
    assert await asyncio.to_thread(responder_server.holding.wait, 30)
    with pytest.raises(InfraFault):
        await call(respond, status=503)
    assert not rejected.done()
    responder_server.released.set()
    with pytest.raises(PolicyFault, match="not like that"):
        await rejected


@pytest.mark.parametrize(
    ("arguments", "problem"), [({"drop": True}, "Server disconnected"), ({"missing": 9}, "without sending complete")]
)
async def test_failed_request_ends_no_other_call(
    responder_server: ResponderServer, responder: str, arguments: dict[str, Any], problem: str
) -> None:
    respond = load(f"{responder}/mcp")
    other = asyncio.create_task(call(respond, held=True))
    assert await asyncio.to_thread(responder_server.holding.wait, 30)
    with pytest.raises(InfraFault, match=f"the request failed: RemoteProtocolError: .*{problem}"):
        await call(respond, **arguments)
    assert not other.done()
    responder_server.released.set()
    assert await other == "session2"


async def test_calls_do_not_wait_for_connections(responder: str) -> None:
    respond = load(f"{responder}/mcp", start_timeout=20)
    answers = await asyncio.gather(*(call(respond, together=True) for _ in range(CONCURRENT_CALLS)))
    assert answers == ["session2"] * CONCURRENT_CALLS


@pytest.mark.parametrize(
    ("path", "transport", "content_type"),
    [("mcp", "http", "application/json"), ("mcp", "http", "text/event-stream"), ("sse", "sse", "application/json")],
)
async def test_lone_surrogate_in_a_result_is_replaced(
    responder: str, path: str, transport: str, content_type: str
) -> None:
    respond = load(f"{responder}/{path}", transport=transport, call_timeout=5)
    assert await call(respond, emoji=True, type=content_type) == "one: \U0001f600, half: \ufffd"


@pytest.mark.parametrize("chunk_bytes", range(1, 15))
async def test_escapes_across_chunks_are_replaced(chunk_bytes: int) -> None:
    text = json.dumps([r"\ud83d", "\\", "\U0001f600", '"\ud83d', "\ud83d\ud83d\ude00", "\ude00\n"]).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(text), chunk_bytes):
            yield text[start : start + chunk_bytes]

    stream = MessageStream(httpx2.Response(200, content=chunks()), None)
    read = b"".join([chunk async for chunk in stream])
    assert json.loads(read) == [r"\ud83d", "\\", "\U0001f600", '"\ufffd', "\ufffd\U0001f600", "\ufffd\n"]


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_size_of_a_response_is_bounded(responder: str, content_type: str, compress: bool) -> None:
    respond = load(f"{responder}/mcp")
    kind = {"type": content_type, "gzip": compress}
    assert len(await call(respond, size=MESSAGE_LIMIT // 2, **kind)) > MESSAGE_LIMIT // 2
    other = asyncio.create_task(call(respond, delay=2))
    await asyncio.sleep(0.1)
    with pytest.raises(PolicyFault, match="it has more than 16 MiB"):
        await call(respond, size=MESSAGE_LIMIT, **kind)
    assert await other == "session2"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"status": 503}, "responded with HTTP status 503"),
        ({"drop": True}, "RemoteProtocolError: Server disconnected"),
        ({"status": 201, "size": MESSAGE_LIMIT}, f"the response has more than {MESSAGE_LIMIT} bytes"),
        ({"size": 1 << 20}, "event exceeded the 1048576 byte limit"),
        ({"result": "text"}, "sent an invalid message: ValidationError"),
    ],
    ids=["rejected", "dropped", "long response", "long event", "invalid"],
)
async def test_failed_message_over_sse_is_an_infra_fault_at_once(
    responder: str, arguments: dict[str, Any], problem: str
) -> None:
    respond = load(f"{responder}/sse", transport="sse", call_timeout=30)
    began = time.monotonic()
    with pytest.raises(InfraFault, match=problem):
        await call(respond, **arguments)
    assert time.monotonic() - began < 10
    assert await call(respond) == ""


@pytest.mark.parametrize(("path", "transport"), [("mcp", "http"), ("sse", "sse")])
async def test_headers_from_the_environment_reach_the_server(
    responder_server: ResponderServer,
    responder: str,
    path: str,
    transport: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "t1\n")  # with a line break at its end, as in a mounted file
    entry = f"{{type: mcp, url: '{responder}/{path}', transport: {transport}, headers: {{Authorization: '%s'}}}}"
    config = tmp_path / "tools.yaml"
    config.write_text(f"tools: [{{config: {entry % 'Bearer ${oc.env:SEARCH_TOKEN}'}}}]")
    [respond] = initialize_tools_from_config(config)
    await call(respond)
    methods = {"http": {"GET", "POST", "DELETE"}, "sse": {"GET", "POST"}}[transport]
    assert set(responder_server.tokens) == {(method, "Bearer t1") for method in methods}


@pytest.mark.parametrize("path", ["mcp", "sse"])
async def test_fault_hides_the_key_in_a_url(path: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(f"http://127.0.0.1:{free_port()}/{path}?api_key=k1", transport="sse" if path == "sse" else "http")
    assert "k1" not in str(error.value)
    assert f"/{path}?***" in str(error.value)
