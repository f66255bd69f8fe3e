"""Responses that are made once and cached by idempotency key."""

import asyncio

import pytest

from toolroll.sandbox.server.api.idempotency import IdempotencyCache

pytestmark = pytest.mark.virtual_time


async def test_response_is_made_once_and_cached() -> None:
    cache, calls = IdempotencyCache(), []

    async def respond() -> bytes:
        calls.append(1)
        await asyncio.sleep(0.01)
        return b"response"

    assert await asyncio.gather(*(cache.get("a", respond, finish=False) for _ in range(5))) == [b"response"] * 5
    assert await cache.get("a", respond, finish=False) == b"response"
    assert len(calls) == 1
    assert await cache.get("b", respond, finish=False) == b"response"
    assert len(calls) == 2


async def test_failure_is_not_cached() -> None:
    cache = IdempotencyCache()

    async def fail() -> bytes:
        raise ValueError("odd")

    async def succeed() -> bytes:
        return b"now"

    with pytest.raises(ValueError, match="odd"):
        await cache.get("a", fail, finish=False)
    assert await cache.get("a", succeed, finish=False) == b"now"


@pytest.mark.parametrize("finish", [True, False])
async def test_abandoned_request_runs_on_only_with_finish(finish: bool) -> None:
    cache, completed = IdempotencyCache(), []

    async def respond() -> bytes:
        await asyncio.sleep(0.05)
        completed.append(1)
        return b"response"

    caller = asyncio.create_task(cache.get("a", respond, finish=finish))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.sleep(0.1)
    assert len(completed) == finish


async def test_cache_evicts_oldest_over_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.sandbox.server.api.idempotency.MAX_CACHED_BYTES", 1000)
    cache, calls = IdempotencyCache(), 0

    async def respond() -> bytes:
        nonlocal calls
        calls += 1
        return b"x" * 100

    for number in range(50):
        await cache.get(str(number), respond, finish=False)
    await cache.get("49", respond, finish=False)
    assert calls == 50
    await cache.get("0", respond, finish=False)
    assert calls == 51
    assert cache._cached_bytes <= 1000
