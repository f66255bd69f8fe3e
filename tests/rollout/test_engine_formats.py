"""VLLMEngine and OpenAIEngine against doubles that speak the servers' formats as observed, and ScriptedEngine.

vLLM itself takes five minutes to install: too long for every run of the tests.
"""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from rollout.fake_servers import IDS, LOGPROBS, FakeVLLM, serving
from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.rollout.engines.engine import ChatEngine, Finish, Reply, TokenEngine
from toolroll.rollout.engines.openai import OpenAIEngine
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.vllm import VLLMEngine
from toolroll.schemas import FunctionCall, Message, ToolCall

PARAMS = {"max_new_tokens": 64, "temperature": 0.5}
SENT = {"temperature": 0.5, "max_tokens": 64, "logprobs": 0, "skip_special_tokens": False}


# vLLM


async def test_vllm_by_tokens() -> None:
    fake = FakeVLLM(scale_out=True)
    async with fake.serve() as url, VLLMEngine(url, model="smol") as engine:
        generation = await engine.generate("r", (1, 2, 3), PARAMS)
        assert isinstance(engine, TokenEngine)
        assert engine.logprobs_of == "raw"
        assert (generation.ids, generation.logprobs, generation.finish) == (IDS, LOGPROBS, Finish.STOP)
        assert (generation.weight_version, generation.timings.cached_tokens, generation.endpoint) == ("7", 3, url)
        short = await engine.generate("r", [1], {"max_new_tokens": 2})
        assert (short.ids, short.finish) == (IDS[:2], Finish.LENGTH)
        with pytest.raises(EngineRefused, match="Token id 49152 is out of vocabulary"):
            await engine.generate("r", [49152], PARAMS)
    body = fake.bodies["/inference/v1/generate"][0]
    assert body.pop("request_id").startswith("r/")
    assert body == {"model": "smol", "token_ids": [1, 2, 3], "sampling_params": SENT}


async def test_vllm_by_completions_where_there_is_no_other_way() -> None:
    fake = FakeVLLM(scale_out=False)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        for _ in range(2):
            generation = await engine.generate("r", [1, 2, 3], PARAMS)
            assert (generation.ids, generation.logprobs, generation.finish) == (IDS, LOGPROBS, Finish.STOP)
            assert (generation.weight_version, generation.timings.cached_tokens) == (None, None)
    first, second = fake.bodies["/v1/completions"]
    assert first.pop("request_id") != second.pop("request_id")
    assert first == {"prompt": [1, 2, 3], "return_token_ids": True, **SENT}


async def test_vllm_gives_what_an_aborted_call_has() -> None:
    fake = FakeVLLM(scale_out=True, step=0.2)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        call = asyncio.create_task(engine.generate("r", [1], PARAMS))
        await asyncio.sleep(0.5)
        await engine.abort("r")
        generation = await call
        assert generation.finish is Finish.ABORT
        assert 0 < len(generation.ids) < len(IDS)
        assert generation.ids == IDS[: len(generation.ids)]
        assert generation.logprobs == LOGPROBS[: len(generation.ids)]


async def test_vllm_by_completions_ends_with_the_connection() -> None:
    fake = FakeVLLM(scale_out=False, step=5)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        calls = [asyncio.create_task(engine.generate(name, [1], PARAMS)) for name in "ab"]
        await asyncio.sleep(0.3)
        await engine.abort("a")
        calls[1].cancel()
        assert (await calls[0]).finish is Finish.ABORT
        assert (await calls[0]).ids == []
        async with asyncio.timeout(2):
            while fake.disconnected < 2:
                await asyncio.sleep(0.01)


async def test_a_cancelled_call_is_aborted_at_vllm() -> None:
    fake = FakeVLLM(scale_out=True, step=5)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        call = asyncio.create_task(engine.generate("r", [1], PARAMS))
        while not fake.bodies:
            await asyncio.sleep(0.01)
        call.cancel()
        async with asyncio.timeout(2):
            while "/inference/v1/abort_requests" not in fake.bodies:
                await asyncio.sleep(0.01)
        [asked] = fake.bodies["/inference/v1/generate"]
        assert fake.bodies["/inference/v1/abort_requests"][0] == {
            "request_ids": [f"generate-tokens-{asked['request_id']}"]
        }


async def test_a_vllm_that_gives_no_ids() -> None:
    async def old(request: web.Request) -> web.Response:
        choice = {"index": 0, "text": "Hi", "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    async with serving(v1__completions=old) as url, VLLMEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match="return_token_ids"):
            await engine.generate("r", [1], PARAMS)
        for wrong in ([], [-1]):
            with pytest.raises(EngineRefused):
                await engine.generate("r", wrong, PARAMS)


# OpenAI


async def chat(answer: dict[str, Any], messages: list[Message], **options: Any) -> tuple[Reply, Any, Any]:
    """What the engine makes of an answer; what it sent, and with which headers."""
    sent: list[Any] = []

    async def completions(request: web.Request) -> web.Response:
        sent.extend([await request.json(), request.headers])
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [{"index": 0, **answer}]})

    async with serving(v1__chat__completions=completions) as url, OpenAIEngine(url, model="m", **options) as engine:
        assert isinstance(engine, ChatEngine)
        reply = await engine.chat("r", messages, [TOOL], {"max_new_tokens": 9, "top_p": 0.9})
    return reply, sent[0], sent[1]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x-unit": None}}}
