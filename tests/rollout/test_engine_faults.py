"""SGLangEngine against faulty servers: each call ends with tokens or an infra fault by its deadline."""

import asyncio
import gc
import logging
import pickle
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from free_port import free_port
from hypothesis import given
from hypothesis import strategies as st
from sandbox.fault_server import Behaviour, FaultServer, after, answer, drip, hang, raw, whole

from rollout.fake_servers import serving
from toolroll.errors import ConfigError, EngineRefused, EngineUnavailable, Fault, fault_of
from toolroll.http import endpoints as endpoints_module
from toolroll.http import pool as pool_module
from toolroll.http.endpoints import Endpoint, choose_endpoint, connections_per_endpoint
from toolroll.rollout.engines import http_engine as http_engine_module
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.engines.sglang import SGLangEngine

pytestmark = pytest.mark.virtual_time

SLACK = 0.5
"""Tolerance after the deadline for a noisy machine, in seconds."""
PARAMS = {"max_new_tokens": 4}


def sampled(ids: list[int], finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """Return a response of SGLang."""
    logprobs = [[-0.5, number, None] for number in ids]
    meta = {"finish_reason": {"type": finish}, "weight_version": "3", "cached_tokens": 2, **meta}
    return {"text": "", "output_ids": ids, "meta_info": {"output_token_logprobs": logprobs, **meta}}


OK = answer(body=sampled([5, 2]))


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def bodies_at(server: FaultServer, path: str = "/generate") -> list[Any]:
    """Return the bodies that were posted to a path."""
    return [body for head, body in zip(server.heads, server.requests, strict=True) if f" {path} " in head]


def engine_of(*urls: str, **options: Any) -> SGLangEngine:
    return SGLangEngine(urls, vocab_size=100, **options)


async def generate(engine: SGLangEngine, seconds: float = 5.0, **options: Any) -> Generation:
    return await engine.generate("r", [1, 2, 3], PARAMS, deadline=soon(seconds), **options)


async def fault(engine: SGLangEngine, kind: type[Exception], within: float) -> str:
    """Return the message of the infra fault that a call raises within the given time."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        await generate(engine, within)
    assert time.monotonic() - began < within + SLACK
    assert fault_of(caught.value) is Fault.INFRA
    return str(caught.value)


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


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


# One server


async def test_request_and_response() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url, token="secret") as engine:
        generation = await engine.generate("r", (1, 2, 3), {**PARAMS, "temperature": 0.5})
        assert (generation.ids, generation.logprobs, generation.finish) == ([5, 2], [-0.5, -0.5], FinishType.STOP)
        assert (generation.weight_version, generation.endpoint) == ("3", server.url)
        assert (generation.timings.attempts, generation.timings.cached_tokens) == (1, 2)
    [body] = server.requests
    assert body.pop("rid").startswith("r/")
    assert body == {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {**PARAMS, "temperature": 0.5, "skip_special_tokens": False, "no_stop_trim": True},
    }
    assert "Authorization: Bearer secret" in server.heads[0]


async def test_weight_changes_split_generation() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    body = sampled([5, 2], weight_version="7", weight_versions=spans)
    async with FaultServer([answer(body=body)]) as server, engine_of(server.url) as engine:
        generation = await generate(engine)
    assert [(ids, version) for ids, _, version in generation.by_weights()] == [([5], "6"), ([2], "7")]


@pytest.mark.parametrize(
    "trouble",
    [
        answer(429),
        answer(429, headers={"Retry-After": "0.1"}),
        answer(502, b"<html>"),
        answer(503, {"error": {"message": "The request queue is full."}}),
        answer(504),
        raw(b""),
        raw(whole(body=sampled([5, 2]))[:-9]),
        raw(b"HTTP/1.1 200 OK\r\nContent-Le"),
    ],
)
async def test_transient_failure_is_retried(trouble: Behaviour) -> None:
    async with FaultServer([trouble, OK]) as server, engine_of(server.url) as engine:
        generation = await generate(engine)
        assert (generation.ids, generation.timings.attempts) == ([5, 2], 2)
    first, second = bodies_at(server)
    assert first["rid"] != second["rid"], "SGLang rejects an id that is in use"


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        (answer(400, {"error": {"message": "The input is longer than the context."}}), EngineRefused, "longer than"),
        (answer(400, {"error": "unknown field `x`"}), EngineRefused, "unknown field `x`"),
        (answer(401, {"error": "Unauthorized"}), EngineRefused, "Check the token"),
        (answer(404, {"detail": "Not Found"}), EngineRefused, "404: Not Found"),
        (answer(302, headers={"Location": "/"}), EngineUnavailable, "302"),
        (answer(500, b"Internal Server Error"), EngineUnavailable, "500: Internal Server Error"),
        (answer(200, b"\xff\x00 no JSON"), EngineUnavailable, "invalid response"),
        (answer(200, {"choices": []}), EngineUnavailable, "meta_info"),
        (answer(200, []), EngineUnavailable, "invalid response"),
        (answer(200, sampled([5], finish="boredom")), EngineUnavailable, "boredom"),
        (answer(200, sampled([5, 2], output_token_logprobs=[])), EngineUnavailable, "2 ids, but 0 log-prob"),
        (raw(b"SSH-2.0-OpenSSH_9.9\r\n"), EngineUnavailable, "connection lost|invalid response"),
    ],
)
async def test_permanent_failure_is_raised_at_once(behaviour: Behaviour, kind: type[Exception], message: str) -> None:
    async with FaultServer([behaviour]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            await generate(engine, 30)
        assert time.monotonic() - began < 2
        assert server.url in str(caught.value)


@pytest.mark.parametrize(
    "behaviour",
    [
        hang(),
        hang(whole(body=sampled([5, 2]))[:-9]),
        drip(whole(body=sampled([5, 2])), 0.05),
        answer(429),
        answer(503),
        after(5.0, OK),
    ],
)
async def test_deadline_is_kept(behaviour: Behaviour) -> None:
    async with FaultServer([behaviour]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.5)


async def test_unreachable_server(black_hole: str) -> None:
    async with engine_of(closed_port()) as engine:
        assert "can't be reached" in await fault(engine, EngineUnavailable, 0.5)
        assert await engine.health() == {engine._http.urls[0]: False}
    async with engine_of(black_hole) as engine:
        await fault(engine, EngineUnavailable, 0.5)


async def test_expired_call_is_not_sent() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url) as engine:
        assert "deadline passed" in await fault(engine, EngineUnavailable, 0.0)
    assert not server.requests


async def test_prompt_that_crashes_servers_is_sent_three_times() -> None:
    async with FaultServer([raw(b"")]) as server, engine_of(server.url) as engine:
        assert "connection lost" in await fault(engine, EngineUnavailable, 30)
        assert len(bodies_at(server)) == 3


async def test_retry_after_beyond_deadline_ends_call() -> None:
    async with FaultServer([answer(429, headers={"Retry-After": "60"})]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        assert "Retry-After of 60 s is beyond the deadline" in await fault(engine, EngineUnavailable, 10)
        assert time.monotonic() - began < 5
        assert len(bodies_at(server)) == 1


# Vocabulary

OUTSIDE = answer(400, {"error": {"message": "logit_bias must has keys in [0, 49151], got 2147483647."}})


async def test_vocabulary_is_discovered_once() -> None:
    async with (
        FaultServer([answer(body={"model_path": "m"}), OUTSIDE, OK]) as server,
        SGLangEngine(server.url) as engine,
    ):
        await asyncio.gather(*(generate(engine) for _ in range(20)))
        with pytest.raises(EngineRefused, match="49152"):
            await engine.generate("r", [49152], PARAMS)
    assert len(bodies_at(server, "/model_info")) == 1
    assert len(bodies_at(server)) == 21


async def test_old_server_is_not_asked_for_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    async with FaultServer([answer(404, {"detail": "Not Found"}), OK]) as server, SGLangEngine(server.url) as engine:
        await generate(engine)
        await generate(engine)
    assert all("logit_bias" not in body["sampling_params"] for body in bodies_at(server))
    assert [record.message for record in caplog.records if "Set vocab_size" in record.message]


async def test_vocabulary_discovery_respects_deadline() -> None:
    async with FaultServer([hang()]) as server, SGLangEngine(server.url) as engine:
        began = time.monotonic()
        ends = await asyncio.gather(*(generate(engine, 0.5) for _ in range(5)), return_exceptions=True)
        assert time.monotonic() - began < 0.5 + SLACK
        assert {type(end) for end in ends} == {EngineUnavailable}


# Several servers


async def test_affinity_selects_one_server() -> None:
    async with FaultServer([OK]) as a, FaultServer([OK]) as b, engine_of(a.url, b.url) as engine:
        ends = {name: {(await generate(engine, affinity=name)).endpoint for _ in range(3)} for name in "abcdefghijkl"}
        assert all(len(end) == 1 for end in ends.values())
        assert set.union(*ends.values()) == {a.url, b.url}
        async with engine_of(b.url, a.url) as other:
            assert {(await generate(other, affinity="a")).endpoint} == ends["a"], "independent of the order of the URLs"


async def test_calls_without_affinity_go_to_idle_server() -> None:
    async with (
        FaultServer([after(0.3, OK)]) as a,
        FaultServer([after(0.3, OK)]) as b,
        engine_of(a.url, b.url) as engine,
    ):
        await asyncio.gather(*(generate(engine) for _ in range(10)))
        assert len(a.requests) == len(b.requests) == 5


async def test_other_server_takes_over_during_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "ENDPOINT_COOLDOWN_S", 0.5)
    async with FaultServer([OK]) as a, FaultServer([OK]) as b, engine_of(a.url, b.url) as engine:
        names = [f"t{n}" for n in range(20)]
        homes = {name: (await generate(engine, affinity=name)).endpoint for name in names}
        a.script = [answer(503)]
        moved = [await generate(engine, affinity=name) for name in names]
        assert {generation.endpoint for generation in moved} == {b.url}
        assert sum(generation.timings.attempts > 1 for generation in moved) == 1, "the other calls avoid the server"
        a.script = [OK]
        await asyncio.sleep(0.6)
        assert {name: (await generate(engine, affinity=name)).endpoint for name in names} == homes


async def test_calls_move_when_server_dies() -> None:
    async with FaultServer([hang()]) as dying, FaultServer([OK]) as other, engine_of(dying.url, other.url) as engine:
        names = [f"t{n}" for n in range(20)]
        calls = [asyncio.create_task(generate(engine, affinity=name)) for name in names]
        while len(dying.requests) + len(other.requests) < 20:
            await asyncio.sleep(0.01)
        assert dying.requests
        await dying.stop()
        assert {(await call).endpoint for call in calls} == {other.url}


async def test_hung_server_does_not_delay_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine_module, "PROBE_TIMEOUT_S", 0.3)
    models = answer(body={"data": [{"id": "m", "max_model_len": 108}]})
    servers = FaultServer([models]), FaultServer([hang()])
    async with servers[0] as server, servers[1] as hung, engine_of(server.url, hung.url) as engine:
        began = time.monotonic()
        assert {await engine.context_length() for _ in range(10)} == {100}
        assert time.monotonic() - began < 0.3 + SLACK
        assert len(hung.heads) == 1


async def test_waiting_calls_leave_dead_server(black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine_module, "ENGINE", replace(http_engine_module.ENGINE, connect_timeout_s=0.5))
    async with FaultServer([OK]) as other, engine_of(black_hole, other.url, max_connections=1) as engine:
        began = time.monotonic()
        done = await asyncio.gather(*(generate(engine, 20, affinity=f"t{n}") for n in range(40)))
        assert {generation.endpoint for generation in done} == {other.url}
        assert time.monotonic() - began < 5, "one call finds the outage for all"


@given(names=st.lists(st.text(max_size=8), min_size=1, max_size=30), count=st.integers(1, 8))
def test_new_server_moves_only_its_own_calls(names: list[str], count: int) -> None:
    urls = [f"http://10.0.0.{number}:30000" for number in range(count + 1)]

    def homes(urls: list[str]) -> list[str]:
        endpoints = [Endpoint(url, asyncio.Semaphore(1)) for url in urls]
        return [choose_endpoint(endpoints, name, {}, 0.0).url for name in names]

    before, now = homes(urls[:-1]), homes(urls)
    assert all(old == new or new == urls[-1] for old, new in zip(before, now, strict=True))


def test_affinities_are_spread_over_servers() -> None:
    endpoints = [Endpoint(f"http://10.0.0.{number}:30000", asyncio.Semaphore(1)) for number in range(4)]
    homes = Counter(choose_endpoint(endpoints, f"trajectory-{number}", {}, 0.0).url for number in range(1000))
    assert all(180 < count < 320 for count in homes.values())


# Cancellation and abort


async def notices_of(server: FaultServer, within: float = 2.0) -> list[Any]:
    """Return the abort notices that a server received."""
    async with asyncio.timeout(within):
        while not bodies_at(server, "/abort_request"):
            await asyncio.sleep(0.01)
    return bodies_at(server, "/abort_request")


async def test_cancelled_or_expired_call_is_aborted_at_server() -> None:
    async with FaultServer([hang(), answer(body=b"")]) as server, engine_of(server.url) as engine:
        call = asyncio.create_task(generate(engine))
        while not server.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        assert await notices_of(server) == [{"rid": bodies_at(server)[0]["rid"]}]
        with pytest.raises(asyncio.CancelledError):
            await call
    async with FaultServer([hang(), answer(body=b"")]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.3)
        assert await notices_of(server) == [{"rid": bodies_at(server)[0]["rid"]}]


async def test_abort_ends_call_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine_module, "ABORT_GRACE_S", 0.3)
    at_server, between = FaultServer([hang()]), FaultServer([answer(503, headers={"Retry-After": "20"})])
    async with at_server, between:
        engines = {
            "at a server that ignores aborts": engine_of(at_server.url),
            "between two attempts": engine_of(between.url),
            "waiting for a connection": engine_of(at_server.url, max_connections=1),
        }
        queueing = asyncio.create_task(engines["waiting for a connection"].generate("first", [1], PARAMS))
        await asyncio.sleep(0.1)
        for where, engine in engines.items():
            call = asyncio.create_task(generate(engine, 30))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await engine.abort("r")
            generation = await call
            assert (generation.finish, generation.ids, generation.logprobs) == (FinishType.ABORT, [], []), where
            assert time.monotonic() - began < 0.3 + SLACK, where
        queueing.cancel()
        await asyncio.gather(queueing, return_exceptions=True)
        for engine in engines.values():
            await engine.close()


async def test_abort_does_not_extend_deadline() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        call = asyncio.create_task(generate(engine, 0.5))
        await asyncio.sleep(0.1)
        aborting = asyncio.create_task(engine.abort("r"))
        assert (await call).finish is FinishType.ABORT
        assert time.monotonic() - began < 0.5 + SLACK
        await aborting


async def test_abort_notices_use_few_connections() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        calls = [asyncio.create_task(generate(engine, 60)) for _ in range(500)]
        while len(server.requests) < 500:
            await asyncio.sleep(0.01)
        server.script = [answer(body=b"")]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        while len(bodies_at(server, "/abort_request")) < 500:
            await asyncio.sleep(0.01)
        assert server.max_in_flight <= 500 + pool_module.MAX_CONCURRENT_NOTICES


async def test_close_waits_briefly_for_abort_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "NOTICE_FLUSH_TIMEOUT_S", 0.2)
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.2)
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 0.2 + SLACK
        await server.all_closed()


# Load


async def test_thousands_of_concurrent_calls() -> None:
    in_flight = peak = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal in_flight, peak
        await request.read()
        in_flight += 1
        peak = max(peak, in_flight)
        await asyncio.sleep(0.05)
        in_flight -= 1
        return web.json_response(sampled([5, 2]))

    async with serving(generate=slow) as url, engine_of(url, max_connections=300) as engine:
        done = await asyncio.gather(*(generate(engine, 120) for _ in range(3000)))
    assert [generation.ids for generation in done] == [[5, 2]] * 3000
    assert peak <= 300


async def test_waiting_for_connection_counts_toward_deadline() -> None:
    async with FaultServer([after(0.4, OK)]) as server, engine_of(server.url, max_connections=1) as engine:
        began = time.monotonic()
        ends = await asyncio.gather(*(generate(engine, 0.6) for _ in range(4)), return_exceptions=True)
        assert time.monotonic() - began < 0.6 + SLACK
        assert sum(isinstance(end, Generation) for end in ends) == 1
        assert sum("was not sent by the deadline" in str(end) for end in ends) == 2
        assert server.max_in_flight == 1


def test_open_file_limit_is_shared_among_servers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    with caplog.at_level(logging.INFO):
        assert connections_per_endpoint(4, 1024) == 192
        assert connections_per_endpoint(1, 100) == 100
    assert "ulimit -n" in caplog.text


# Event loops and processes


async def test_engine_can_be_pickled() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url) as engine:
        await generate(engine)
        copy = pickle.loads(pickle.dumps(engine))
        assert (await generate(copy)).ids == [5, 2]
        await copy.close()
        await engine.close()
        await server.all_closed()
        assert (await generate(engine)).ids == [5, 2], "the engine opens new connections"


async def test_close_fails_calls_in_flight() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url, max_connections=1) as engine:
        calls = [asyncio.create_task(generate(engine, 30)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await engine.close()
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 2)
        assert {type(end) for end in ends} == {EngineUnavailable}


async def test_dropped_engine_closes_its_connections() -> None:
    async with FaultServer([OK]) as server:
        engine = engine_of(server.url)
        await generate(engine)
        assert server.open == 1
        engine.itself = engine  # type: ignore[attr-defined]  # a reference cycle
        del engine
        gc.collect()
        await server.all_closed()
        assert server.open == 0


def test_connections_close_with_event_loop() -> None:
    engine = None

    async def once() -> None:
        nonlocal engine
        async with FaultServer([OK]) as server:
            engine = engine or engine_of(server.url)
            engine._http.urls = (server.url,)
            await generate(engine)

    for _ in range(3):
        asyncio.run(once())  # an unclosed session would be a warning, and thus an error


def test_invalid_configuration() -> None:
    for wrong in ("", "127.0.0.1:30000", "ftp://host", "http://", "http://["):
        with pytest.raises(ConfigError, match="Invalid server URL"):
            engine_of(wrong)
    with pytest.raises(ConfigError, match="Missing server URL"):
        engine_of()
    with pytest.raises(ConfigError, match="max_connections"):
        engine_of("http://host", max_connections=0)
