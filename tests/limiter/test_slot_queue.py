"""Slot queue: FIFO order, and no slot is lost or granted twice."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.errors import Fault, LimiterUnavailable, SlotTimeout, fault_of
from toolroll.limiter.ledger.lease import Lease, LeasedSlots
from toolroll.limiter.limiter import Limiter, LocalLimiter
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.slot_queue import LongestHold, SlotQueue


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_slots_are_granted_in_fifo_order() -> None:
    limiter, order = LocalLimiter(3), list[int]()

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await turns(number % 4)

    await asyncio.gather(*(one(number) for number in range(1000)))
    assert order == list(range(1000))
    assert (limiter.in_use, limiter.waiting) == (0, 0)


STEPS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(0, 10), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=scaled(300))
@given(
    limit=st.integers(1, 4), steps=STEPS, resizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4)
)
def test_cancellation_and_failure_lose_no_slot(
    limit: int, steps: list[tuple[int, int, int, bool]], resizes: list[tuple[int, int]]
) -> None:
    """Each step: turns before the request, turns of use, turns until cancellation (if < 8), whether it fails."""

    async def run() -> None:
        limiter = LocalLimiter(limit)
        running, max_limit, max_running = 0, limit, 0
        served: list[tuple[int, int]] = []
        requested: list[int] = []

        async def one(number: int, ask: int, hold: int, fails: bool) -> None:
            nonlocal running, max_running
            await turns(ask)
            requested.append(number)
            async with limiter.slot() as slot:
                served.append((slot.number, number))
                running += 1
                max_running = max(max_running, running)
                try:
                    await turns(hold)
                    if fails:
                        raise ValueError
                finally:
                    running -= 1

        async def cancel(task: "asyncio.Task[None]", after: int) -> None:
            await turns(after)
            task.cancel()

        async def resize() -> None:
            nonlocal max_limit
            for new, after in resizes:
                await turns(after)
                limiter.set_limit(new)
                max_limit = max(max_limit, new)
            await turns(30)
            limiter.set_limit(limit)

        tasks = [asyncio.create_task(one(n, ask, hold, fails)) for n, (ask, hold, _, fails) in enumerate(steps)]
        cancels = [cancel(task, after) for task, (_, _, after, _) in zip(tasks, steps, strict=True) if after < 8]
        await asyncio.gather(resize(), *cancels)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert max_running <= max_limit
        in_order = [number for _, number in sorted(served)]
        assert in_order == [number for number in requested if number in in_order], "overtaken"
        assert (limiter.in_use, limiter.waiting) == (0, 0)
        async with limiter.slot():
            assert limiter.in_use == 1

    asyncio.run(run())


async def test_slot_granted_to_cancelled_waiter_is_passed_on() -> None:
    limiter = LocalLimiter(1)
    got: list[str] = []

    async def one(name: str) -> None:
        async with limiter.slot():
            got.append(name)

    first = limiter.slot()
    await first.acquire()
    second, third = asyncio.create_task(one("second")), asyncio.create_task(one("third"))
    await turns(3)
    first.release()  # grants the slot to the second task
    second.cancel()
    await asyncio.wait([second, third])
    assert got == ["third"]
    assert limiter.in_use == 0


async def test_acquired_slot_cannot_be_acquired_again() -> None:
    limiter = LocalLimiter(1)
    slot = limiter.slot()
    await slot.acquire()
    with pytest.raises(RuntimeError, match="already acquired"):
        await slot.acquire()
    slot.release()
    slot.release()
    async with slot:
        assert limiter.in_use == 1
    assert limiter.in_use == 0


async def test_timeout_reports_use_and_waiters() -> None:
    limiter = LocalLimiter(1, "http://sandbox")
    async with limiter.slot():
        with pytest.raises(SlotTimeout, match=r"http://sandbox.*1 in use and 1 waiting") as caught:
            async with limiter.slot(deadline=time.monotonic() + 0.05):
                pytest.fail("two slots in use at a limit of one")
        with pytest.raises(SlotTimeout, match="has already passed"):
            async with limiter.slot(deadline=time.monotonic() - 1):
                pytest.fail("started after its deadline")
        assert limiter.waiting == 0
    assert fault_of(caught.value) is Fault.INFRA
    async with limiter.slot(deadline=time.monotonic() + 5) as slot:
        assert slot.waited == 0.0


def test_threads_and_event_loops_share_one_queue() -> None:
    limiter = LocalLimiter(4)
    lock, running, max_running, served = threading.Lock(), 0, 0, 0

    def work() -> None:
        nonlocal running, max_running, served
        with lock:
            running += 1
            max_running = max(max_running, running)
        time.sleep(0.002)
        with lock:
            running -= 1
            served += 1

    def blocking() -> None:
        for _ in range(10):
            with limiter.slot(deadline=time.monotonic() + 30):
                work()

    async def one() -> None:
        async with limiter.slot():
            await asyncio.to_thread(work)

    async def many() -> None:
        await asyncio.gather(*(one() for _ in range(50)))

    with ThreadPoolExecutor(24) as pool:
        jobs = [pool.submit(blocking) for _ in range(16)] + [pool.submit(asyncio.run, many()) for _ in range(4)]
        for job in jobs:
            job.result(timeout=60)
    assert (max_running, served, limiter.in_use, limiter.waiting) == (4, 360, 0, 0)


def test_waiter_of_closed_event_loop_takes_no_slot() -> None:
    limiter = LocalLimiter(1)
    loop = asyncio.new_event_loop()
    with limiter.slot():
        waiting = loop.create_task(limiter.slot().acquire())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert limiter.waiting == 1
        with ThreadPoolExecutor(2) as pool:
            next_slot = limiter.slot(deadline=time.monotonic() + 10)
            acquired = pool.submit(next_slot.acquire_blocking)
            while limiter.waiting < 2:
                time.sleep(0.01)
            pool.submit(limiter.set_limit, 2)
            acquired.result(timeout=10)
            assert next_slot.number
    assert waiting.cancelled() or not waiting.done()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_similar_deadlines_are_announced_once(leased: "tuple[SlotQueue, Limiter]") -> None:
    queue, limiter = leased
    first = asyncio.create_task(limiter.slot(deadline=time.monotonic() + 30).acquire())
    await turns(2)
    lease(queue, 1000)
    await first
    queue.on_waiting = lambda: pytest.fail("announced again")
    for _ in range(500):
        async with limiter.slot(deadline=time.monotonic() + 30.01):
            pass


def test_timeout_in_thread() -> None:
    limiter = LocalLimiter(1)
    with limiter.slot(), pytest.raises(SlotTimeout), limiter.slot(deadline=time.monotonic() + 0.05):
        pytest.fail("two slots in use at a limit of one")
    assert limiter.in_use == 0


@pytest.fixture
def leased() -> tuple[SlotQueue, Limiter]:
    queue = SlotQueue("shared", LeasedSlots("me"))
    return queue, Limiter(queue)


def lease(queue: SlotQueue, capacity: int, ttl: float = 10.0, *, contended: bool = False) -> None:
    report = queue.report()
    assert queue.apply(Lease(report.seq, capacity, ttl, contended, 0.05, 8, 1))


async def test_expired_lease_grants_no_slot(leased: tuple[SlotQueue, Limiter]) -> None:
    queue, limiter = leased
    with pytest.raises(LimiterUnavailable, match="toolroll limiter status"):
        async with limiter.slot(deadline=time.monotonic() + 0.05):
            pytest.fail("started without a lease")
    lease(queue, 2, ttl=0.1)
    async with limiter.slot(deadline=time.monotonic() + 0.05):
        pass
    await asyncio.sleep(0.1)
    with pytest.raises(LimiterUnavailable):
        async with limiter.slot(deadline=time.monotonic() + 0.05):
            pytest.fail("started after the lease expired")
    assert limiter.limit == 8


async def test_timeout_names_the_open_circuit_breaker(leased: tuple[SlotQueue, Limiter]) -> None:
    queue, limiter = leased
    queue.apply(Lease(queue.report().seq, 0, 10.0, True, 0.05, 8, 1, is_probe=True))
    with pytest.raises(SlotTimeout, match=r"all requests are rejected.* 0 in use and 1 waiting"):
        async with limiter.slot(deadline=time.monotonic() + 0.05):
            pytest.fail("started without a slot")


async def test_longer_hold_waits_for_confirmation(leased: tuple[SlotQueue, Limiter]) -> None:
    queue, limiter = leased
    calls: list[float] = []
    queue.on_waiting = lambda: calls.append(time.monotonic())

    async def work(hold: float) -> None:
        async with limiter.slot(hold=hold):
            pass

    short = asyncio.create_task(work(1.0))
    await turns(2)
    lease(queue, 4)
    await short
    assert len(calls) == 1
    await work(1.0)
    assert len(calls) == 1, "the same hold needs no announcement"
    long = asyncio.create_task(work(5.0))
    await turns(2)
    assert len(calls) == 2
    assert queue.should_report
    report = queue.report()
    assert 5.0 <= report.hold < 6.0
    assert not queue.should_report, "the hold is announced"
    assert not long.done()
    queue.apply(Lease(report.seq, 4, 10.0, False, 0.05, 8, 1))
    await long


async def test_shrinking_lease_keeps_slots_in_use(leased: tuple[SlotQueue, Limiter]) -> None:
    queue, limiter = leased
    waiting = [asyncio.create_task(hold_until(limiter, event := asyncio.Event())) for _ in range(1)]
    await turns(2)
    lease(queue, 3, contended=True)
    await turns(2)
    more = [asyncio.create_task(hold_until(limiter, event)) for _ in range(4)]
    await turns(2)
    assert (queue.in_use, queue.waiting) == (3, 2)
    lease(queue, 1, contended=True)
    await turns(2)
    assert (queue.in_use, queue.waiting) == (3, 2)
    event.set()
    await asyncio.gather(*waiting, *more)
    assert queue.should_report, "reduced demand is reported while slots are contended"


async def hold_until(limiter: Limiter, event: asyncio.Event) -> None:
    async with limiter.slot(hold=1.0):
        await event.wait()


def test_longest_hold_is_forgotten_after_two_windows() -> None:
    longest = LongestHold()
    longest.add(30.0, 0.0)
    longest.add(2.0, 50.0)
    assert longest.get(59.0) == 30.0
    assert longest.get(100.0) == 30.0
    assert longest.get(200.0) == 0.0 or longest.get(200.0) == 2.0


ALONE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from toolroll.limiter.limiter import LocalLimiter
from toolroll.limiter.registry import get_limiter
limiter = get_limiter("a sandbox", 5)
assert isinstance(limiter, LocalLimiter) and limiter.limit == 5
assert get_limiter("a sandbox", 5) is limiter
assert "ray" not in sys.modules
"""