HELLO = [Message(role="user", content="Hello")]


async def test_a_call_keeps_the_text_of_its_arguments() -> None:
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1,'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    reply, sent, headers = await chat({"message": message, "finish_reason": "tool_calls"}, HELLO, api_key="k")
    function = FunctionCall(name="add", arguments='{"a": 1,')
    assert reply.message == Message(
        role="assistant", reasoning_content="Hm.", tool_calls=[ToolCall(id="call_1", function=function)]
    )
    assert reply.finish is Finish.STOP
    assert headers["Authorization"] == "Bearer k"
    asked = [{"role": "user", "content": "Hello"}]
    assert sent == {"model": "m", "messages": asked, "tools": [TOOL], "max_tokens": 9, "top_p": 0.9}


async def test_a_whole_conversation_goes_back() -> None:
    calls = [ToolCall(id="c", function=FunctionCall(name="add", arguments={"a": 10**30, "é": "\ud800"}))]
    told = [
        *HELLO,
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="2\ud800", tool_call_id="c"),
    ]
    _, sent, _ = await chat({"message": {"content": "Two.", "reasoning": "Easy."}, "finish_reason": "stop"}, told)
    assert sent["messages"][1:] == [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": ANY_CALL}]},
        {"role": "tool", "content": "2\ufffd", "tool_call_id": "c"},
    ]


ANY_CALL = {"name": "add", "arguments": f'{{"a": {10**30}, "é": "\ufffd"}}'}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("length", Finish.LENGTH),
        ("abort", Finish.ABORT),
        ("eos", Finish.STOP),
        (None, Finish.STOP),
    ],
)
async def test_why_it_ended(reason: str | None, finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    said = {"content": "Two.", "reasoning": "Easy.", "tool_calls": None}
    reply, _, headers = await chat({"message": said, "finish_reason": reason}, HELLO)
    assert (reply.message.content, reply.message.reasoning_content, reply.finish) == ("Two.", "Easy.", finish)
    assert headers["Authorization"] == "Bearer from the environment"


@pytest.mark.parametrize(
    "answer",
    [{}, {"message": None}, {"message": {"tool_calls": [{"id": 1, "function": {}}]}}, {"message": {"content": 7}}],
)
async def test_what_is_no_reply(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable, match="no answer of this kind of server"):
        await chat(answer, HELLO)


def test_the_url_is_as_openai_has_it() -> None:
    for given, meant in [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ]:
        assert OpenAIEngine(given, model="m")._servers.urls == (meant,)


# Scripted


async def test_the_script_is_said_turn_by_turn() -> None:
    engine = ScriptedEngine([[5, 6, 2, 9], [7, 8, 9]], logprob=-0.25)
    assert isinstance(engine, TokenEngine)
    params = {"max_new_tokens": 3, "stop_token_ids": [2]}
    first = await engine.generate("t/0", [1], params, affinity="t")
    assert (first.ids, first.logprobs, first.finish) == ([5, 6, 2], [-0.25] * 3, Finish.STOP)
    second = await engine.generate("t/1", [1], {**params, "max_new_tokens": 2}, affinity="t")
    assert (second.ids, second.finish) == ([7, 8], Finish.LENGTH)
    assert (await engine.generate("u/0", [1], params, affinity="u")).ids == [5, 6, 2], "another trajectory"
    with pytest.raises(EngineRefused, match="ends after 2"):
        await engine.generate("t/2", [1], params, affinity="t")
    assert (engine.calls, engine.in_flight) == (3, 0)


async def test_a_script_that_is_a_function() -> None:
    engine = ScriptedEngine(lambda request_id, ids, turn: [len(request_id), *ids, turn], logprob=None, delay=0.05)
    done = await asyncio.gather(*(engine.generate("abc", [n], {}, affinity=str(n)) for n in range(50)))
    assert [generation.ids for generation in done] == [[3, n, 0] for n in range(50)]
    assert {generation.logprobs for generation in done} == {None}
    assert engine.most_in_flight == 50


async def test_a_script_is_aborted_and_keeps_the_deadline() -> None:
    engine = ScriptedEngine([[5, 6, 7]], delay=30, abort_after=2, weight_version="4")
    call = asyncio.create_task(engine.generate("a", [1], {}))
    await asyncio.sleep(0.01)
    await engine.abort("a")
    await engine.abort("nobody")
    generation = await call
    assert (generation.ids, generation.finish, generation.weight_version) == ([5, 6], Finish.ABORT, "4")
    with pytest.raises(EngineUnavailable):
        await engine.generate("b", [1], {}, deadline=time.monotonic() + 0.05)
    assert engine.in_flight == 0
