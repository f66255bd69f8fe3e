"""Whatever servers do: what was sampled, or a fault of the infrastructure's, by the deadline."""

import asyncio
import gc
import logging
import pickle
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from free_port import free_port
from hypothesis import given
from hypothesis import strategies as st
from sandbox.fault_server import Behaviour, FaultServer, after, answer, drip, hang, raw, whole

from rollout.fake_servers import serving
from toolroll.errors import ConfigError, EngineRefused, EngineUnavailable, Fault, fault_of
from toolroll.rollout.engines import call as call_module
from toolroll.rollout.engines import pool as pool_module
from toolroll.rollout.engines import servers as servers_module
from toolroll.rollout.engines.engine import Finish, Generation
from toolroll.rollout.engines.pool import Pool
from toolroll.rollout.engines.sglang import SGLangEngine

SLACK = 0.5
"""Seconds over the deadline that are put down to a noisy machine."""
PARAMS = {"max_new_tokens": 4}


def sampled(ids: list[int], finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """SGLang's answer."""
    logprobs = [[-0.5, number, None] for number in ids]
    meta = {"finish_reason": {"type": finish}, "weight_version": "3", "cached_tokens": 2, **meta}
    return {"text": "", "output_ids": ids, "meta_info": {"output_token_logprobs": logprobs, **meta}}


OK = answer(body=sampled([5, 2]))


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def asked(server: FaultServer, path: str = "/generate") -> list[Any]:
    """What was posted there."""
    return [body for head, body in zip(server.heads, server.requests, strict=True) if f" {path} " in head]


def engine_of(*urls: str, **options: Any) -> SGLangEngine:
    return SGLangEngine(urls, vocab_size=100, **options)


async def generate(engine: SGLangEngine, seconds: float = 5.0, **options: Any) -> Generation:
    return await engine.generate("r", [1, 2, 3], PARAMS, deadline=soon(seconds), **options)


async def fault(engine: SGLangEngine, kind: type[Exception], within: float) -> str:
    """The message of the fault that comes in so many seconds."""
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
    """An address that takes no connection and refuses none: its queue is full, and nobody accepts."""
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


async def test_what_goes_over_the_wire() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url, token="secret") as engine:
        generation = await engine.generate("r", (1, 2, 3), {**PARAMS, "temperature": 0.5})
        assert (generation.ids, generation.logprobs, generation.finish) == ([5, 2], [-0.5, -0.5], Finish.STOP)
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


async def test_weights_that_changed_in_between_are_told_apart() -> None:
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
async def test_a_passing_trouble_is_not_noticed(trouble: Behaviour) -> None:
    async with FaultServer([trouble, OK]) as server, engine_of(server.url) as engine:
        generation = await generate(engine)
        assert (generation.ids, generation.timings.attempts) == ([5, 2], 2)
    first, second = asked(server)
    assert first["rid"] != second["rid"], "SGLang refuses an id that it still has"


@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        (answer(400, {"error": {"message": "The input is longer than the context."}}), EngineRefused, "longer than"),
        (answer(400, {"error": "unknown field `x`"}), EngineRefused, "unknown field `x`"),
        (answer(401, {"error": "Unauthorized"}), EngineRefused, "Is the token right"),
        (answer(404, {"detail": "Not Found"}), EngineRefused, "404: Not Found"),
        (answer(302, headers={"Location": "/"}), EngineUnavailable, "302"),
        (answer(500, b"Internal Server Error"), EngineUnavailable, "500: Internal Server Error"),
        (answer(200, b"\xff\x00 no JSON"), EngineUnavailable, "no answer of this kind of server"),
        (answer(200, {"choices": []}), EngineUnavailable, "meta_info"),
        (answer(200, []), EngineUnavailable, "no answer"),
        (answer(200, sampled([5], finish="boredom")), EngineUnavailable, "boredom"),
        (answer(200, sampled([5, 2], output_token_logprobs=[])), EngineUnavailable, "2 ids, but 0 log-prob"),
        (raw(b"SSH-2.0-OpenSSH_9.9\r\n"), EngineUnavailable, "the connection broke|no answer"),
    ],
)
async def test_a_lasting_trouble_is_told_at_once(behaviour: Behaviour, kind: type[Exception], says: str) -> None:
    async with FaultServer([behaviour]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        with pytest.raises(kind, match=says) as caught:
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
async def test_the_deadline_is_kept(behaviour: Behaviour) -> None:
    async with FaultServer([behaviour]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.5)


async def test_a_server_that_is_not_there(black_hole: str) -> None:
    async with engine_of(closed_port()) as engine:
        assert "can't be reached" in await fault(engine, EngineUnavailable, 0.5)
        assert await engine.health() == {engine._servers.urls[0]: False}
    async with engine_of(black_hole) as engine:
        await fault(engine, EngineUnavailable, 0.5)


async def test_a_deadline_that_has_passed_asks_nobody() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url) as engine:
        assert "had passed" in await fault(engine, EngineUnavailable, 0.0)
    assert not server.requests