@pytest.mark.process
def test_process_without_ray_has_local_limit() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "limit=5 applies to this process only" in done.stderr


def test_different_limit_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    first = get_limiter("requested twice", 2)
    assert get_limiter("requested twice", 64) is first
    get_limiter("requested twice", 64)
    assert caplog.text.count("limit=64 ignored: this process already uses limit=2") == 1


def test_limit_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LocalLimiter(0)


async def test_20_000_waiters_are_served_in_order() -> None:
    limiter, order = LocalLimiter(8), list[int]()

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(20_000)))
    assert order == list(range(20_000))


FORKED = """
import asyncio, multiprocessing
from toolroll.limiter.registry import get_limiter

def child(answers):
    limiter = get_limiter("a sandbox", 1)
    with limiter.slot():
        answers.put(limiter.in_use)

with get_limiter("a sandbox", 1).slot():
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=child, args=[answers])
    process.start()
    assert answers.get(timeout=20) == 1
    process.join()
"""


CONNECTED = """
import multiprocessing, types, sys
sys.modules["ray"] = types.SimpleNamespace(is_initialized=lambda: True)  # as in a fork of a connected process
from toolroll.limiter.limiter import LocalLimiter
from toolroll.limiter.registry import get_limiter

def child(answers):
    answers.put(type(get_limiter("a sandbox", 1)) is LocalLimiter)

context = multiprocessing.get_context("fork")
answers = context.Queue()
process = context.Process(target=child, args=[answers])
process.start()
assert answers.get(timeout=20)
process.join()
"""


@pytest.mark.process
def test_forked_process_is_not_connected() -> None:
    done = subprocess.run([sys.executable, "-c", CONNECTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_forked_process_has_its_own_slots() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
