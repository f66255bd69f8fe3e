"""Adaptive limits, rates and budgets of a single process, through the public API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from toolroll import BudgetExhausted, ResourceLimits, SlotTimeout, get_limiter
from toolroll.limiter.budget_file import BudgetFile
from toolroll.limiter.leased_limiter import LocalLedgerLimiter
from toolroll.limiter.ledger.service import LedgerService
from toolroll.limiter.limiter import LocalLimiter

MakeLimiter = Callable[..., LocalLedgerLimiter]
MakeProcesses = Callable[..., list[LocalLedgerLimiter]]


class ServiceError(Exception):
    """An exception like those of HTTP clients."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


@pytest.fixture
def make_limiter() -> Iterator[MakeLimiter]:
    made: list[LocalLedgerLimiter] = []

    def make(**limits: object) -> LocalLedgerLimiter:
        made.append(LocalLedgerLimiter("service", ResourceLimits.model_validate(limits).policy()))
        return made[-1]

    yield make
    for limiter in made:
        limiter.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def try_to_use(limiter: LocalLedgerLimiter) -> bool:
    try:
        async with limiter.acquire():
            await asyncio.sleep(0)
    except BudgetExhausted:
        return False
    return True


async def test_budget_is_spent_exactly(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(budget={"calls": 20})
    outcomes = await asyncio.gather(*(try_to_use(limiter) for _ in range(50)))
    assert sum(outcomes) == 20
    assert limiter.spent == {"requests": 20.0}
    with pytest.raises(BudgetExhausted, match="0 requests left, 1 needed") as refused:
        await limiter.acquire().acquire()
    assert (refused.value.resource, refused.value.unit) == ("service", "requests")


@pytest.mark.parametrize("number", [np.int64, np.float32, Decimal, Fraction])
async def test_costs_of_other_number_types_are_saved(number: Callable[[int], float], tmp_path: Path) -> None:
    resource, limits = f"numbers {number}", ResourceLimits.model_validate({"limit": 1, "budget": {"tokens": 1000}})
    budgets = BudgetFile(tmp_path)
    budgets.restore({resource: limits})
    for _ in range(5):
        cost = {"tokens": number(100)}
        async with get_limiter(resource, limits).acquire(cost=cost, deadline=time.monotonic() + 10) as slot:
            slot.correct(tokens=number(90))
    budgets.close()
    assert json.loads((tmp_path / "budgets.json").read_text()) == {resource: {"tokens": 450}}


async def test_overspent_budget_refuses_work(make_limiter: MakeLimiter) -> None:
    """The cost of ten uses is known only when all of them run."""
    limiter = make_limiter(budget={"usd": 1})
    slots = [limiter.acquire() for _ in range(10)]
    for slot in slots:
        await slot.acquire()
    for slot in slots:
        slot.correct(usd=0.3)
        slot.release()
    with pytest.raises(BudgetExhausted, match="0 usd left"):
        async with asyncio.timeout(5), limiter.acquire():
            pass
    limiter.set_limit(budgets={"usd": 10})
    async with asyncio.timeout(5):
        while not await try_to_use(limiter):  # until the new budget is known
            await asyncio.sleep(0.01)
    assert limiter.spent == {"usd": pytest.approx(3.0)}


async def test_cancelled_waiter_spends_nothing(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(limit=1, budget={"calls": 100})
    for _ in range(20):
        slot, waiter = limiter.acquire(), limiter.acquire()
        await slot.acquire()
        waiting = asyncio.create_task(waiter.acquire())
        await asyncio.sleep(0)
        slot.release()  # grants the slot to the waiter
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert limiter.in_use == 0
    assert limiter.spent == {"requests": 20.0}


@pytest.mark.parametrize("error", [ServiceError(429), ServiceError(503), TimeoutError(), ConnectionResetError()])
async def test_exception_is_a_rejection(make_limiter: MakeLimiter, error: Exception) -> None:
    limiter = make_limiter(limit={"min": 1, "max": 8})
    with pytest.raises(type(error)):
        async with limiter.acquire():
            raise error
    await wait_for(lambda: limiter.status().rejected == 1)


@pytest.mark.parametrize("error", [ServiceError(404), ValueError()])
async def test_other_exception_tells_nothing(make_limiter: MakeLimiter, error: Exception) -> None:
    limiter = make_limiter(limit={"min": 1, "max": 8})
    with pytest.raises(type(error)):
        async with limiter.acquire():
            raise error
    async with limiter.acquire():
        pass
    await wait_for(lambda: limiter.status().in_use == 0)
    assert limiter.status().rejected == 0


async def test_timeout_of_the_caller_is_a_rejection(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(limit={"min": 1, "max": 8})
    async with limiter.acquire():
        pass
    deadline = time.monotonic() + 0.5  # the clock of the event loop
    with pytest.raises(TimeoutError):
        async with asyncio.timeout_at(deadline), limiter.acquire(deadline=deadline):
            await asyncio.sleep(10)
    await wait_for(lambda: limiter.status().rejected == 1)


async def test_service_that_rejects_everything_gets_few_requests(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(limit={"min": 4, "max": 64})
    sent, is_down = 0, True

    async def use() -> None:
        nonlocal sent
        async with limiter.acquire() as slot:
            sent += 1
            if is_down:
                slot.reject()

    async def use_often() -> None:
        while True:
            await use()

    tasks = [asyncio.create_task(use_often()) for _ in range(20)]
    await wait_for(lambda: "everything is rejected" in limiter.status().reason)
    before = sent
    await asyncio.sleep(3.0)
    assert sent - before <= 4
    is_down = False
    before = sent
    await wait_for(lambda: sent > before + 100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_rate_bounds_a_burst(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(rates={"requests": 20})
    started = time.monotonic()
    for _ in range(30):
        async with limiter.acquire():
            pass
    assert time.monotonic() - started >= (30 - 0.4 * 20 - 1) / 20


async def test_work_beyond_a_rate_times_out(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(rpm=6)
    async with limiter.acquire():
        pass
    with pytest.raises(
        SlotTimeout, match=r"requests left of its rate, 1 needed; 0 in use and 1 waiting.* Raise the rate"
    ):
        await limiter.acquire(deadline=time.monotonic() + 0.2).acquire()


async def test_calls_are_requests(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(budget={"calls": 20})
    async with limiter.acquire(cost={"calls": 5}) as slot:
        slot.correct(calls=3)
    assert limiter.spent == {"requests": 3.0}


async def test_refund_of_a_long_use_is_available(make_limiter: MakeLimiter) -> None:
    limiter = make_limiter(rates={"tokens": 100})
    for _ in range(3):
        async with asyncio.timeout(5), limiter.acquire(cost={"tokens": 1000}) as slot:
            await asyncio.sleep(1.2)  # until the credit has expired
            slot.correct(tokens=10)


async def test_release_while_waiting_does_nothing() -> None:
    limiter = LocalLimiter(1)
    first, second = limiter.slot(), limiter.slot()
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0)
    second.release()
    first.release()
    await waiting
    assert limiter.in_use == 1
    second.release()
    assert limiter.in_use == 0


@pytest.fixture
def make_processes(make_limiter: MakeLimiter) -> MakeProcesses:
    """Return a function that returns limiters which share a ledger, like those of several processes."""

    class SharingLimiter(LocalLedgerLimiter):
        def __init__(self, owner: LocalLedgerLimiter) -> None:
            self._owner = owner
            super().__init__(owner.resource, owner._policy)

        def _get_service(self) -> LedgerService:
            return self._owner._get_service()

    def make(count: int, **limits: object) -> list[LocalLedgerLimiter]:
        owner = make_limiter(**limits)
        return [owner, *(SharingLimiter(owner) for _ in range(count - 1))]

    return make


async def test_refund_is_available_to_other_processes(make_processes: MakeProcesses) -> None:
    one, other = make_processes(2, budget={"usd": 1})
    async with one.acquire({"usd": 0.8}) as slot:
        async with other.acquire({"usd": 0.1}):
            pass
        slot.correct(usd=0.1)
    await asyncio.sleep(0.2)
    async with asyncio.timeout(1.5), other.acquire({"usd": 0.4}):  # less than the renewal interval
        pass
    with pytest.raises(BudgetExhausted, match=r"0\.4 usd left"):
        await other.acquire({"usd": 0.5}).acquire()


async def test_spent_budget_refuses_without_many_reports(
    make_processes: MakeProcesses,
) -> None:
    limiter, _ = make_processes(2, budget={"calls": 5})
    for _ in range(5):
        assert await try_to_use(limiter)
    before, started = limiter.reports_sent, time.monotonic()
    for _ in range(1000):
        assert not await try_to_use(limiter)
    intervals = (time.monotonic() - started) / 0.05
    assert limiter.reports_sent - before <= 2 * (intervals + 2)


async def test_abandoned_expensive_use_does_not_delay_others(
    make_processes: MakeProcesses,
) -> None:
    """The ledger saves up the credit of a rate for the first waiter of one process."""
    one, other = make_processes(2, rates={"tokens": 1000})
    for limiter in (one, other):
        async with limiter.acquire({"tokens": 200}):
            pass
    with pytest.raises(SlotTimeout):
        await one.acquire({"tokens": 20_000}, deadline=time.monotonic() + 0.2).acquire()
    started = time.monotonic()
    async with other.acquire({"tokens": 10}):
        assert time.monotonic() - started < 1.0  # less than the renewal interval
