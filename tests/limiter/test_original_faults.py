"""Eleven faults of the original design, each reproduced with it and shown to be absent in toolroll."""

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
from ray.exceptions import RayError

from toolroll.errors import SlotTimeout
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.execution import init_execution_pool
from toolroll.limiter.limiter import LocalLimiter
from toolroll.limiter.token_bucket import find_token_bucket, limiter_status, set_limit

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Theirs:
    """A process that uses the original limiter."""

    def __init__(self, name: str, limit: int) -> None:
        self.semaphore = original.semaphore(name, limit)
        ray.get(self.semaphore.current.remote())

    def take(self, count: int, patience: float) -> int:
        """Acquire up to `count` slots within `patience` seconds without releasing them. Return their number."""
        asked = [self.semaphore.acquire.remote() for _ in range(count)]
        got, _ = ray.wait(asked, num_returns=count, timeout=patience)
        return len(got)

    def pid(self) -> int:
        return os.getpid()


class Ours:
    """A process that uses toolroll's limiter, with `hold=0.3`."""

    def __init__(self, name: str, limit: int) -> None:
        self.limiter = ClusterLimiter(name, limit)

    async def take(self, count: int, patience: float) -> int:
        async def one() -> bool:
            try:
                await self.limiter.slot(deadline=time.monotonic() + patience, hold=0.3).acquire()
            except SlotTimeout:
                return False
            return True

        return sum(await asyncio.gather(*(one() for _ in range(count))))

    async def pid(self) -> int:
        while not self.limiter.watched:
            await asyncio.sleep(0.05)
        return os.getpid()


