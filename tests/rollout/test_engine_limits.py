"""Limits of engines: each attempt uses a slot, and costs the tokens that it used."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web

from rollout.fake_servers import IDS, FakeVLLM, serving
from toolroll import (
    BudgetExhausted,
    ConfigError,
    InfraFault,
    Message,
    OpenAIEngine,
    ResourceLimits,
    SGLangEngine,
    get_limiter,
)
from toolroll import VLLMEngine as VLLM
from toolroll.rollout.engines.base import FinishType
from toolroll.rollout.engines.openai import _estimate_tokens

PARAMS = {"max_new_tokens": 8}


@pytest.fixture
def resource() -> str:
    return f"resource-{uuid4().hex}"


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def sglang_answer(request: Any = None) -> dict[str, Any]:
    logprobs = [[-0.5, 5, None], [-0.5, 2, None]]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": logprobs}
    return {"text": "", "output_ids": [5, 2], "meta_info": meta}


async def test_requests_wait_for_a_slot(resource: str) -> None:
    running = most = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return web.json_response(sglang_answer())

    limits = {"resource": resource, "limit": 2}
    async with serving(generate=generate) as url, SGLangEngine(url, vocab_size=100, limits=limits) as engine:
        calls = (engine.generate(str(n), [1, 2, 3], PARAMS, deadline=soon(20)) for n in range(10))
        generations = await asyncio.gather(*calls)
    assert [one.ids for one in generations] == [[5, 2]] * 10
    assert most == 2


async def test_cost_is_corrected_to_the_used_tokens(resource: str) -> None:
    """Five calls use 5 tokens each; each is estimated to cost 11 (3 + 8)."""

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(sglang_answer())

    limits = ResourceLimits(resource=resource, budget={"tokens": 31})
    async with serving(generate=generate) as url, SGLangEngine(url, vocab_size=100, limits=limits) as engine:
        for n in range(5):
            await engine.generate(str(n), [1, 2, 3], PARAMS, deadline=soon())
        with pytest.raises(BudgetExhausted, match="6 tokens left, 11 needed"):
            await engine.generate("6", [1, 2, 3], PARAMS, deadline=soon())


@pytest.mark.parametrize("scale_out", [True, False])
async def test_vllm_is_limited_with_both_of_its_apis(resource: str, scale_out: bool) -> None:
    limits = ResourceLimits(resource=resource, budget={"tokens": 3 + 8 + 3 + len(IDS)})
    async with FakeVLLM(scale_out=scale_out).serve() as url, VLLM(url, model="m", limits=limits) as engine:
        for n in range(2):
            assert (await engine.generate(str(n), [1, 2, 3], PARAMS, deadline=soon())).ids == IDS
        with pytest.raises(BudgetExhausted):
            await engine.generate("3", [1, 2, 3], PARAMS, deadline=soon())


async def test_each_attempt_uses_a_request_and_a_rejected_one_no_tokens(
    resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [429, 503, 200]
    rejections: list[float | None] = []
    monkeypatch.setattr(
        "toolroll.limiter.slot.Slot.reject", lambda slot, retry_after=None: rejections.append(retry_after)
    )

    async def generate(request: web.Request) -> web.Response:
        status = statuses.pop(0)
        headers = {"Retry-After": "0.05"} if status == 429 else {}
        return web.json_response(sglang_answer(), status=status, headers=headers)

    limits = ResourceLimits(resource=resource, budget={"requests": 3, "tokens": 12})
    async with serving(generate=generate) as url, SGLangEngine(url, vocab_size=100, limits=limits) as engine:
        generation = await engine.generate("1", [1, 2, 3], PARAMS, deadline=soon())
        assert generation.timings.attempts == 3
        with pytest.raises(BudgetExhausted):
            await engine.generate("2", [1, 2, 3], PARAMS, deadline=soon())
    assert rejections == [0.05, None]


async def test_waiting_request_is_aborted_and_ends_by_its_deadline(resource: str) -> None:
    limits = ResourceLimits(resource=resource, limit=1)

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(sglang_answer())

    async with serving(generate=generate) as url, SGLangEngine(url, vocab_size=100, limits=limits) as engine:
        async with get_limiter(str(limits.resource), limits).acquire():
            waiting = asyncio.create_task(engine.generate("1", [1], PARAMS, deadline=soon(60)))
            await asyncio.sleep(0.05)
            await engine.abort("1")
            assert (await waiting).finish is FinishType.ABORT
            started = time.monotonic()
            with pytest.raises(InfraFault):
                await engine.generate("2", [1], PARAMS, deadline=soon(0.2))
            assert time.monotonic() - started < 5
        assert (await engine.generate("3", [1], PARAMS, deadline=soon())).ids == [5, 2]


async def test_chat_server_reports_its_usage(resource: str) -> None:
    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "Hello"}
        usage = {"total_tokens": 12}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    limits = ResourceLimits(resource=resource, budget={"tokens": 130})
    messages = [Message(role="user", content="x" * 40)]
    async with serving(v1__chat__completions=chat) as url, OpenAIEngine(url, model="m", limits=limits) as engine:
        for n in range(2):
            reply = await engine.chat(str(n), messages, [], {"max_new_tokens": 100}, deadline=soon())
            assert reply.tokens == 12
        with pytest.raises(BudgetExhausted, match="106 tokens left, 110 needed"):
            await engine.chat("3", messages, [], {"max_new_tokens": 100}, deadline=soon())


def test_tokens_of_messages_are_estimated() -> None:
    messages = [
        Message(role="user", content="x" * 40),
        Message(role="user", content=[{"type": "text", "text": "abcd"}]),
    ]
    assert _estimate_tokens(messages, {"max_completion_tokens": 7}) == 11 + 7
    assert _estimate_tokens([Message(role="assistant")], {}) == 0


def test_invalid_limits_are_explained() -> None:
    with pytest.raises(ConfigError, match="limits: unknown key 'rmp'"):
        OpenAIEngine("http://127.0.0.1:1", model="m", limits={"rmp": 6})
