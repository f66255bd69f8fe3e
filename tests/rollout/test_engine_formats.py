"""VLLMEngine and OpenAIEngine against fake servers with recorded formats, and ScriptedEngine.

A real vLLM takes five minutes to install, which is too long for every test run.
"""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from rollout.fake_servers import IDS, LOGPROBS, FakeVLLM, serving
from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.rollout.engines.base import ChatEngine, ChatReply, FinishType, TokenEngine
from toolroll.rollout.engines.openai import OpenAIEngine
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.vllm import VLLMEngine
from toolroll.schemas import FunctionCall, Message, ToolCall

PARAMS = {"max_new_tokens": 64, "temperature": 0.5}
SENT = {"temperature": 0.5, "max_tokens": 64, "logprobs": 0, "skip_special_tokens": False}


# vLLM


async def test_vllm_tokens_api() -> None:
    fake = FakeVLLM(scale_out=True)
    async with fake.serve() as url, VLLMEngine(url, model="smol") as engine:
        generation = await engine.generate("r", (1, 2, 3), PARAMS)
        assert isinstance(engine, TokenEngine)
        assert engine.logprobs_mode == "raw_logprobs"
        assert (generation.ids, generation.logprobs, generation.finish) == (IDS, LOGPROBS, FinishType.STOP)
        assert (generation.weight_version, generation.timings.cached_tokens, generation.endpoint) == ("7", 3, url)
        short = await engine.generate("r", [1], {"max_new_tokens": 2})
        assert (short.ids, short.finish) == (IDS[:2], FinishType.LENGTH)
        with pytest.raises(EngineRefused, match="Token id 49152 is out of vocabulary"):
            await engine.generate("r", [49152], PARAMS)
    body = fake.bodies["/inference/v1/generate"][0]
    assert body.pop("request_id").startswith("r/")
    assert body == {"model": "smol", "token_ids": [1, 2, 3], "sampling_params": SENT}


async def test_vllm_falls_back_to_completions() -> None:
    fake = FakeVLLM(scale_out=False)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        for _ in range(2):
            generation = await engine.generate("r", [1, 2, 3], PARAMS)
            assert (generation.ids, generation.logprobs, generation.finish) == (IDS, LOGPROBS, FinishType.STOP)
            assert (generation.weight_version, generation.timings.cached_tokens) == (None, None)
    first, second = fake.bodies["/v1/completions"]
    assert first.pop("request_id") != second.pop("request_id")
    assert first == {"prompt": [1, 2, 3], "return_token_ids": True, "return_tokens_as_token_ids": True, **SENT}


async def test_vllm_returns_tokens_of_aborted_call() -> None:
    fake = FakeVLLM(scale_out=True, step=0.2)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        call = asyncio.create_task(engine.generate("r", [1], PARAMS))
        await asyncio.sleep(0.5)
        await engine.abort("r")
        generation = await call
        assert generation.finish is FinishType.ABORT
        assert 0 < len(generation.ids) < len(IDS)
        assert generation.ids == IDS[: len(generation.ids)]
        assert generation.logprobs == LOGPROBS[: len(generation.ids)]


async def test_vllm_completions_end_with_connection() -> None:
    fake = FakeVLLM(scale_out=False, step=5)
    async with fake.serve() as url, VLLMEngine(url) as engine:
        calls = [asyncio.create_task(engine.generate(name, [1], PARAMS)) for name in "ab"]
        await asyncio.sleep(0.3)
        await engine.abort("a")
        calls[1].cancel()
        assert (await calls[0]).finish is FinishType.ABORT
        assert (await calls[0]).ids == []
        async with asyncio.timeout(2):
            while fake.disconnected < 2:
                await asyncio.sleep(0.01)


async def test_cancelled_call_is_aborted_at_vllm() -> None:
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


async def test_vllm_without_token_ids() -> None:
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


async def chat(answer: dict[str, Any], messages: list[Message], **options: Any) -> tuple[ChatReply, Any, Any]:
    """Return the reply of the engine, and the body and headers of its request."""
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