async def test_a_prompt_that_kills_servers_is_sent_thrice() -> None:
    async with FaultServer([raw(b"")]) as server, engine_of(server.url) as engine:
        assert "the connection broke" in await fault(engine, EngineUnavailable, 30)
        assert len(asked(server)) == 3


async def test_who_asks_to_be_left_alone_beyond_the_deadline_is() -> None:
    async with FaultServer([answer(429, headers={"Retry-After": "60"})]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        assert "left alone for 60 s" in await fault(engine, EngineUnavailable, 10)
        assert time.monotonic() - began < 5
        assert len(asked(server)) == 1


# The vocabulary

OUTSIDE = answer(400, {"error": {"message": "logit_bias must has keys in [0, 49151], got 2147483647."}})


async def test_the_vocabulary_is_asked_once() -> None:
    async with (
        FaultServer([answer(body={"model_path": "m"}), OUTSIDE, OK]) as server,
        SGLangEngine(server.url) as engine,
    ):
        await asyncio.gather(*(generate(engine) for _ in range(20)))
        with pytest.raises(EngineRefused, match="49152"):
            await engine.generate("r", [49152], PARAMS)
    assert len(asked(server, "/model_info")) == 1
    assert len(asked(server)) == 21


async def test_an_old_server_is_not_asked_what_it_would_die_of(caplog: pytest.LogCaptureFixture) -> None:
    async with FaultServer([answer(404, {"detail": "Not Found"}), OK]) as server, SGLangEngine(server.url) as engine:
        await generate(engine)
        await generate(engine)
    assert all("logit_bias" not in body["sampling_params"] for body in asked(server))
    assert [record.message for record in caplog.records if "Give vocab_size" in record.message]


async def test_a_server_that_does_not_say_is_no_reason_to_wait() -> None:
    async with FaultServer([hang()]) as server, SGLangEngine(server.url) as engine:
        began = time.monotonic()
        ends = await asyncio.gather(*(generate(engine, 0.5) for _ in range(5)), return_exceptions=True)
        assert time.monotonic() - began < 0.5 + SLACK
        assert {type(end) for end in ends} == {EngineUnavailable}


# Several servers


async def test_turns_of_one_trajectory_meet_one_server() -> None:
    async with FaultServer([OK]) as a, FaultServer([OK]) as b, engine_of(a.url, b.url) as engine:
        ends = {name: {(await generate(engine, affinity=name)).endpoint for _ in range(3)} for name in "abcdefghijkl"}
        assert all(len(end) == 1 for end in ends.values())
        assert set.union(*ends.values()) == {a.url, b.url}
        async with engine_of(b.url, a.url) as other:
            assert {(await generate(other, affinity="a")).endpoint} == ends["a"], "in every process"


async def test_without_affinity_the_idle_one_is_asked() -> None:
    async with (
        FaultServer([after(0.3, OK)]) as a,
        FaultServer([after(0.3, OK)]) as b,
        engine_of(a.url, b.url) as engine,
    ):
        await asyncio.gather(*(generate(engine) for _ in range(10)))
        assert len(a.requests) == len(b.requests) == 5


async def test_another_takes_over_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "COOL_DOWN", 0.5)
    async with FaultServer([OK]) as a, FaultServer([OK]) as b, engine_of(a.url, b.url) as engine:
        names = [f"t{n}" for n in range(20)]
        homes = {name: (await generate(engine, affinity=name)).endpoint for name in names}
        a.script = [answer(503)]
        moved = [await generate(engine, affinity=name) for name in names]
        assert {generation.endpoint for generation in moved} == {b.url}
        assert sum(generation.timings.attempts > 1 for generation in moved) == 1, "the others were told"
        a.script = [OK]
        await asyncio.sleep(0.6)
        assert {name: (await generate(engine, affinity=name)).endpoint for name in names} == homes


