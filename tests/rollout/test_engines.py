"""SGLangEngine and OpenAIEngine against a real SGLang server with a small model."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from real_engine import RealEngine

from toolroll.errors import EngineRefused
from toolroll.rollout.engines.base import ChatEngine, FinishType, TokenEngine
from toolroll.rollout.engines.openai import OpenAIEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.schemas import Message

pytestmark = pytest.mark.sglang

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 16}
LONG = {"temperature": 1, "max_new_tokens": 3000, "ignore_eos": True}
END = 2
numbers = itertools.count()


@pytest.fixture
async def engine(sglang: RealEngine) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(sglang.url) as engine:
        yield engine


async def ask(engine: RealEngine, path: str, body: Any = None) -> Any:
    method = "GET" if body is None else "POST"
    async with aiohttp.request(method, engine.url + path, json=body) as response:
        assert response.status == 200
        return json.loads(await response.text() or "null")


async def prompt(engine: RealEngine, question: str) -> list[int]:
    """Return the token ids of a chat with a question. A counter keeps the tests from sharing cached prefixes."""
    said = CHAT.format(f"{question} ({next(numbers)})")
    tokens: list[int] = (await ask(engine, "/tokenize", {"prompt": said, "add_special_tokens": False}))["tokens"]
    return tokens


async def running(engine: RealEngine) -> int:
    """Return the number of requests that the server runs or has queued."""
    [load] = (await ask(engine, "/v1/loads"))["loads"]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def until(engine: RealEngine, count: int, within: float = 120.0) -> float:
    """Wait until the server has `count` requests. Return the elapsed seconds."""
    began = time.monotonic()
    async with asyncio.timeout(within):
        while await running(engine) != count:
            await asyncio.sleep(0.05)
    return time.monotonic() - began


# Sampling


async def test_greedy_sampling_is_deterministic(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "What is the capital of France?")
    first = await engine.generate("a", ids, GREEDY)
    second = await engine.generate("a", ids, GREEDY)
    assert first.ids == second.ids
    assert first.logprobs is not None
    assert len(first.ids) == len(first.logprobs) > 0
    assert all(logprob <= 0 for logprob in first.logprobs)
    assert (first.endpoint, first.timings.attempts) == (sglang.url, 1)
    assert isinstance(engine, TokenEngine)
    assert engine.logprobs_mode == "processed_logprobs"


async def test_stop_token_is_last_id(sglang: RealEngine, engine: SGLangEngine) -> None:
    example = await prompt(sglang, "Say: A B C")
    said = (await ask(sglang, "/tokenize", {"prompt": "A B C<|im_end|>\n", "add_special_tokens": False}))["tokens"]
    ids = (example + said) * 2 + example
    whole = await engine.generate("a", ids, GREEDY)
    assert (whole.finish, whole.ids[-1]) == (FinishType.STOP, END), "the stop token of the model"
    stop = whole.ids[1]
    cut = await engine.generate("b", ids, {**GREEDY, "stop_token_ids": [stop]})
    assert (cut.finish, cut.ids) == (FinishType.STOP, whole.ids[: whole.ids.index(stop) + 1]), "a requested stop token"
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.ids)


async def test_stop_string_is_in_ids(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Count from one to five.")
    generation = await engine.generate("a", ids, {**GREEDY, "max_new_tokens": 64, "stop": ["<|im_end|>", "\n"]})
    said = await ask(sglang, "/detokenize", {"tokens": generation.ids, "skip_special_tokens": False})
    assert generation.finish is FinishType.STOP
    assert said["text"].endswith(("<|im_end|>", "\n"))


async def test_length_limit_ends_sampling(sglang: RealEngine, engine: SGLangEngine) -> None:
    generation = await engine.generate("a", await prompt(sglang, "Tell a story."), {**LONG, "max_new_tokens": 7})
    assert (generation.finish, len(generation.ids)) == (FinishType.LENGTH, 7)


async def test_score_and_sampling_agree(
    sglang: RealEngine, engine: SGLangEngine, report_figure: Callable[[str], None]
) -> None:
    """Decoding in a batch and prefilling differ only by the precision of bfloat16."""
    asked = [await prompt(sglang, "Tell a story.") for _ in range(8)]
    sampling = {"temperature": 1, "max_new_tokens": 48, "ignore_eos": True}
    sampled = await asyncio.gather(*(engine.generate(f"s{n}", ids, sampling) for n, ids in enumerate(asked)))
    apart = []
    for ids, generation in zip(asked, sampled, strict=True):
        scores = await engine.score(ids + generation.ids, start=len(ids))
        assert generation.logprobs is not None
        apart += [abs(a - b) for a, b in zip(generation.logprobs, scores, strict=True)]
    mean, most = sum(apart) / len(apart), max(apart)
    report_figure(f"|sampled − scored| over {len(apart)} tokens: mean {mean:.4f}, max {most:.4f}")
    assert mean < 0.1
    assert most < 0.5


async def test_score_validates_start(engine: SGLangEngine) -> None:
    scores = await engine.score([1, 4093, 198])
    assert len(scores) == 2
    assert await engine.score([1, 4093, 198], start=2) == pytest.approx(scores[1:], abs=0.2)
    for start in (0, 3):
        with pytest.raises(EngineRefused, match="from 1 to 2"):
            await engine.score([1, 4093, 198], start=start)


async def test_second_turn_uses_prefix_cache(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Who wrote Hamlet? Answer in one word, and give no reasons.")
    first = await engine.generate("t/0", ids, GREEDY, affinity="t")
    second = await engine.generate("t/1", ids + first.ids + [198, 1], GREEDY, affinity="t")
    assert second.timings.cached_tokens is not None
    assert second.timings.cached_tokens >= len(ids)


async def test_weight_version_after_update(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "What is 2 + 2?")
    before = await engine.generate("a", ids, GREEDY)
    await engine.update_weights(sglang.model_dir, "step-41")
    after = await engine.generate("b", ids, GREEDY)
    assert before.weight_version != after.weight_version == "step-41"
    assert before.ids == after.ids, "the weights are the same"


async def test_weight_update_waits_for_busy_server(
    sglang: RealEngine, engine: SGLangEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang holds a request that has just ended for a moment. The test pauses generation to prolong it."""
    caplog.set_level("INFO", "toolroll")
    held = asyncio.create_task(engine.generate("a", await prompt(sglang, "Hold on."), LONG))
    await until(sglang, 1)
    await ask(sglang, "/pause_generation", {"mode": "in_place"})
    try:
        updating = asyncio.create_task(engine.update_weights(sglang.model_dir, "step-43"))
        async with asyncio.timeout(60):
            while "cache was not flushed" not in caplog.text:
                await asyncio.sleep(0.01)
    finally:
        await ask(sglang, "/continue_generation", {})
        await engine.abort("a")
    await updating
    assert (await held).finish is FinishType.ABORT
    assert (await engine.generate("b", await prompt(sglang, "Go on."), GREEDY)).weight_version == "step-43"


