"""Functions with `limited`, and `charge`."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from toolroll import BudgetExhausted, ConfigError, ResourceLimits, SlotTimeout, charge, get_limiter, limited
from toolroll.limiter.limited import (
    LimitedUse,
    blocks_for_slot,
    call_in_thread,
    declared_limits,
    limits_of,
    within_deadline,
)


@pytest.fixture
def resource() -> str:
    """Return the name of a resource that no other test uses."""
    return f"resource-{uuid4().hex}"


class Concurrency:
    """Counts concurrent calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.max = 0

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.max = max(self.max, self.now)

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self.now -= 1


async def test_async_calls_are_limited(resource: str) -> None:
    calls = Concurrency()

    @limited(resource=resource, limit=3)
    async def work(number: int) -> int:
        with calls:
            await asyncio.sleep(0.01)
            return number

    assert await asyncio.gather(*map(work, range(12))) == list(range(12))
    assert calls.max == 3


def test_sync_calls_are_limited(resource: str) -> None:
    calls = Concurrency()

    @limited(ResourceLimits(limit=2), resource=resource)
    def work(number: int) -> int:
        with calls:
            time.sleep(0.01)
            return number

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(16))) == list(range(16))
    assert calls.max == 2


async def test_sync_call_in_event_loop_is_refused(resource: str) -> None:
    @limited(resource=resource, limit=1)
    def work() -> int:
        return 1

    with pytest.raises(RuntimeError, match="block the event loop"):
        work()
    assert await asyncio.to_thread(work) == 1


def test_default_resource_is_the_name_of_the_function() -> None:
    @limited(limit=1)
    def named_after_this_function(a: int, b: int) -> int:
        return a + b

    limits = limits_of(partial(named_after_this_function, b=2))
    assert limits is not None
    assert limits.resource == "named_after_this_function"
    assert declared_limits()["named_after_this_function"] == limits
    assert blocks_for_slot(partial(named_after_this_function, b=2))
    assert not blocks_for_slot(len)
    assert named_after_this_function.__name__ == "named_after_this_function"


def test_declared_limits_are_those_with_limits(resource: str) -> None:
    limited(resource=resource, budget={"usd": 20})(len)
    limited(resource=resource)(len)
    assert declared_limits()[resource].budget == {"usd": 20}


@pytest.mark.parametrize("decorated", [lambda: (yield 1), 5])
def test_only_functions_can_be_limited(decorated: Any) -> None:
    with pytest.raises(ConfigError, match="not a generator"):
        limited(limit=1)(decorated)


def test_invalid_limits_are_explained() -> None:
    with pytest.raises(ConfigError, match="rmp"):
        limited(rmp=6)
    with pytest.raises(ConfigError, match="Write @limited"):
        limited(len)  # type: ignore[arg-type]


async def test_charge_corrects_the_cost(resource: str) -> None:
    @limited(resource=resource, budget={"usd": 10}, cost={"usd": 4})
    async def work(price: float) -> None:
        charge(usd=price)

    for _ in range(13):
        await work(0.5)
    with pytest.raises(BudgetExhausted) as caught:
        await work(0.5)  # 3.5 usd are left, but the call may cost 4
    assert (caught.value.resource, caught.value.unit) == (resource, "usd")


async def test_charge_reaches_the_call_that_limits_the_unit(resource: str) -> None:
    @limited(resource=f"{resource}-inner", limit=8)
    async def inner() -> None:
        charge(usd=0, calls=0)

    @limited(resource=resource, budget={"usd": 2, "calls": 1}, cost={"usd": 2})
    async def outer() -> None:
        await inner()

    for _ in range(3):
        await outer()


def test_charge_outside_of_limited_calls_does_nothing() -> None:
    charge(tokens=5, usd=1)


async def test_wait_ends_by_the_surrounding_deadline(resource: str) -> None:
    limits = ResourceLimits(resource=resource, limit=1)
    async with LimitedUse(limits, ""):
        started = time.monotonic()
        with within_deadline(started + 0.1), within_deadline(started + 60), pytest.raises(SlotTimeout):
            await LimitedUse(limits, "").__aenter__()
        assert time.monotonic() - started < 5