async def test_one_that_dies_in_the_middle() -> None:
    async with FaultServer([hang()]) as dying, FaultServer([OK]) as other, engine_of(dying.url, other.url) as engine:
        names = [f"t{n}" for n in range(20)]
        calls = [asyncio.create_task(generate(engine, affinity=name)) for name in names]
        while len(dying.requests) + len(other.requests) < 20:
            await asyncio.sleep(0.01)
        assert dying.requests
        await dying.__aexit__()
        assert {(await call).endpoint for call in calls} == {other.url}


async def test_calls_that_wait_for_a_dead_server_do_not_wait_in_vain(
    black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "CONNECT_TIMEOUT", 0.5)
    async with FaultServer([OK]) as other, engine_of(black_hole, other.url, max_connections=1) as engine:
        began = time.monotonic()
        done = await asyncio.gather(*(generate(engine, 20, affinity=f"t{n}") for n in range(40)))
        assert {generation.endpoint for generation in done} == {other.url}
        assert time.monotonic() - began < 5, "one found out, for all"


@given(names=st.lists(st.text(max_size=8), min_size=1, max_size=30), count=st.integers(1, 8))
def test_a_further_server_moves_no_calls_but_those_it_gets(names: list[str], count: int) -> None:
    urls = [f"http://10.0.0.{number}:30000" for number in range(count + 1)]

    async def homes(urls: list[str]) -> list[str]:
        pool = Pool(urls, 1, {})
        await pool.session.close()
        return [pool.pick(name, Counter()).url for name in names]

    before, now = asyncio.run(homes(urls[:-1])), asyncio.run(homes(urls))
    assert all(old == new or new == urls[-1] for old, new in zip(before, now, strict=True))


async def test_the_calls_are_spread() -> None:
    pool = Pool([f"http://10.0.0.{number}:30000" for number in range(4)], 1, {})
    await pool.session.close()
    homes = Counter(pool.pick(f"trajectory-{number}", Counter()).url for number in range(1000))
    assert all(180 < count < 320 for count in homes.values())


# Cancelling and aborting


async def told_of(server: FaultServer, within: float = 2.0) -> list[Any]:
    """The aborts that a server was told of."""
    async with asyncio.timeout(within):
        while not asked(server, "/abort_request"):
            await asyncio.sleep(0.01)
    return asked(server, "/abort_request")


async def test_what_nobody_waits_for_is_aborted() -> None:
    async with FaultServer([hang(), answer(body=b"")]) as server, engine_of(server.url) as engine:
        call = asyncio.create_task(generate(engine))
        while not server.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        assert await told_of(server) == [{"rid": asked(server)[0]["rid"]}]
        with pytest.raises(asyncio.CancelledError):
            await call
    async with FaultServer([hang(), answer(body=b"")]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.3)
        assert await told_of(server) == [{"rid": asked(server)[0]["rid"]}]


