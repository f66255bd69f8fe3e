"""Admission queue and idempotency cache, as properties over any order of arrivals, completions and cancellations."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.server.api.admission import AdmissionQueue, DeadlineExceeded, QueueFull
from toolroll.sandbox.server.api.idempotency import IdempotencyCache

pytestmark = pytest.mark.virtual_time

STEPS = st.lists(
    st.one_of(
        st.just(("arrive", 0)),
        st.tuples(st.just("complete"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(capacity=st.integers(1, 4), max_waiting=st.integers(0, 5), steps=STEPS)
def test_queue_is_bounded_and_fifo(capacity: int, max_waiting: int, steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        queue = AdmissionQueue(capacity, max_waiting)
        running: dict[int, asyncio.Event] = {}
        admitted: list[int] = []
        tasks: dict[int, asyncio.Task[None]] = {}

        async def request(number: int) -> None:
            async with queue.admit(None):
                admitted.append(number)
                running[number] = asyncio.Event()
                try:
                    await running[number].wait()
                finally:
                    del running[number]

        async def settle() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        for number, (action, index) in enumerate(steps):
            waiting = [one for one in tasks if one not in admitted and not tasks[one].done()]
            if action == "arrive":
                is_full = len(running) == capacity and len(waiting) == max_waiting
                tasks[number] = asyncio.create_task(request(number))
                await settle()
                if is_full:
                    with pytest.raises(QueueFull) as rejection:
                        await tasks.pop(number)
                    assert 1 <= rejection.value.retry_after <= 60
            elif action == "complete" and running:
                list(running.values())[index % len(running)].set()
            elif action == "cancel" and tasks:
                pending = [task for task in tasks.values() if not task.done()]
                if pending:
                    pending[index % len(pending)].cancel()
            await settle()
            waiting = [one for one in tasks if one not in admitted and not tasks[one].done()]
            assert len(running) == queue.running <= capacity
            assert len(waiting) == queue.waiting <= max_waiting
            assert not waiting or len(running) == capacity
            assert admitted == sorted(admitted)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (queue.running, queue.waiting) == (0, 0)

    asyncio.run(play())


async def test_expired_request_is_not_admitted() -> None:
    queue = AdmissionQueue(1, 10)
    with pytest.raises(DeadlineExceeded, match=r"passed 5\.\d+ s ago"):
        async with queue.admit(time.time() - 5):
            raise AssertionError
    async with queue.admit(None):
        with pytest.raises(DeadlineExceeded):
            async with queue.admit(time.time() + 0.05):
                raise AssertionError
    assert (queue.running, queue.waiting) == (0, 0)


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
