"""The eleven faults of the original design: each is shown on it, and shown absent here."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import original_limiter as original
import pytest
import ray

from toolroll.errors import SlotTimeout
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.execution import init_execution_pool
from toolroll.limiter.limiter import LocalLimiter
from toolroll.limiter.token_bucket import find, set_limit, standing

pytestmark = pytest.mark.usefixtures("cluster")


class Theirs:
    """A process that uses the original limiter."""

    def __init__(self, name: str, limit: int) -> None:
        self.semaphore = original.semaphore(name, limit)
        ray.get(self.semaphore.current.remote())

    def take(self, count: int, patience: float) -> int:
        """How many slots it got, out of so many, in so much time. It keeps them."""
        asked = [self.semaphore.acquire.remote() for _ in range(count)]
        got, _ = ray.wait(asked, num_returns=count, timeout=patience)
        return len(got)

    def pid(self) -> int:
        return os.getpid()


class Ours:
    """The same, with ours. What it takes may last 0.3 s."""

    def __init__(self, name: str, limit: int) -> None:
        self.limiter = ClusterLimiter(name, limit)

    async def take(self, count: int, patience: float) -> int:
        async def one() -> bool:
            try:
                await self.limiter.slot(deadline=time.monotonic() + patience, hold=0.3).__aenter__()
            except SlotTimeout:
                return False
            return True

        return sum(await asyncio.gather(*(one() for _ in range(count))))

    async def pid(self) -> int:
        while not self.limiter.watched:
            await asyncio.sleep(0.05)
        return os.getpid()


class Process:
    """A process of either kind, from here."""

    def __init__(self, kind: type, name: str, limit: int) -> None:
        self._actor: Any = ray.remote(num_cpus=0)(kind).remote(name, limit)
        self.pid = ray.get(self._actor.pid.remote())

    def take(self, count: int, patience: float = 3.0) -> int:
        return int(ray.get(self._actor.take.remote(count, patience)))

    def take_in_the_background(self, count: int) -> None:
        self._actor.take.remote(count, 60.0)
        time.sleep(1.0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def test_1_slots_of_a_dead_process_come_back() -> None:
    keep: list[Any] = []

    def got_by_the_survivor(kind: type) -> int:
        name = f"one {kind.__name__}"
        if kind is Theirs:
            keep.append(original.semaphore(name, 4))  # made by a process that lives on
        victim, survivor = Process(kind, name, 4), Process(kind, name, 4)
        assert victim.take(4) == 4
        victim.kill()
        return survivor.take(4)

    assert got_by_the_survivor(Theirs) == 0
    assert got_by_the_survivor(Ours) == 4


def test_2_a_dead_process_in_the_queue_takes_nothing() -> None:
    def got_by_the_last(kind: type) -> int:
        name = f"two {kind.__name__}"
        first, victim, last = (Process(kind, name, 4) for _ in range(3))
        assert first.take(4) == 4
        victim.take_in_the_background(4)
        victim.kill()
        if kind is Theirs:
            for _ in range(4):
                ray.get(original.semaphore(name, 4).release.remote())
        else:
            first.kill()
        return last.take(4)

    assert got_by_the_last(Theirs) == 0
    assert got_by_the_last(Ours) == 4


async def test_3_cancelled_waiters_take_nothing_with_them() -> None:
    # Theirs: the release is registered before the acquire: a waiter that is interrupted gives back what it never had.
    semaphore = original.semaphore("three", 2)
    ray.get([semaphore.acquire.remote(), semaphore.acquire.remote()])
    ray.get([semaphore.release.remote() for _ in range(10)])
    assert Process(Theirs, "three", 2).take(10) == 10

    limiter = LocalLimiter(2)
    async with limiter.slot(), limiter.slot():
        waiting = [asyncio.create_task(limiter.slot().__aenter__()) for _ in range(10)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert (limiter.in_use, limiter.waiting) == (2, 0)
    assert limiter.in_use == 0


async def test_4_a_stray_release_adds_nothing() -> None:
    semaphore = original.semaphore("four", 1)
    ray.get(semaphore.release.remote())
    assert Process(Theirs, "four", 1).take(2) == 2

    limiter = LocalLimiter(1)
    slot = limiter.slot()
    async with slot:
        pass
    await slot.__aexit__(None, None, None)
    async with limiter.slot():
        with pytest.raises(SlotTimeout):
            await limiter.slot(deadline=time.monotonic() + 0.1).__aenter__()


async def test_5_a_cancelled_waiter_leaves_at_once_and_the_next_one_gets_the_slot() -> None:
    semaphore = original.semaphore("five", 1)
    ray.get(semaphore.acquire.remote())
    blocked = semaphore.acquire.remote()
    time.sleep(0.5)
    ray.cancel(blocked)
    ray.get(semaphore.release.remote())
    assert Process(Theirs, "five", 1).take(1) == 0, "the cancelled one has swallowed it"

    pool = init_execution_pool(4, rate_limit=1, resource="five of ours")
    await pool.execute(time.sleep, 0)
    first = asyncio.create_task(pool.execute(time.sleep, 1))
    await asyncio.sleep(0.3)
    second, third = (asyncio.create_task(pool.execute(time.sleep, 0)) for _ in range(2))
    await asyncio.sleep(0.2)
    second.cancel()
    await asyncio.wait_for(asyncio.gather(first, third), 5)
    pool.close()


async def test_6_what_a_function_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("seen")

    theirs: Any = ray.remote(num_cpus=0)(original.Worker).remote("six", 2)
    assert ray.get(theirs.execute.remote(fail)) is None

    pool = init_execution_pool(1, rate_limit=2, resource="six of ours")
    with pytest.raises(ValueError, match="seen"):
        await pool.execute(fail)
    pool.close()


def test_7_who_asks_for_another_limit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first, second = original.semaphore("seven", 2), original.semaphore("seven", 500)
    assert ray.get(second.current.remote()) == ray.get(first.current.remote()) == (0, 2), "and not a word said"

    caplog.set_level(logging.WARNING)
    with ClusterLimiter("seven of ours", 2).slot(hold=1):
        pass
    other = ClusterLimiter("seven of ours", 500)
    with other.slot(hold=1):
        pass
    told = "asked for a limit of 500, but the cluster's is 2, and that holds"
    until = time.monotonic() + 10  # it is said by the thread that carries the lease, a moment after it gives the slot
    while told not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    assert told in caplog.text
    assert "toolroll limiter set 'seven of ours' 500" in caplog.text
    set_limit("seven of ours", 500)
    for _ in range(100):
        if other.limit == 500:
            break
        time.sleep(0.05)
    assert other.limit == standing("seven of ours").limit == 500


def test_8_a_limiter_that_restarts_does_not_forget_who_is_in_flight() -> None:
    semaphore = original.semaphore(None, 4, max_restarts=-1)
    ray.get([semaphore.acquire.remote() for _ in range(4)])
    ray.kill(semaphore, no_restart=False)
    asked = [semaphore.acquire.remote() for _ in range(4)]
    assert len(ray.wait(asked, num_returns=4, timeout=20)[0]) == 4, "eight in flight at a limit of four"

    holder, other = Process(Ours, "eight", 4), Process(Ours, "eight", 4)
    assert holder.take(4) == 4
    ray.kill(find("eight"), no_restart=False)
    assert other.take(4, patience=5.0) == 0
    assert standing("eight").in_use == 4


CREATOR = """
import ray, sys
ray.init(log_to_driver=False, logging_level="error", namespace="of the creator")
{create}
"""


def run_creator(create: str) -> str:
    code = CREATOR.format(create=create)
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout


def test_9_the_limiter_outlives_the_process_that_made_it() -> None:
    run_creator("import original_limiter as o; ray.get(o.semaphore('nine', 4).current.remote())")
    with pytest.raises(ValueError, match="nine"):
        ray.get_actor("nine", "of the creator")

    run_creator(
        "from toolroll.limiter.cluster import ClusterLimiter; ClusterLimiter('nine', 4).slot(hold=1).__enter__()"
    )
    assert standing("nine").limit == 4


def test_10_two_jobs_have_one_limit() -> None:
    mine = original.semaphore("ten", 2)
    told = run_creator("import original_limiter as o; print(ray.get(o.semaphore('ten', 4).current.remote()))")
    assert told.strip() == "(0, 4)", "a limiter of its own"
    assert ray.get(mine.current.remote()) == (0, 2)

    with ClusterLimiter("ten of ours", 2).slot(hold=1):
        run_creator("from toolroll.limiter.token_bucket import standing; assert standing('ten of ours').limit == 2")


async def test_11_more_than_a_thousand_may_wait() -> None:
    theirs: Any = ray.remote(original.AsyncSemaphore).options(num_cpus=0).remote(1)
    ray.get(theirs.acquire.remote())
    waiting = [theirs.acquire.remote() for _ in range(1001)]
    released = theirs.release.remote()
    assert not ray.wait([released], timeout=3)[0], "the release waits behind those who wait for it"
    ray.kill(theirs)
    del waiting

    limiter = ClusterLimiter("eleven", 1)
    served = 0

    async def one() -> None:
        nonlocal served
        async with limiter.slot(hold=1):
            served += 1

    async with limiter.slot(hold=30):
        tasks = [asyncio.create_task(one()) for _ in range(5000)]
        await asyncio.sleep(0.5)
        assert limiter.waiting == 5000
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert served == 5000


def test_threads_wait_as_coroutines_do() -> None:
    """Beside the eleven: blocking code in threads, through the same limiter."""
    limiter = ClusterLimiter("threads", 3)
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with limiter.slot(deadline=time.monotonic() + 30, hold=1):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 3
    assert limiter.in_use == 0
