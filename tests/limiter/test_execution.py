"""Execution pool: the cases of the original test plan, on a real Ray cluster."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import ray
from delays import max_overlap

from toolroll.limiter.execution import ExecutionPool, ExecutionWorker, PoolMode, init_execution_pool
from toolroll.limiter.token_bucket import find_token_bucket, limiter_status

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PRINT_ACTOR = """
import ray
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.token_bucket import find_token_bucket
ray.init(log_to_driver=False, logging_level="error", namespace={namespace!r})
with ClusterLimiter("singleton", 7).slot():
    worker = find_token_bucket("singleton")
    print(worker._actor_id.hex(), ray.get(worker.status.remote())[0])
"""


def nap(seconds: float) -> tuple[float, float]:
    """Sleep, and return the times of begin and end."""
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()


def wait_until_unused(resource: str) -> None:
    for _ in range(600):
        if limiter_status(resource).in_use == 0:
            return
        time.sleep(0.05)
    pytest.fail(f"{limiter_status(resource)}")


def test_crash_of_a_function_leaves_the_pool_usable(mode: PoolMode) -> None:
    pool = init_execution_pool(2, rate_limit=4, mode=mode, resource=f"crash, {mode}")
    try:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(pool.execute.remote(os._exit, 1), timeout=60)
        for _ in range(20):
            assert ray.get(pool.execute.remote(abs, -1), timeout=60) == 1
    finally:
        pool.close()


@pytest.fixture(params=list(PoolMode))
def mode(request: pytest.FixtureRequest) -> PoolMode:
    return PoolMode(request.param)


def test_basic_multi_process_init() -> None:
    """Processes of different jobs and namespaces find the same limiter."""
    drivers = [
        subprocess.Popen([sys.executable, "-c", PRINT_ACTOR.format(namespace=name)], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two", None)
    ]
    outputs = {driver.communicate(timeout=60)[0].strip() for driver in drivers}
    assert len(outputs) == 1
    assert outputs.pop().endswith(" 7")


class TestSingleNodeRateLimiterCase:
    async def test_three_of_six_calls_run_at_a_time(self, mode: PoolMode) -> None:
        pool = init_execution_pool(6, rate_limit=3, mode=mode, resource=f"single {mode.name}")
        await pool.execute(nap, 0)
        assert max_overlap(await asyncio.gather(*(pool.execute(nap, 2) for _ in range(6)))) == 3
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
    wait_until_unused(resource)
    pool.close()


async def test_without_limit_all_workers_are_used(mode: PoolMode) -> None:
    pool = init_execution_pool(8, enable_global_rate_limit=False, mode=mode)
    await asyncio.gather(*(pool.execute(nap, 0) for _ in range(8)))
    assert max_overlap(await asyncio.gather(*(pool.execute(nap, 2) for _ in range(16)))) == 8
    pool.close()


async def test_modes_use_threads_or_processes() -> None:
    def pids(pool: ExecutionPool) -> Any:
        return asyncio.gather(*(pool.execute(lambda: (time.sleep(2), os.getpid())[1]) for _ in range(4)))

    threads = init_execution_pool(4, enable_global_rate_limit=False)
    processes = init_execution_pool(4, enable_global_rate_limit=False, mode=PoolMode.ProcessMode)
    assert len(set(await pids(threads))) == 1
    assert len(set(await pids(processes))) == 4
    threads.close()
    processes.close()


async def test_cancelled_call_releases_its_slot() -> None:
    resource = "cancelled"
    pool = init_execution_pool(8, rate_limit=2, resource=resource)
    await pool.execute(nap, 0)
    calls = [asyncio.create_task(pool.execute(nap, 3)) for _ in range(6)]
    await asyncio.sleep(1)
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError | ray.exceptions.TaskCancelledError) for end in ends)
    wait_until_unused(resource)
    assert max_overlap(await asyncio.gather(*(pool.execute(nap, 2) for _ in range(2)))) == 2
    pool.close()


# The names of the original design.


class Interpreter:
    """A tool as in the original design: it sends its own method, and with it the pool, to the pool."""

    def __init__(self, pool: ExecutionPool) -> None:
        self.execution_pool = pool

    async def execute(self, code: str) -> str:
        return await self.execution_pool.execute.remote(self.execute_code, code, timeout=30)

    def execute_code(self, code: str, timeout: int) -> str:
        return f"{code} {timeout}"


async def test_remote_accepts_method_of_pool_owner(mode: PoolMode) -> None:
    pool = init_execution_pool(2, rate_limit=2, mode=mode, resource=f"remote {mode.name}")
    assert await Interpreter(pool).execute("code") == "code 30"
    assert ray.get([pool.execute.remote(abs, -number) for number in range(5)]) == [0, 1, 2, 3, 4]
    pool.close()


async def test_remote_raises_exception_of_function() -> None:
    pool = init_execution_pool(1, enable_global_rate_limit=False)
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.execute.remote(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        ray.get(pool.execute.remote(int, "x"))
    pool.close()


def test_remote_distributes_calls_over_workers() -> None:
    pool = init_execution_pool(4, enable_global_rate_limit=False, mode=PoolMode.ProcessMode)

    def busy_pid() -> int:
        time.sleep(1)
        return os.getpid()

    def wait_until_idle() -> None:
        """Wait until all ends are counted: Ray's thread counts them, possibly after `ray.get` has returned."""
        give_up = time.monotonic() + 60
        while any(pool.execute._load):
            assert time.monotonic() < give_up, pool.execute._load
            time.sleep(0.01)

    for _ in range(3):
        assert len(set(ray.get([pool.execute.remote(busy_pid) for _ in range(4)]))) == 4
        wait_until_idle()
        with pytest.raises(TypeError, match="serialize"):
            pool.execute.remote(threading.Lock().acquire)
        assert not any(pool.execute._load), "a call that was not sent counts"
        with pytest.raises(ValueError, match="invalid literal"):
            ray.get(pool.execute.remote(int, "x"))
        wait_until_idle()
    pool.close()


