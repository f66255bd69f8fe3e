"""HTTP client against real servers on the loopback interface."""

import asyncio
import contextlib
import gc
import logging
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Self

import orjson
import pytest
import uvloop
from aiohttp import web

from toolroll.errors import ConfigError, InfraFault
from toolroll.http import (
    AbortNotice,
    AttemptFailed,
    HttpClient,
    HttpRequest,
    HttpService,
    RequestAborted,
    RetryPolicy,
)
from toolroll.http import endpoints as endpoints_module
from toolroll.http import pool as pool_module

pytestmark = pytest.mark.virtual_time
SLACK_S = 0.5
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Unavailable(InfraFault):
    pass


class Rejected(InfraFault):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


SERVICE = HttpService(name="server", example_url="http://127.0.0.1:1", unavailable=Unavailable, rejected=Rejected)


def answer(status: int = 200, body: Any = "ok", **headers: str) -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return web.Response(status=status, body=content, headers=names)

    return behave


def hang(seconds: float = 60.0) -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await answer()(request)

    return behave


async def half_answer(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"x" * 50)
    await asyncio.sleep(60)
    return response


async def disconnect(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


class ScriptedServer:
    """Gives each request the next behaviour of its script, and the last one to all further requests."""

    def __init__(self, *script: Behaviour) -> None:
        self.script = list(script) or [answer()]
        self.heads: list[web.Request] = []
        self.bodies: list[Any] = []
        self.notices: list[Any] = []
        self.in_flight = self.peak = self.cancelled = 0
        self.peers: set[Any] = set()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/abort", self._abort)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._runner.cleanup()

    @property
    def open(self) -> int:
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def all_closed(self) -> None:
        async with asyncio.timeout(1):
            while self.open:
                await asyncio.sleep(0.01)

    async def received(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.bodies) < count:
                await asyncio.sleep(0.005)

    async def _abort(self, request: web.Request) -> web.Response:
        self.notices.append(await request.json())
        return web.Response()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            content = await request.read()
            self.heads.append(request)
            self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
            self.bodies.append(orjson.loads(content) if content else None)
            behave = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            return await behave(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1


@contextlib.asynccontextmanager
async def connected(*urls: str, service: HttpService = SERVICE, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(urls, service, **options)
    try:
        yield client
    finally:
        await client.close()


def parse_json(content: bytes, request: HttpRequest[Any]) -> Any:
    return orjson.loads(content)


def parse_url(content: bytes, request: HttpRequest[Any]) -> str:
    return request.url


def make_request(
    seconds: float = 5.0, parse: Callable[..., Any] = parse_json, policy: Any = None, **options: Any
) -> HttpRequest[Any]:
    options.setdefault("body", lambda attempt_id: {"id": attempt_id})
    policy = {"deadline": time.monotonic() + seconds, **(policy or {})}
    return HttpRequest("/run", parse, RetryPolicy(**policy), **options)


async def failure_of(client: HttpClient, request: HttpRequest[Any], within: float) -> Unavailable:
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await client.send(request)
    assert time.monotonic() - began < within + SLACK_S
    return caught.value


def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
async def black_hole() -> AsyncIterator[str]:
    """URL whose server neither accepts nor refuses connections: its backlog is full."""
    sockets = [socket.socket() for _ in range(5)]
    sockets[0].bind(("127.0.0.1", 0))
    sockets[0].listen(0)
    for filler in sockets[1:]:
        filler.setblocking(False)
        filler.connect_ex(sockets[0].getsockname())
    await asyncio.sleep(0.05)
    yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    for one in sockets:
        one.close()


# One request


async def test_request_on_the_wire() -> None:
    async with ScriptedServer() as server, connected(server.url + "/", token="secret") as client:
        request = make_request(name="t7")
        assert await client.send(request) == "ok"
        assert await client.send(make_request(body=None, method="DELETE")) == "ok"
        assert await client.send(make_request(body=None)) == "ok"
    assert (request.url, request.history.attempts, request.done) == (server.url, 1, True)
    assert [head.method for head in server.heads] == ["POST", "DELETE", "GET"]
    assert server.bodies[0]["id"].startswith("t7/")
    headers = server.heads[0].headers
    assert (headers["Authorization"], headers["Content-Type"]) == ("Bearer secret", "application/json")
    assert headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "trouble",
    [answer(429), answer(429, Retry_After="0.1"), answer(502, b"<html>"), answer(503), answer(504), disconnect],
)
async def test_passing_failure_is_retried(trouble: Behaviour) -> None:
    async with ScriptedServer(trouble, answer()) as server, connected(server.url) as client:
        request = make_request()
        assert await client.send(request) == "ok"
    assert request.history.attempts == 2
    first, second = server.bodies
    assert first["id"] != second["id"], "each attempt has its own id"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (answer(500, b"Internal Server Error"), "HTTP 500: Internal Server Error"),
        (answer(302, b"", Location="/elsewhere"), "HTTP 302"),
        (answer(201), "HTTP 201"),
        (answer(200, b"no JSON"), "invalid response: JSONDecodeError"),
        (answer(200, b"\x1f\x8b", Content_Encoding="gzip"), "invalid response"),
    ],
)
async def test_lasting_failure_is_not_retried(behaviour: Behaviour, message: str) -> None:
    async with ScriptedServer(behaviour) as server, connected(server.url) as client:
        error = await failure_of(client, make_request(30), within=1)
    assert f"{server.url}: {message}" in str(error)
    assert (len(server.bodies), error.metrics) == (1, {"attempts": 1})