async def test_many_concurrent_calls(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Count to ten.")
    sampling = {"temperature": 1, "max_new_tokens": 8, "ignore_eos": True}
    done = await asyncio.gather(*(engine.generate(f"m{n}", ids, sampling) for n in range(64)))
    assert [len(generation.ids) for generation in done] == [8] * 64
    assert [len(generation.logprobs or ()) for generation in done] == [8] * 64


# Rejected requests


async def test_id_outside_vocabulary_is_not_sent(sglang: RealEngine, engine: SGLangEngine) -> None:
    for wrong in (49152, -1, 10**12):
        with pytest.raises(EngineRefused, match=f": {wrong}. The vocabulary has ids from 0 to 49151"):
            await engine.generate("a", [1, wrong, 2], GREEDY)
    with pytest.raises(EngineRefused, match="49152"):
        await engine.score([1, 49152])
    assert await engine.health() == {sglang.url: True}
    assert len((await engine.generate("a", [1, 49151], GREEDY)).ids) == 16, "the last id of the vocabulary is valid"


async def test_invalid_requests_are_rejected(sglang: RealEngine, engine: SGLangEngine) -> None:
    for params, why in [
        ({"max_new_tokens": 0}, "Invalid max_new_tokens: 0"),
        ({"temperature": 1}, "Invalid max_new_tokens: None"),
        ({**GREEDY, "n": 2}, "Invalid n: 2"),
        ({**GREEDY, "max_new_tokens": 5000}, "maximum context length of 4096"),
        ({**GREEDY, "tempratur": 1}, "unknown field `tempratur`"),
    ]:
        with pytest.raises(EngineRefused, match=why):
            await engine.generate("a", [1, 2, 3], params)
    with pytest.raises(EngineRefused, match="longer than the model's context length") as caught:
        await engine.generate("a", [5] * 5000, GREEDY)
    assert caught.value.status == 400
    with pytest.raises(EngineRefused, match="empty"):
        await engine.generate("a", [], GREEDY)


# Abort


async def test_aborted_call_returns_sampled_tokens(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Tell a long story.")
    call = asyncio.create_task(engine.generate("t-1", ids, LONG))
    other = asyncio.create_task(engine.generate("t-10", ids, {**LONG, "max_new_tokens": 24}))
    await until(sglang, 2)
    await asyncio.sleep(1)
    await engine.abort("t-1")
    generation = await call
    assert generation.finish is FinishType.ABORT
    assert generation.logprobs is not None
    assert 0 < len(generation.ids) == len(generation.logprobs) < 3000
    assert (await other).finish is FinishType.LENGTH, "SGLang aborts all ids with a prefix, which this id must not have"
    scores = await engine.score(ids + generation.ids, start=len(ids))
    assert scores == pytest.approx(generation.logprobs, abs=0.5)
    await engine.abort("t-1")
    await engine.abort("unknown")


async def test_abort_that_overtakes_its_call(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Tell a long story.")
    calls = [asyncio.create_task(engine.generate(f"o{n}", ids, LONG)) for n in range(4)]
    for n in range(4):
        await asyncio.sleep(0.002 * n)
        await engine.abort(f"o{n}")
    assert [(await call).finish for call in calls] == [FinishType.ABORT] * 4
    await until(sglang, 0)


async def test_abort_all(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Tell a long story.")
    calls = [asyncio.create_task(engine.generate(f"a{n}", ids, LONG)) for n in range(40)]
    await until(sglang, 40)  # eight of them are queued
    await engine.abort_all()
    done = await asyncio.gather(*calls)
    assert {generation.finish for generation in done} == {FinishType.ABORT}
    assert all(len(generation.ids) == len(generation.logprobs or ()) for generation in done)
    await until(sglang, 0)


async def test_cancelled_call_is_aborted(sglang: RealEngine, engine: SGLangEngine) -> None:
    ids = await prompt(sglang, "Tell a long story.")
    calls = [asyncio.create_task(engine.generate(f"c{n}", ids, LONG)) for n in range(4)]
    await until(sglang, 4)
    for call in calls:
        call.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
    assert await until(sglang, 0) < 30, "to completion it would take minutes"


# Chat


async def test_chat(sglang: RealEngine) -> None:
    async with OpenAIEngine(sglang.url, model="any") as engine:
        assert isinstance(engine, ChatEngine)
        asked = [Message(role="user", content="Say hello.")]
        reply = await engine.chat("a", asked, [], {"temperature": 0, "max_new_tokens": 5})
        assert (reply.message.role, reply.finish) == ("assistant", FinishType.LENGTH)
        assert isinstance(reply.message.content, str)
        assert "Hello" in reply.message.content
        again = [*asked, reply.message, Message(role="user", content="Once more.")]
        assert (await engine.chat("b", again, [], {"temperature": 0, "max_new_tokens": 5})).message.content
        with pytest.raises(EngineRefused, match="4096"):
            await engine.chat("c", [Message(role="user", content="word " * 5000)], [], {"max_new_tokens": 5})


async def test_chat_with_tool_call(sglang: RealEngine) -> None:
    """With a grammar even a small model calls a tool. The engine keeps the text of its arguments."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}}
    function = {"name": "weather", "parameters": {**parameters, "required": ["city"]}}
    params = {"temperature": 0, "max_new_tokens": 64, "tool_choice": "required"}
    async with OpenAIEngine(sglang.url, model="any") as engine:
        asked = [Message(role="user", content="How is the weather in Paris?")]
        reply = await engine.chat("a", asked, [{"type": "function", "function": function}], params)
    assert reply.message.tool_calls
    [call] = reply.message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(call.function.arguments, str)
    assert "Paris" in call.function.arguments