async def test_tool_call_keeps_text_of_arguments() -> None:
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1,'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    reply, sent, headers = await chat({"message": message, "finish_reason": "tool_calls"}, HELLO, api_key="k")
    function = FunctionCall(name="add", arguments='{"a": 1,')
    assert reply.message == Message(
        role="assistant", reasoning_content="Hm.", tool_calls=[ToolCall(id="call_1", function=function)]
    )
    assert reply.finish is FinishType.STOP
    assert headers["Authorization"] == "Bearer k"
    asked = [{"role": "user", "content": "Hello"}]
    assert sent == {"model": "m", "messages": asked, "tools": [TOOL], "max_tokens": 9, "top_p": 0.9}


async def test_conversation_is_sent_with_tool_calls() -> None:
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


@pytest.mark.parametrize("arguments", ['{"a": 1,', "[1]", "", "[" * 100_000])
async def test_invalid_arguments_are_not_sent_back(arguments: str) -> None:
    calls = [ToolCall(id="c", function=FunctionCall(name="add", arguments=arguments))]
    answer = Message(role="tool", content="The arguments are not valid JSON.", tool_call_id="c")
    conversation = [*HELLO, Message(role="assistant", tool_calls=calls), answer]
    _, sent, _ = await chat({"message": {"content": "Two."}, "finish_reason": "stop"}, conversation)
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


ANY_CALL = {"name": "add", "arguments": f'{{"a": {10**30}, "é": "\ufffd"}}'}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", FinishType.STOP),
        ("length", FinishType.LENGTH),
        ("abort", FinishType.ABORT),
        ("eos", FinishType.STOP),
        ("content_filter", FinishType.STOP),
        (None, FinishType.STOP),
    ],
)
async def test_finish_reason(reason: str | None, finish: FinishType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    said = {"content": "Two.", "reasoning": "Easy.", "tool_calls": None}
    reply, _, headers = await chat({"message": said, "finish_reason": reason}, HELLO)
    assert (reply.message.content, reply.message.reasoning_content, reply.finish) == ("Two.", "Easy.", finish)
    assert headers["Authorization"] == "Bearer from the environment"


@pytest.mark.parametrize(
    "answer",
    [{}, {"message": None}, {"message": {"tool_calls": [{"id": 1, "function": {}}]}}, {"message": {"content": 7}}],
)
async def test_invalid_reply(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable, match="invalid response"):
        await chat(answer, HELLO)


def test_base_url_is_normalized() -> None:
    for given, expected in [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ]:
        assert OpenAIEngine(given, model="m")._http.urls == (expected,)


# Scripted


async def test_script_is_returned_turn_by_turn() -> None:
    engine = ScriptedEngine([[5, 6, 2, 9], [7, 8, 9]], logprob=-0.25)
    assert isinstance(engine, TokenEngine)
    params = {"max_new_tokens": 3, "stop_token_ids": [2]}
    first = await engine.generate("t/0", [1], params, affinity="t")
    assert (first.ids, first.logprobs, first.finish) == ([5, 6, 2], [-0.25] * 3, FinishType.STOP)
    second = await engine.generate("t/1", [1], {**params, "max_new_tokens": 2}, affinity="t")
    assert (second.ids, second.finish) == ([7, 8], FinishType.LENGTH)
    assert (await engine.generate("u/0", [1], params, affinity="u")).ids == [5, 6, 2], "another trajectory"
    with pytest.raises(EngineRefused, match="ends after 2"):
        await engine.generate("t/2", [1], params, affinity="t")
    assert (engine.calls, engine.in_flight) == (3, 0)


async def test_script_can_be_function() -> None:
    engine = ScriptedEngine(lambda request_id, ids, turn: [len(request_id), *ids, turn], logprob=None, delay=0.05)
    done = await asyncio.gather(*(engine.generate("abc", [n], {}, affinity=str(n)) for n in range(50)))
    assert [generation.ids for generation in done] == [[3, n, 0] for n in range(50)]
    assert {generation.logprobs for generation in done} == {None}
    assert engine.max_in_flight == 50


async def test_scripted_call_can_be_aborted_and_expire() -> None:
    engine = ScriptedEngine([[5, 6, 7]], delay=30, abort_after=2, weight_version="4")
    call = asyncio.create_task(engine.generate("a", [1], {}))
    await asyncio.sleep(0.01)
    await engine.abort("a")
    await engine.abort("unknown")
    generation = await call
    assert (generation.ids, generation.finish, generation.weight_version) == ([5, 6], FinishType.ABORT, "4")
    with pytest.raises(EngineUnavailable):
        await engine.generate("b", [1], {}, deadline=time.monotonic() + 0.05)
    assert engine.in_flight == 0