@pytest.mark.parametrize(
    ("status", "message"), [(400, "Change the request"), (401, "Check the token"), (404, "Check the URL")]
)
async def test_rejection_is_final(status: int, message: str) -> None:
    service = replace(SERVICE, remedies={**SERVICE.remedies, 404: "Check the URL."})
    async with (
        ScriptedServer(answer(status, {"detail": "wrong"})) as server,
        connected(server.url, service=service) as client,
    ):
        with pytest.raises(Rejected, match=f"{server.url}/run: HTTP {status}: wrong. {message}") as caught:
            await client.send(make_request())
    assert (caught.value.status, len(server.bodies)) == (status, 1)


async def test_parser_can_ask_for_retry() -> None:
    def parse(content: bytes, request: HttpRequest[Any]) -> str:
        if request.history.attempts < 2:
            raise AttemptFailed("the sandbox failed: no cgroup left", retryable=True, processed=True)
        return "parsed"

    async with ScriptedServer() as server, connected(server.url) as client:
        assert await client.send(make_request(parse=parse)) == "parsed"


async def test_request_that_crashes_servers_is_sent_three_times() -> None:
    async with ScriptedServer(disconnect) as server, connected(server.url) as client:
        error = await failure_of(client, make_request(30), within=5)
    assert "connection lost: ServerDisconnectedError" in str(error)
    assert "(attempts: 3, in " in str(error)
    assert len(server.bodies) == 3


async def test_single_attempt_if_no_more_are_allowed() -> None:
    async with ScriptedServer(answer(503, {"detail": "full"})) as server, connected(server.url) as client:
        request = make_request(policy={"max_attempts": 1})
        await failure_of(client, request, within=1)
    assert len(server.bodies) == 1
    assert request.history.last_failure is not None
    assert request.history.last_failure.reason == "HTTP 503: full"


async def test_answer_beyond_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RESPONSE_LIMIT_BYTES", 10_000)
    async with ScriptedServer(answer(200, b" " * 10_001)) as server, connected(server.url) as client:
        assert "longer than 10000 bytes" in str(await failure_of(client, make_request(), within=1))


async def test_large_body_is_streamed() -> None:
    async with ScriptedServer() as server, connected(server.url) as client:
        assert await client.send(make_request(body=lambda _: {"big": "x" * 2**22})) == "ok"
    assert len(server.bodies[0]["big"]) == 2**22


# Deadlines


@pytest.mark.parametrize("behaviour", [hang(), half_answer, answer(429), answer(503), hang(5.0)])
async def test_deadline_is_kept(behaviour: Behaviour) -> None:
    async with ScriptedServer(behaviour) as server, connected(server.url) as client:
        assert server.url in str(await failure_of(client, make_request(0.4), within=0.4))
        await client.close()
        await server.all_closed()


