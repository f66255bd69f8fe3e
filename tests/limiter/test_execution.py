"""Blocking functions under the limit: the original test plan, by name and for real."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import ray

from toolroll.limiter.execution import ExecutionPool, PoolMode, init_execution_pool
from toolroll.limiter.token_bucket import standing

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("cluster")]

WHO = """
import ray
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.token_bucket import find
ray.init(log_to_driver=False, logging_level="error", namespace={namespace!r})
with ClusterLimiter("singleton", 7).slot():
    print(find("singleton")._actor_id.hex(), ray.get(find("singleton").standing.remote())[0])
"""


def nap(seconds: float, number: int = 0) -> int:
    time.sleep(seconds)
    return number


def settled(resource: str) -> None:
    for _ in range(100):
        if standing(resource).in_use == 0:
            return
        time.sleep(0.05)
    pytest.fail(f"{standing(resource)}")


@pytest.fixture(params=list(PoolMode))
def mode(request: pytest.FixtureRequest) -> PoolMode:
    return PoolMode(request.param)


def test_basic_multi_process_init() -> None:
    """Processes of different jobs, in namespaces of their own, find one and the same limiter."""
    drivers = [
        subprocess.Popen([sys.executable, "-c", WHO.format(namespace=name)], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two", None)
    ]
    told = {driver.communicate(timeout=60)[0].strip() for driver in drivers}
    assert len(told) == 1
    assert told.pop().endswith(" 7")


class TestSingleNodeRateLimiterCase:
    async def test_six_calls_at_a_limit_of_three_take_two_rounds(self, mode: PoolMode) -> None:
        pool = init_execution_pool(6, rate_limit=3, mode=mode, resource=f"single {mode.name}")
        await pool.execute(nap, 0)
        began = time.monotonic()
        results = await asyncio.gather(*(pool.execute(nap, 3, number) for number in range(6)))
        assert results == list(range(6))
        assert 6 <= time.monotonic() - began < 10
        pool.close()


async def test_rotten_execution(mode: PoolMode) -> None:
    resource = f"rotten {mode.name}"
    pool = init_execution_pool(4, rate_limit=4, mode=mode, resource=resource)

    def work(number: int) -> int:
        if number == 7:
            raise ZeroDivisionError("rotten")
        return number

    results = await asyncio.gather(*(pool.execute(work, number) for number in range(20)), return_exceptions=True)
    assert type(results[7]) is ZeroDivisionError
    assert str(results[7]) == "rotten"
    assert [result for result in results if result is not results[7]] == [n for n in range(20) if n != 7]
    settled(resource)
    pool.close()


async def test_without_a_limit_the_workers_are_the_limit(mode: PoolMode) -> None:
    pool = init_execution_pool(8, enable_global_rate_limit=False, mode=mode)
    await asyncio.gather(*(pool.execute(nap, 0) for _ in range(8)))
    began = time.monotonic()
    await asyncio.gather(*(pool.execute(nap, 0.5) for _ in range(16)))
    assert 1.0 <= time.monotonic() - began < 6
    pool.close()


async def test_modes_differ_in_where_functions_run() -> None:
    def pids(pool: ExecutionPool) -> Any:
        return asyncio.gather(*(pool.execute(lambda: (time.sleep(0.3), os.getpid())[1]) for _ in range(4)))

    threads = init_execution_pool(4, enable_global_rate_limit=False)
    processes = init_execution_pool(4, enable_global_rate_limit=False, mode=PoolMode.ProcessMode)
    assert len(set(await pids(threads))) == 1
    assert len(set(await pids(processes))) == 4
    threads.close()
    processes.close()


async def test_a_cancelled_call_gives_its_slot_back() -> None:
    resource = "cancelled"
    pool = init_execution_pool(8, rate_limit=2, resource=resource)
    await pool.execute(nap, 0)
    calls = [asyncio.create_task(pool.execute(nap, 0.6)) for _ in range(6)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError | ray.exceptions.TaskCancelledError) for end in ends)
    settled(resource)
    began = time.monotonic()
    await asyncio.gather(*(pool.execute(nap, 0.1) for _ in range(2)))
    assert time.monotonic() - began < 5
    pool.close()