async def test_cancelled_wait_leaves_no_slot_in_use(resource: str) -> None:
    limits = ResourceLimits(resource=resource, limit=1)
    async with LimitedUse(limits, ""):
        waiting = asyncio.create_task(LimitedUse(limits, "").__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert get_limiter(str(limits.resource), limits).in_use == 0


@pytest.mark.parametrize("has_started", [True, False])
async def test_slot_is_kept_while_a_thread_works(resource: str, has_started: bool) -> None:
    limits = ResourceLimits(resource=resource, limit=1)
    limiter, may_end = get_limiter(str(limits.resource), limits), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        if not has_started:
            pool.submit(may_end.wait)

        async def call() -> None:
            async with LimitedUse(limits, ""):
                await call_in_thread(pool, may_end.wait)

        task = asyncio.create_task(call())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert limiter.in_use == has_started
        may_end.set()
    assert limiter.in_use == 0


async def test_charge_works_in_a_thread(resource: str) -> None:
    limits = ResourceLimits(resource=resource, budget={"tokens": 100}, cost={"tokens": 60})
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            async with LimitedUse(limits, ""):
                await call_in_thread(pool, partial(charge, tokens=1))


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_cancelled_sync_calls_do_no_work(resource: str, is_waiting: bool) -> None:
    limits = ResourceLimits(resource=resource, limit=1, budget={"usd": 10}, cost={"usd": 1})
    limiter, may_continue = get_limiter(resource, limits), threading.Event()
    started, worked = list[int](), list[int]()

    @limited(limits)
    def work(number: int) -> None:
        worked.append(number)

    def start(number: int) -> None:
        started.append(number)
        if not is_waiting:
            may_continue.wait()
        work(number)

    with ThreadPoolExecutor(5) as pool:
        async with limiter.acquire({"usd": 1}), asyncio.timeout(10):
            tasks = [asyncio.create_task(call_in_thread(pool, partial(start, number))) for number in range(5)]
            while len(started) < 5 or limiter.waiting < 5 * is_waiting:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while limiter.waiting:  # they leave the queue before a slot becomes free
                await asyncio.sleep(0.01)
        may_continue.set()
    assert worked == []
    assert limiter.in_use == 0
    assert limiter.spent == {"usd": 1.0}


def test_declared_limits_apply_to_functions_that_name_the_resource(resource: str) -> None:
    @limited(resource=resource)
    def early() -> int:
        return get_limiter(resource, ResourceLimits()).limit

    with pytest.raises(ConfigError, match=f"No limits are declared for '{resource}'. Import the module"):
        early()
    limited(resource=resource, limit=3, budget={"usd": 1}, cost={"usd": 0.4})(len)
    assert [early(), early()] == [3, 3]
    with pytest.raises(BudgetExhausted, match=r"0\.2 usd left, 0\.4 needed"):
        early()
    limited(resource=resource, cost={"usd": 0.2})(lambda: None)()


def test_limits_are_declared_once(resource: str) -> None:
    limited(resource=resource, limit=3)(len)
    limited(resource=resource, limit=3, cost={"usd": 1})(abs)
    limited(resource=resource, limit=4)(len)  # the same function, e.g. after a reload
    with pytest.raises(ConfigError) as caught:
        limited(resource=resource, limit=5, rpm=60)(abs)
    assert str(caught.value) == (
        f"Different limits of '{resource}': builtins.len has limit=4, builtins.abs limit=5, 60 requests per minute. "
        f"Declare the limits once; elsewhere write `@limited(resource='{resource}')`."
    )
    assert declared_limits()[resource].limit == 4


def test_function_uses_the_limits_that_a_tool_has(resource: str) -> None:
    limits = ResourceLimits(resource=resource, limit=3)
    with LimitedUse(limits, ""):
        assert limited(resource=resource)(len)("ab") == 2


def test_charge_reaches_declared_units(resource: str) -> None:
    @limited(resource=resource)
    def named() -> None:
        with LimitedUse(ResourceLimits(limit=2), f"{resource}-inner"):
            charge(usd=0.1)

    limited(resource=resource, budget={"usd": 2}, cost={"usd": 1})(len)
    for _ in range(10):
        named()