async def test_server_that_does_not_read() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with connected(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            request = make_request(0.4, body=lambda _: {"big": "x" * 2**24})
            assert "no complete response by the deadline" in str(await failure_of(client, request, within=0.4))
            await asyncio.sleep(0.01)
            assert [task for task in asyncio.all_tasks() if "write_bytes" in repr(task)] == []


async def test_unreachable_server(black_hole: str) -> None:
    url = closed_port()
    async with connected(url) as client:
        assert f"{url}: can't be reached: Connection refused (attempt" in str(
            await failure_of(client, make_request(0.4), 0.4)
        )
    async with connected(black_hole) as client:
        assert "can't be reached" in str(await failure_of(client, make_request(0.4), 0.4))


async def test_outage_longer_than_allowed() -> None:
    async with connected(closed_port()) as client:
        await failure_of(client, make_request(30, policy={"max_outage_s": 0.3}), within=1.5)


@pytest.mark.parametrize("seconds", [0.0, -10.0, float("nan")])
async def test_expired_request_is_not_sent(seconds: float) -> None:
    async with ScriptedServer() as server, connected(server.url) as client:
        assert "deadline passed before" in str(await failure_of(client, make_request(seconds), within=0))
    assert server.bodies == []


async def test_no_attempt_starts_after_its_time() -> None:
    async with ScriptedServer(answer(503)) as server, connected(server.url) as client:
        request = make_request(10, policy={"start_by": time.monotonic() + 0.3})
        await failure_of(client, request, within=0.3)
    async with ScriptedServer(hang(0.6)) as server, connected(server.url) as client:
        request = make_request(10, policy={"start_by": time.monotonic() + 0.3})
        assert await client.send(request) == "ok", "the answer may arrive later"


@pytest.mark.parametrize("header", ["60", "inf"])
async def test_retry_after_beyond_deadline_ends_request(header: str) -> None:
    full = answer(429, {"detail": "full"}, Retry_After=header)
    async with ScriptedServer(full) as server, connected(server.url) as client:
        message = str(await failure_of(client, make_request(5), within=0.2))
    assert "HTTP 429: full; its Retry-After of" in message
    assert " s is beyond the deadline (attempts: 1, in 0.0 s)" in message


async def test_retry_after_delays_next_attempt() -> None:
    async with ScriptedServer(answer(429, Retry_After="0.4"), answer()) as server, connected(server.url) as client:
        began = time.monotonic()
        await client.send(make_request())
    assert 0.4 <= time.monotonic() - began < 0.5 + SLACK_S


async def test_prepare_runs_once_before_the_deadline() -> None:
    prepared = []

    async def prepare() -> None:
        prepared.append(1)

    async with ScriptedServer(answer(503), answer()) as server, connected(server.url) as client:
        await client.send(make_request(prepare=prepare))
        error = await failure_of(client, make_request(0.2, prepare=lambda: asyncio.sleep(9)), within=0.2)
        assert "was not sent by the deadline" in str(error)
    assert prepared == [1]


# Several endpoints


async def test_dead_endpoint_is_avoided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolroll.http")
    dead = closed_port()
    async with ScriptedServer() as server, connected(dead, server.url) as client:
        requests = [make_request(parse=parse_url) for _ in range(20)]
        assert {await client.send(request) for request in requests} == {server.url}
        assert sum(request.history.attempts for request in requests) <= 21
        pool = await client.pool()
        assert pool.urls_down in ([], [dead])
    assert sum(record.levelno == logging.WARNING for record in caplog.records) <= 1


async def test_black_hole_leaves_time_for_another_endpoint(black_hole: str) -> None:
    async with ScriptedServer() as server, connected(black_hole, server.url) as client:
        for _ in range(4):
            assert await client.send(make_request(1, parse=parse_url)) == server.url


async def test_busy_endpoint_is_spared_and_other_used_at_once() -> None:
    async with (
        ScriptedServer(answer(429, Retry_After="3")) as busy,
        ScriptedServer() as free,
        connected(busy.url, free.url) as client,
    ):
        began = time.monotonic()
        assert {await client.send(make_request(parse=parse_url)) for _ in range(20)} == {free.url}
        assert time.monotonic() - began < 2
    assert len(busy.bodies) <= 1


async def test_requests_go_to_least_loaded_endpoint() -> None:
    async with (
        ScriptedServer(hang(0.3)) as one,
        ScriptedServer(hang(0.3)) as two,
        connected(one.url, two.url) as client,
    ):
        await asyncio.gather(*(client.send(make_request()) for _ in range(10)))
    assert len(one.bodies) == len(two.bodies) == 5


async def test_affinity_returns_after_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "ENDPOINT_COOLDOWN_S", 0.4)
    async with ScriptedServer() as one, ScriptedServer() as two, connected(one.url, two.url) as client:

        async def homes() -> list[tuple[str, int]]:
            requests = [make_request(parse=parse_url, affinity=f"t{number}") for number in range(12)]
            return [(await client.send(request), request.history.attempts) for request in requests]

        before = await homes()
        one.script = [answer(503)]
        during = await homes()
        assert {url for url, _ in during} == {two.url}
        assert sum(attempts > 1 for _, attempts in during) == 1, "the other requests avoid it"
        one.script = [answer()]
        await asyncio.sleep(0.5)
        assert await homes() == before
        assert {url for url, _ in before} == {one.url, two.url}