async def test_remote_call_can_be_cancelled() -> None:
    resource = "cancelled remote"
    pool = init_execution_pool(4, rate_limit=1, resource=resource)
    await pool.execute(nap, 0)
    first, second, third = (pool.execute.remote(nap, 1) for _ in range(3))
    await asyncio.sleep(0.3)
    ray.cancel(second)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        await second
    assert max_overlap([await first, await third]) == 1
    wait_until_unused(resource)
    pool.close()


def test_worker_with_original_arguments() -> None:
    worker: Any = ray.remote(ExecutionWorker).options(num_cpus=0, max_concurrency=6)
    limited = worker.remote(enable_global_rate_limit=True, rate_limit=3, resource="original worker")
    ray.get(limited.execute.remote(nap, 0))
    assert max_overlap(ray.get([limited.execute.remote(nap, 1) for _ in range(9)])) == 3
    unlimited = worker.remote(enable_global_rate_limit=False)
    ray.get(unlimited.execute.remote(nap, 0))
    assert max_overlap(ray.get([unlimited.execute.remote(nap, 1) for _ in range(9)])) == 6


async def test_current_count_is_number_of_slots_in_use() -> None:
    resource = "current count"
    pool = init_execution_pool(4, rate_limit=3, resource=resource)
    await pool.execute(nap, 0)
    bucket: Any = find_token_bucket(resource)
    calls = [pool.execute.remote(nap, 3) for _ in range(4)]
    counts = set()
    while len(ray.wait(calls, num_returns=4, timeout=0.1)[1]) > 1:
        counts.add(ray.get(bucket.get_current_count.remote()))
    assert max(counts) == 3
    ray.get(calls)
    wait_until_unused(resource)
    assert ray.get(bucket.get_current_count.remote()) == 0
    pool.close()