class Process:
    """Handle of a process of either kind."""

    def __init__(self, kind: type, name: str, limit: int) -> None:
        self._actor: Any = ray.remote(num_cpus=0)(kind).remote(name, limit)
        self.pid = ray.get(self._actor.pid.remote())

    def take(self, count: int, timeout_s: float = 60.0) -> int:
        return int(ray.get(self._actor.take.remote(count, timeout_s)))

    def take_in_the_background(self, count: int) -> None:
        self._actor.take.remote(count, 60.0)
        time.sleep(1.0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def wait_until_limiter_answers(resource: str) -> None:
    for _ in range(600):
        try:
            limiter_status(resource)
        except RayError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the limiter of {resource} does not answer")


def test_01_slots_of_dead_process_return() -> None:
    keep: list[Any] = []

    def acquired_by_survivor(kind: type) -> int:
        name = f"one {kind.__name__}"
        if kind is Theirs:
            keep.append(original.semaphore(name, 4))  # created by a process that survives
        victim, survivor = Process(kind, name, 4), Process(kind, name, 4)
        assert victim.take(4) == 4
        victim.kill()
        return survivor.take(4, 3.0 if kind is Theirs else 60.0)

    assert acquired_by_survivor(Theirs) == 0
    assert acquired_by_survivor(Ours) == 4


def test_02_dead_waiter_takes_no_slot() -> None:
    def acquired_by_last(kind: type) -> int:
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
        return last.take(4, 3.0 if kind is Theirs else 60.0)

    assert acquired_by_last(Theirs) == 0
    assert acquired_by_last(Ours) == 4


async def test_03_cancelled_waiters_leave_count_unchanged() -> None:
    # The original registers the release before the acquire, so an interrupted waiter releases a slot it never had.
    semaphore = original.semaphore("three", 2)
    ray.get([semaphore.acquire.remote(), semaphore.acquire.remote()])
    ray.get([semaphore.release.remote() for _ in range(10)])
    assert Process(Theirs, "three", 2).take(10) == 10

    limiter = LocalLimiter(2)
    async with limiter.slot(), limiter.slot():
        waiting = [asyncio.create_task(limiter.slot().acquire()) for _ in range(10)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert (limiter.in_use, limiter.waiting) == (2, 0)
    assert limiter.in_use == 0


async def test_04_repeated_release_adds_no_slot() -> None:
    semaphore = original.semaphore("four", 1)
    ray.get(semaphore.release.remote())
    assert Process(Theirs, "four", 1).take(2) == 2

    limiter = LocalLimiter(1)
    slot = limiter.slot()
    async with slot:
        pass
    slot.release()
    async with limiter.slot():
        with pytest.raises(SlotTimeout):
            await limiter.slot(deadline=time.monotonic() + 0.1).acquire()


async def test_05_cancelled_waiter_leaves_queue_at_once() -> None:
    semaphore = original.semaphore("five", 1)
    ray.get(semaphore.acquire.remote())
    blocked = semaphore.acquire.remote()
    time.sleep(0.5)
    ray.cancel(blocked)
    ray.get(semaphore.release.remote())
    assert Process(Theirs, "five", 1).take(1, 3.0) == 0, "the cancelled waiter took the slot"

    pool = init_execution_pool(4, rate_limit=1, resource="five, toolroll")
    await pool.execute(time.sleep, 0)
    first = asyncio.create_task(pool.execute(time.sleep, 1))
    await asyncio.sleep(0.3)
    second, third = (asyncio.create_task(pool.execute(time.sleep, 0)) for _ in range(2))
    await asyncio.sleep(0.2)
    second.cancel()
    await asyncio.wait_for(asyncio.gather(first, third), 60)
    pool.close()


async def test_06_exception_of_function_is_raised() -> None:
    def fail() -> None:
        raise ValueError("seen")

    theirs: Any = ray.remote(num_cpus=0)(original.Worker).remote("six", 2)
    assert ray.get(theirs.execute.remote(fail)) is None

    pool = init_execution_pool(1, rate_limit=2, resource="six, toolroll")
    with pytest.raises(ValueError, match="seen"):
        await pool.execute(fail)
    pool.close()


def test_07_different_limit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, second = original.semaphore("seven", 2), original.semaphore("seven", 500)
    assert ray.get(second.current.remote()) == ray.get(first.current.remote()) == (0, 2), "ignored without a warning"

    caplog.set_level(logging.WARNING)
    with ClusterLimiter("seven, toolroll", 2).slot(hold=1):
        pass
    other = ClusterLimiter("seven, toolroll", 500)
    with other.slot(hold=1):
        pass
    warning = "limit=500 ignored: the cluster uses limit=2"
    deadline = time.monotonic() + 60  # the background thread logs it after it has granted the slot
    while warning not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert warning in caplog.text
    assert "toolroll limiter set 'seven, toolroll' 500" in caplog.text
    set_limit("seven, toolroll", 500)
    for _ in range(1000):
        if other.limit == 500:
            break
        time.sleep(0.05)
    assert other.limit == limiter_status("seven, toolroll").limit == 500


def test_08_restarted_limiter_keeps_slots_in_use() -> None:
    semaphore = original.semaphore(None, 4, max_restarts=-1)
    ray.get([semaphore.acquire.remote() for _ in range(4)])
    ray.kill(semaphore, no_restart=False)
    asked = [semaphore.acquire.remote() for _ in range(4)]
    assert len(ray.wait(asked, num_returns=4, timeout=60)[0]) == 4, "eight slots in use at a limit of four"

    holder, other = Process(Ours, "eight", 4), Process(Ours, "eight", 4)
    assert holder.take(4) == 4
    ray.kill(find_token_bucket("eight"), no_restart=False)
    wait_until_limiter_answers("eight")
    assert other.take(4, 5.0) == 0
    assert limiter_status("eight").in_use == 4


CREATOR = """
import ray, sys
ray.init(log_to_driver=False, logging_level="error", namespace="creator")
{create}
"""


def run_creator(create: str) -> str:
    code = CREATOR.format(create=create)
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout


def test_09_limiter_outlives_its_creator() -> None:
    run_creator("import original_limiter as o; ray.get(o.semaphore('nine', 4).current.remote())")
    with pytest.raises(ValueError, match="nine"):
        ray.get_actor("nine", "creator")

    run_creator(
        "from toolroll.limiter.cluster import ClusterLimiter; ClusterLimiter('nine', 4).slot(hold=1).acquire_blocking()"
    )
    assert limiter_status("nine").limit == 4


def test_10_two_jobs_share_one_limit() -> None:
    mine = original.semaphore("ten", 2)
    output = run_creator("import original_limiter as o; print(ray.get(o.semaphore('ten', 4).current.remote()))")
    assert output.strip() == "(0, 4)", "a separate limiter"
    assert ray.get(mine.current.remote()) == (0, 2)

    with ClusterLimiter("10, toolroll", 2).slot(hold=1):
        status = "from toolroll.limiter.token_bucket import limiter_status; print(limiter_status('10, toolroll').limit)"
        assert run_creator(status).strip() == "2"


async def test_11_more_than_a_thousand_waiters() -> None:
    theirs: Any = ray.remote(original.AsyncSemaphore).options(num_cpus=0).remote(1)
    ray.get(theirs.acquire.remote())
    waiting = [theirs.acquire.remote() for _ in range(1001)]
    released = theirs.release.remote()
    assert not ray.wait([released], timeout=3)[0], "the release is queued behind the waiters that need it"
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


def test_threads_share_the_queue() -> None:
    """Not one of the eleven: blocking code in threads uses the same limiter."""
    limiter = ClusterLimiter("threads", 3)
    running, highest, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, highest
        with limiter.slot(deadline=time.monotonic() + 30, hold=1):
            with lock:
                running += 1
                highest = max(highest, running)
            time.sleep(0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert highest == 3
    assert limiter.in_use == 0