async def test_sticky_request_is_retried_at_its_endpoint() -> None:
    busy = [answer(503), answer(429), answer()]
    async with ScriptedServer(*busy) as one, ScriptedServer(*busy) as two, connected(one.url, two.url) as client:
        assert not client.is_cooling("s")
        request = make_request(affinity="s", sticky=True)
        await client.send(request)
        assert request.history.attempts == 3
        assert client.is_cooling("s")
    assert sorted([len(one.bodies), len(two.bodies)]) == [0, 3]


async def test_waiting_requests_leave_an_endpoint_that_went_down(black_hole: str) -> None:
    service = replace(SERVICE, connect_timeout_s=0.4)
    async with (
        ScriptedServer() as server,
        connected(black_hole, server.url, service=service, max_connections=1) as client,
    ):
        began = time.monotonic()
        sent = (client.send(make_request(20, parse=parse_url, affinity=f"t{number}")) for number in range(40))
        assert set(await asyncio.gather(*sent)) == {server.url}
        assert time.monotonic() - began < 5


# Connections


async def test_connections_are_reused_and_limited() -> None:
    async with ScriptedServer(hang(0.01)) as server, connected(server.url, max_connections=3) as client:
        for _ in range(5):
            await client.send(make_request())
        assert len(server.peers) == 1
        await asyncio.gather(*(client.send(make_request()) for _ in range(12)))
        assert (server.peak, len(server.peers)) == (3, 3)
        await client.close()
        await client.close()
        await server.all_closed()
        assert await client.send(make_request()) == "ok", "the client can be used again"


async def test_waiting_for_a_connection_counts() -> None:
    async with ScriptedServer(hang(0.4)) as server, connected(server.url, max_connections=1) as client:
        began = time.monotonic()
        ends = await asyncio.gather(*(client.send(make_request(0.6)) for _ in range(4)), return_exceptions=True)
        assert time.monotonic() - began < 0.6 + SLACK_S
    assert Counter(map(str, ends))["ok"] == 1
    assert sum("was not sent by the deadline" in str(end) for end in ends) == 2