async def test_an_abort_ends_a_call_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "ABORT_GRACE", 0.3)
    at_server, between = FaultServer([hang()]), FaultServer([answer(503, headers={"Retry-After": "20"})])
    async with at_server, between:
        engines = {
            "at a server that doesn't care": engine_of(at_server.url),
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
            assert (generation.finish, generation.ids, generation.logprobs) == (Finish.ABORT, [], []), where
            assert time.monotonic() - began < 0.3 + SLACK, where
        queueing.cancel()
        await asyncio.gather(queueing, return_exceptions=True)
        for engine in engines.values():
            await engine.close()


async def test_an_abort_is_no_reason_to_miss_the_deadline() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        began = time.monotonic()
        call = asyncio.create_task(generate(engine, 0.5))
        await asyncio.sleep(0.1)
        aborting = asyncio.create_task(engine.abort("r"))
        assert (await call).finish is Finish.ABORT
        assert time.monotonic() - began < 0.5 + SLACK
        await aborting


async def test_a_thousand_cancelled_calls_are_aborted_few_at_a_time() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        calls = [asyncio.create_task(generate(engine, 60)) for _ in range(500)]
        while len(server.requests) < 500:
            await asyncio.sleep(0.01)
        server.script = [answer(body=b"")]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        while len(asked(server, "/abort_request")) < 500:
            await asyncio.sleep(0.01)
        assert server.most <= 500 + pool_module.NOTICES


async def test_closing_does_not_wait_long_for_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LAST_NOTICES", 0.2)
    async with FaultServer([hang()]) as server, engine_of(server.url) as engine:
        await fault(engine, EngineUnavailable, 0.2)
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 0.2 + SLACK
        await server.all_closed()


# Many


async def test_ten_thousand_in_flight() -> None:
    flying = most = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal flying, most
        await request.read()
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.05)
        flying -= 1
        return web.json_response(sampled([5, 2]))

    async with serving(generate=slow) as url, engine_of(url, max_connections=300) as engine:
        done = await asyncio.gather(*(generate(engine, 120) for _ in range(10_000)))
    assert [generation.ids for generation in done] == [[5, 2]] * 10_000
    assert most <= 300


async def test_waiting_for_a_connection_counts() -> None:
    async with FaultServer([after(0.4, OK)]) as server, engine_of(server.url, max_connections=1) as engine:
        began = time.monotonic()
        ends = await asyncio.gather(*(generate(engine, 0.6) for _ in range(4)), return_exceptions=True)
        assert time.monotonic() - began < 0.6 + SLACK
        assert sum(isinstance(end, Generation) for end in ends) == 1
        assert sum("its turn didn't come" in str(end) for end in ends) == 2
        assert server.most == 1


def test_few_open_files_are_shared_among_the_servers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module.resource, "getrlimit", lambda _: (1024, 4096))
    with caplog.at_level(logging.INFO):
        assert pool_module._share_of_files(4, 1024) == 192
        assert pool_module._share_of_files(1, 100) == 100
    assert "ulimit -n" in caplog.text


# Loops and processes


async def test_it_pickles() -> None:
    async with FaultServer([OK]) as server, engine_of(server.url) as engine:
        await generate(engine)
        copy = pickle.loads(pickle.dumps(engine))
        assert (await generate(copy)).ids == [5, 2]
        await copy.close()
        await engine.close()
        await server.all_closed()
        assert (await generate(engine)).ids == [5, 2], "and opens again"


async def test_closing_ends_the_calls_that_are_on_their_way() -> None:
    async with FaultServer([hang()]) as server, engine_of(server.url, max_connections=1) as engine:
        calls = [asyncio.create_task(generate(engine, 30)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await engine.close()
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 2)
        assert {type(end) for end in ends} == {EngineUnavailable}


async def test_an_engine_that_is_dropped_closes_its_connections() -> None:
    async with FaultServer([OK]) as server:
        engine = engine_of(server.url)
        await generate(engine)
        assert server.open == 1
        engine.itself = engine  # type: ignore[attr-defined]  # as one that a traceback's frames refer to
        del engine
        gc.collect()
        await server.all_closed()
        assert server.open == 0


def test_a_loop_that_ends_takes_its_connections_along() -> None:
    engine = None

    async def once() -> None:
        nonlocal engine
        async with FaultServer([OK]) as server:
            engine = engine or engine_of(server.url)
            engine._servers.urls = (server.url,)
            await generate(engine)

    for _ in range(3):
        asyncio.run(once())  # a session that is left open is a warning, and that an error


def test_urls() -> None:
    for wrong in ("", "127.0.0.1:30000", "ftp://host", "http://", "http://["):
        with pytest.raises(ConfigError, match="no server's URL"):
            engine_of(wrong)
    with pytest.raises(ConfigError, match="needs the URL"):
        engine_of()
    with pytest.raises(ConfigError, match="max_connections"):
        engine_of("http://host", max_connections=0)
