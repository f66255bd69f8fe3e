"""Web pages, idle connections and clients with different tokens at the HTTP front."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from sandbox.http_front import FrontServer, http_front
from toolroll.sandbox.protocol import DEADLINE_HEADER, RunCodeRequest, RunCodeResponse
from toolroll.sandbox.server.execution.job import JobFailed
from toolroll.sandbox.server.execution.sessions import MAX_SESSION_WAITERS

pytestmark = pytest.mark.virtual_time


async def request(server: FrontServer, path: str, body: Any = None, method: str = "", **headers: str) -> Any:
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


async def run(server: FrontServer, code: str, token: str | None, **fields: str) -> str:
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
        sources = server.front.executor.sources  # type: ignore[attr-defined]
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


async def test_waiters_of_busy_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**PROGRAM, "session_id": "busy"}
    async with http_front() as server:
        answer, may_end = await server.front.executor.run_code(RunCodeRequest(**PROGRAM)), asyncio.Event()

        async def run_slowly(_: RunCodeRequest) -> RunCodeResponse:
            await may_end.wait()
            return answer

        monkeypatch.setattr(server.front.executor, "run_code", run_slowly)
        late = {DEADLINE_HEADER: str(time.time() + 5)}
        expired = [asyncio.create_task(request(server, "/run_code", body, **late)) for _ in range(2)]
        await asyncio.sleep(1)
        others = [asyncio.create_task(request(server, "/run_code", body)) for _ in range(MAX_SESSION_WAITERS)]
        await asyncio.sleep(1)
        assert (await expired[1])[0] == 504
        assert sum(each.done() for each in others) == 1
        may_end.set()
        statuses = [status for status, _ in await asyncio.gather(expired[0], *others)]
        assert sorted(statuses) == [200] * MAX_SESSION_WAITERS + [429]
        assert not server.front.executor.sessions._waiting


@pytest.mark.parametrize("error", [JobFailed("no zygote"), OSError("no space"), KeyError("bug")])
async def test_every_failure_of_the_server_is_counted(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_front() as server:
        monkeypatch.setattr(server.front.executor, "run_code", AsyncMock(side_effect=error))
        assert (await request(server, "/run_code", PROGRAM))[1]["status"] == "SandboxError"
        executions = server.hub.metrics.executions.labels("", "SandboxError")
        assert executions._value.get() == 1


async def test_forwarded_request_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fronts forward requests over Unix sockets. The front that has accepted the connection knows the client."""
    caplog.set_level("INFO", "toolroll.sandbox.access")
    async with http_front(access_log=True) as server:
        await web.UnixSite(server.front.runner, str(tmp_path / "front")).start()
        connector = aiohttp.UnixConnector(str(tmp_path / "front"))
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://localhost/v1/ping"):
            pass
        await request(server, "/v1/ping")
    assert [record.__dict__["remote"] for record in caplog.records] == ["127.0.0.1"]


async def test_program_with_other_files_is_another_program() -> None:
    """Else, one front would get the requests with the same main file."""
    async with http_front(fronts=2, capacity=2) as server:
        compiled = SimpleNamespace(recipe=SimpleNamespace(compiled="main"))
        server.front.executor.toolchains = {"cpp": compiled}  # type: ignore[dict-item]
        key = server.front.http_app._program_key
        programs = [RunCodeRequest(code="", language="cpp", files={"a.h": content}) for content in ("YQ==", "Yg==")]
        assert key(programs[0]) == key(programs[0].model_copy(update={"stdin": "1"}))
        assert key(programs[0]) != key(programs[1])


@pytest.mark.parametrize(("lease", "status"), [(-(2**63), 200), (-(2**63) - 1, 422), (2**63, 422)])
async def test_lease_that_fits_no_message_is_rejected(lease: int, status: int) -> None:
    async with http_front() as server:
        assert (await request(server, "/v1/holders/holder/fence", {"lease": lease}))[0] == status