@pytest.mark.parametrize("behaviour", [hang(), half_answer])
async def test_cancellation_closes_connection(behaviour: Behaviour) -> None:
    async with ScriptedServer(behaviour) as server, connected(server.url) as client:
        before = asyncio.all_tasks()
        task = asyncio.create_task(client.send(make_request()))
        await server.received(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.all_closed()
        assert server.cancelled == 1
        assert [one for one in asyncio.all_tasks() - before if "toolroll" in repr(one)] == []


async def test_close_fails_requests_in_flight() -> None:
    async with ScriptedServer(hang()) as server, connected(server.url, max_connections=1) as client:
        tasks = [asyncio.create_task(client.send(make_request(30))) for _ in range(3)]
        await server.received(1)
        await client.close()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
        assert [type(end) for end in ends] == [Unavailable] * 3
        assert "the client was closed" in str(ends[0])


async def test_close_resends_requests_if_service_asks_for_it() -> None:
    service = replace(SERVICE, resend_after_close=True)
    async with (
        ScriptedServer(hang(), answer()) as server,
        connected(server.url, service=service, max_connections=1) as client,
    ):
        requests = [make_request(30) for _ in range(3)]
        tasks = [asyncio.create_task(client.send(request)) for request in requests]
        await server.received(1)
        await client.close()
        assert await asyncio.wait_for(asyncio.gather(*tasks), 2) == ["ok"] * 3
        assert requests[0].history.attempts == 2


async def test_dropped_client_closes_its_connections() -> None:
    async with ScriptedServer() as server:
        client = HttpClient(server.url, SERVICE)
        await client.send(make_request())
        assert server.open == 1
        client.itself = client  # type: ignore[attr-defined]  # a reference cycle
        del client
        gc.collect()
        await server.all_closed()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_each_event_loop_has_its_connections(new_loop: Any) -> None:
    started, stop, urls = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with ScriptedServer() as server:
            urls.append(server.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    client = HttpClient(urls, SERVICE)

    async def send() -> list[Any]:
        return await asyncio.gather(*(client.send(make_request()) for _ in range(3)))

    try:
        for _ in range(3):
            with asyncio.Runner(loop_factory=new_loop) as runner:  # an unclosed session would be a warning
                assert runner.run(send()) == ["ok"] * 3
    finally:
        stop.set()
        thread.join()
    assert len(client._pools) == 1, "pools of closed loops are dropped"


async def test_pickled_client_opens_its_own_connections() -> None:
    async with ScriptedServer() as server, connected(server.url, token="secret") as client:
        await client.send(make_request())
        copy = pickle.loads(pickle.dumps(client))
        assert await copy.send(make_request()) == "ok"
        await copy.close()
    assert (len(server.peers), server.heads[1].headers["Authorization"]) == (2, "Bearer secret")


async def test_thousands_at_once() -> None:
    async with ScriptedServer() as server, connected(server.url, max_connections=100) as client:
        began = time.monotonic()
        assert await asyncio.gather(*(client.send(make_request(60)) for _ in range(2000))) == ["ok"] * 2000
        assert time.monotonic() - began < 20
        assert server.peak <= 100


# Abort


def abort_notice(attempt_id: str) -> AbortNotice:
    return AbortNotice("/abort", {"id": attempt_id})


async def noticed(server: ScriptedServer, count: int) -> list[Any]:
    async with asyncio.timeout(5):
        while len(server.notices) < count:
            await asyncio.sleep(0.01)
    return server.notices


@pytest.mark.parametrize("end", ["cancelled", "deadline", "broken"])
async def test_attempt_without_answer_is_aborted_at_server(end: str) -> None:
    script = [disconnect, answer()] if end == "broken" else [hang()]
    async with ScriptedServer(*script) as server, connected(server.url) as client:
        request = make_request(0.3 if end == "deadline" else 5, abort_notice=abort_notice)
        task = asyncio.create_task(client.send(request))
        await server.received(1)
        if end == "cancelled":
            task.cancel()
        await asyncio.wait([task])
        assert await noticed(server, 1) == [server.bodies[0]]


async def test_answered_or_unsent_attempt_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[Any] = []
    monkeypatch.setattr(pool_module.EndpointPool, "notify", lambda *notice: notices.append(notice))
    async with ScriptedServer(answer(503), answer(429), answer()) as server, connected(server.url) as client:
        await client.send(make_request(abort_notice=abort_notice))
    async with connected(closed_port()) as client:
        await failure_of(client, make_request(0.2, abort_notice=abort_notice), within=0.2)
    assert notices == []


async def test_many_notices_use_few_connections() -> None:
    async with ScriptedServer(hang()) as server, connected(server.url) as client:
        tasks = [asyncio.create_task(client.send(make_request(60, abort_notice=abort_notice))) for _ in range(300)]
        await server.received(300)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await noticed(server, 300)
        assert server.open <= pool_module.MAX_CONCURRENT_NOTICES


async def test_close_waits_briefly_for_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "NOTICE_FLUSH_TIMEOUT_S", 0.2)
    async with ScriptedServer(hang()) as server, connected(server.url) as client:
        notice = AbortNotice("/hang", {})
        await failure_of(client, make_request(0.2, abort_notice=lambda _: notice), within=0.2)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 0.2 + SLACK_S
        await server.all_closed()


async def test_aborted_request_returns_answer_within_grace() -> None:
    async with ScriptedServer(hang(0.2)) as server, connected(server.url) as client:
        request = make_request(abort_notice=abort_notice)
        task = asyncio.create_task(client.send(request))
        await server.received(1)
        await asyncio.to_thread(request.abort, 5.0)
        assert await task == "ok"
        assert request.aborted


async def test_aborted_request_is_not_retried() -> None:
    async def fail_later(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await answer(503)(request)

    async with ScriptedServer(fail_later, answer()) as server, connected(server.url) as client:
        request = make_request()
        task = asyncio.create_task(client.send(request))
        await server.received(1)
        request.abort(5.0)
        with pytest.raises(RequestAborted, match="HTTP 503"):
            await task
    assert len(server.bodies) == 1


@pytest.mark.parametrize("place", ["at the server", "between attempts", "waiting for a connection", "not yet sent"])
async def test_abort_ends_request_anywhere(place: str) -> None:
    behaviour = answer(503, Retry_After="20") if place == "between attempts" else hang()
    async with ScriptedServer(behaviour) as server, connected(server.url, max_connections=1) as client:
        others = [asyncio.create_task(client.send(make_request()))] if place == "waiting for a connection" else []
        await asyncio.sleep(0.05)
        request = make_request(30, abort_notice=abort_notice)
        if place == "not yet sent":
            request.abort(0.3)
            await asyncio.sleep(0)
        task = asyncio.create_task(client.send(request))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        request.abort(0.3 if place == "at the server" else 30.0)
        with pytest.raises(RequestAborted):
            await task
        assert time.monotonic() - began < 0.3 + SLACK_S
        assert (request.pending_notice, request.done) == (None, True)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_abort_does_not_extend_deadline() -> None:
    async with ScriptedServer(hang()) as server, connected(server.url) as client:
        request = make_request(0.4)
        began, task = time.monotonic(), asyncio.create_task(client.send(request))
        await server.received(1)
        request.abort(30.0)
        with pytest.raises(RequestAborted, match="no complete response by the deadline"):
            await task
        assert time.monotonic() - began < 0.4 + SLACK_S


# Single requests and configuration


async def test_send_once_returns_any_answer() -> None:
    async with (
        ScriptedServer(answer(503, b"full"), hang()) as server,
        connected(server.url, max_connections=1) as client,
    ):
        response = await client.send_once(server.url, "/health", timeout_s=5)
        assert (response.status, response.content) == (503, b"full")
        with pytest.raises(AttemptFailed, match=r"no response within 0\.1 s"):
            await client.send_once(server.url, "/update", {"version": "7"}, timeout_s=0.1)
        with pytest.raises(AttemptFailed, match=r"can't be reached: Connection refused$"):
            await client.send_once(closed_port(), "/health", timeout_s=5)
    assert [head.method for head in server.heads] == ["GET", "POST"]
    assert server.bodies[1] == {"version": "7"}


def test_invalid_configuration() -> None:
    for wrong in ("", "127.0.0.1:30000", "ftp://host", "http://", "http://["):
        with pytest.raises(ConfigError, match=r"Invalid server URL.*http://127\.0\.0\.1:1"):
            HttpClient(wrong, SERVICE)
    with pytest.raises(ConfigError, match="Missing server URL"):
        HttpClient([], SERVICE)
    with pytest.raises(ConfigError, match="max_connections"):
        HttpClient("http://host", SERVICE, max_connections=0)
    assert HttpClient(["http://a:1/", " http://a:1", "http://b/base/"], SERVICE).urls == ("http://a:1", "http://b/base")


async def test_credentials_in_url_are_sent_but_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with ScriptedServer(answer(503)) as server:
        url = server.url.replace("http://", "http://user:p%40ss@")
        other = closed_port().replace("http://", "http://other:s3cret@")
        async with connected(url, other) as client:
            error = await failure_of(client, make_request(), within=5.0)
    assert {head.headers.get("Authorization") for head in server.heads} == {"Basic dXNlcjpwQHNz"}
    shown = f"{error} {client.urls} {caplog.text}"
    assert server.url in shown
    for secret in ("p%40ss", "p@ss", "s3cret", "dXNlcjpwQHNz"):
        assert secret not in shown
    with pytest.raises(ConfigError, match=r"'ftp://\*\*\*@host'"):
        HttpClient("ftp://user:secret@host", SERVICE)
