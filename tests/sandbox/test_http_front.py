"""Web pages, idle connections and clients with different tokens at the HTTP front."""

import asyncio
from typing import Any

import aiohttp
import pytest
from yarl import URL

from sandbox.http_front import http_front
from toolroll.sandbox.server.server import SandboxServer

pytestmark = pytest.mark.virtual_time


async def request(server: SandboxServer, path: str, body: Any = None, method: str = "", **headers: str) -> Any:
    """Return the status and the JSON content of a response."""
    method = method or ("GET" if body is None else "POST")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json(content_type=None) if "json" in response.content_type else None


PROGRAM = {"code": "1;", "language": "python"}


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.0.0.1:9999", "127.1.2.3:80", "[::1]:8080"]
)
async def test_loopback_names_are_accepted(host: str) -> None:
    async with http_front() as server:
        assert (await request(server, "/run_code", PROGRAM, Host=host))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "[::1", "@"]
)
@pytest.mark.parametrize("path", ["/run_code", "/v1/ping", "/metrics"])
async def test_rebound_name_is_rejected_with_remedy(host: str, path: str) -> None:
    async with http_front() as server:
        status, answer = await request(server, path, PROGRAM if path == "/run_code" else None, Host=host)
        assert status == 421
        assert "http://127.0.0.1" in answer["detail"]
        assert "TOOLROLL_SANDBOX_TOKEN" in answer["detail"]


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"token": "t"}])
async def test_any_name_reaches_other_addresses_or_token(settings: dict[str, str]) -> None:
    async with http_front(**settings) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        headers = {"Host": "sandbox-1:8080", "Authorization": "Bearer t"}
        assert (await request(server, "/run_code", PROGRAM, **headers))[0] == 200


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"token": "t"}])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null"])
async def test_web_page_is_rejected(settings: dict[str, str], origin: str) -> None:
    async with http_front(**settings) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        status, answer = await request(server, "/run_code", PROGRAM, Origin=origin, Authorization="Bearer t")
        assert (status, "Origin" in answer["detail"]) == (403, True)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /run_code HTTP/1.1\r\nHost: local", b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
async def test_silent_connection_is_closed(sent: bytes) -> None:
    async with http_front() as server:
        reader, writer = await asyncio.open_connection(URL(server.url).host, URL(server.url).port)
        writer.write(sent)
        started = asyncio.get_running_loop().time()
        await reader.read()  # until the server closes the connection
        assert 60 < asyncio.get_running_loop().time() - started < 120
        writer.close()
        await writer.wait_closed()


async def run(server: SandboxServer, code: str, token: str | None, **fields: str) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    status, answer = await request(server, "/run_code", {"code": code, "language": "python", **fields}, **headers)
    assert status == 200
    return str(answer["run_result"]["stdout"])


@pytest.mark.parametrize(("settings", "other"), [({"token": "one, two"}, "two"), ({}, "two"), ({}, None)])
async def test_session_belongs_to_its_token(settings: dict[str, str], other: str | None) -> None:
    async with http_front(**settings) as server:
        assert await run(server, "secret;", "one", session_id="s") == "secret;"
        assert await run(server, "mine;", other, session_id="s") == "mine;"
        assert await run(server, "more;", "one", session_id="s") == "secret;more;"


async def test_cached_response_belongs_to_its_token() -> None:
    async with http_front(token="one,two") as server:
        for token in ("one", "two"):
            await run(server, "1;", token, session_id="s", idempotency_key="k")
        sources = server.executor.sources  # type: ignore[attr-defined]
        assert list(sources.values()) == ["1;", "1;"], "the second client got the first one's response"


@pytest.mark.parametrize("token", ["", "three", "one,two", " "])
async def test_only_listed_tokens_are_accepted(token: str) -> None:
    async with http_front(token="one,,two") as server:
        assert (await request(server, "/run_code", PROGRAM, Authorization=f"Bearer {token}"))[0] == 401
        assert (await request(server, "/run_code", PROGRAM, Authorization="Bearer two"))[0] == 200


async def test_metrics_require_token_if_set() -> None:
    async with http_front(token="one") as server:
        assert (await request(server, "/metrics"))[0] == 401
        assert (await request(server, "/metrics", Authorization="Bearer one"))[0] == 200
        assert (await request(server, "/v1/ping"))[0] == 200
    async with http_front() as server:
        assert (await request(server, "/metrics"))[0] == 200
