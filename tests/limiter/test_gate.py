"""The gate: first come first served, nothing lost, nothing doubled."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolroll.errors import Fault, LimiterUnavailable, SlotTimeout, fault_of
from toolroll.limiter.gate import Gate, LongestAsked
from toolroll.limiter.lease import Allowance, Lease
from toolroll.limiter.limiter import Limiter, LocalLimiter, get_limiter


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
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


@settings(max_examples=300)
@given(
    limit=st.integers(1, 4), steps=STEPS, resizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4)
)
def test_whatever_is_cancelled_or_fails_nothing_is_lost_or_doubled(
    limit: int, steps: list[tuple[int, int, int, bool]], resizes: list[tuple[int, int]]
) -> None:
    """Each step: turns before it asks, turns that it holds, turns until it is cancelled (if ever), whether it fails."""

    async def run() -> None:
        limiter = LocalLimiter(limit)
        running, largest, most = 0, limit, 0
        served: list[tuple[int, int]] = []
        asked: list[int] = []

        async def one(number: int, ask: int, hold: int, fails: bool) -> None:
            nonlocal running, most
            await turns(ask)
            asked.append(number)
            async with limiter.slot() as slot:
                served.append((slot.number, number))
                running += 1
                most = max(most, running)
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
            nonlocal largest
            for new, after in resizes:
                await turns(after)
                limiter.set_limit(new)
                largest = max(largest, new)
            await turns(30)
            limiter.set_limit(limit)

        tasks = [asyncio.create_task(one(n, ask, hold, fails)) for n, (ask, hold, _, fails) in enumerate(steps)]
        cancels = [cancel(task, after) for task, (_, _, after, _) in zip(tasks, steps, strict=True) if after < 8]
        await asyncio.gather(resize(), *cancels)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert most <= largest
        in_order = [number for _, number in sorted(served)]
        assert in_order == [number for number in asked if number in in_order], "overtaken"
        assert (limiter.in_use, limiter.waiting) == (0, 0)
        async with limiter.slot():
            assert limiter.in_use == 1

    asyncio.run(run())


async def test_a_slot_given_to_one_that_is_cancelled_in_the_same_moment_goes_to_the_next() -> None:
    limiter = LocalLimiter(1)
    got: list[str] = []

    async def one(name: str) -> None:
        async with limiter.slot():
            got.append(name)

    first = limiter.slot()
    await first.__aenter__()
    second, third = asyncio.create_task(one("second")), asyncio.create_task(one("third"))
    await turns(3)
    await first.__aexit__(None, None, None)  # the second has it from now on
    second.cancel()
    await asyncio.wait([second, third])
    assert got == ["third"]
    assert limiter.in_use == 0


async def test_no_slot_before_the_deadline_is_a_timeout_that_says_so() -> None:
    limiter = LocalLimiter(1, "http://sandbox")
    async with limiter.slot():
        with pytest.raises(SlotTimeout, match=r"http://sandbox.*1 in use and 0 waiting") as caught:
            async with limiter.slot(deadline=time.monotonic() + 0.05):
                pytest.fail("two at a limit of one")
        with pytest.raises(SlotTimeout, match="had passed before"):
            async with limiter.slot(deadline=time.monotonic() - 1):
                pytest.fail("begun after its deadline")
        assert limiter.waiting == 0
    assert fault_of(caught.value) is Fault.INFRA
    async with limiter.slot(deadline=time.monotonic() + 5) as slot:
        assert slot.waited == 0.0


def test_threads_and_event_loops_share_one_queue() -> None:
    limiter = LocalLimiter(4)
    lock, running, most, served = threading.Lock(), 0, 0, 0

    def work() -> None:
        nonlocal running, most, served
        with lock:
            running += 1
            most = max(most, running)
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
    assert (most, served, limiter.in_use, limiter.waiting) == (4, 360, 0, 0)


def test_a_waiter_whose_event_loop_is_gone_takes_no_slot() -> None:
    limiter = LocalLimiter(1)
    loop = asyncio.new_event_loop()
    with limiter.slot():
        waiting = loop.create_task(limiter.slot().__aenter__())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert limiter.waiting == 1
        with ThreadPoolExecutor(2) as pool:
            behind = pool.submit(lambda: limiter.slot(deadline=time.monotonic() + 10).__enter__())
            while limiter.waiting < 2:
                time.sleep(0.01)
            pool.submit(limiter._gate.resize, 2)
            assert behind.result(timeout=10).number
    assert waiting.cancelled() or not waiting.done()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_deadlines_a_moment_apart_are_announced_once(leased: "tuple[Gate, Limiter]") -> None:
    gate, limiter = leased
    first = asyncio.create_task(limiter.slot(deadline=time.monotonic() + 30).__aenter__())
    await turns(2)
    lease(gate, 1000)
    await first
    gate.on_news = lambda: pytest.fail("announced again")
    for _ in range(500):
        async with limiter.slot(deadline=time.monotonic() + 30.01):
            pass


def test_in_a_thread_a_timeout_is_one_too() -> None:
    limiter = LocalLimiter(1)
    with limiter.slot(), pytest.raises(SlotTimeout), limiter.slot(deadline=time.monotonic() + 0.05):
        pytest.fail("two at a limit of one")
    assert limiter.in_use == 0


@pytest.fixture
def leased() -> tuple[Gate, Limiter]:
    gate = Gate("shared", Allowance("me"))
    return gate, Limiter(gate)


def lease(gate: Gate, capacity: int, ttl: float = 10.0, *, contended: bool = False) -> None:
    report = gate.report()
    assert gate.apply(Lease(report.seq, capacity, ttl, contended, 0.05, 8, 1))


async def test_a_lease_that_has_run_out_is_not_used(leased: tuple[Gate, Limiter]) -> None:
    gate, limiter = leased
    with pytest.raises(LimiterUnavailable, match="toolroll limiter status"):
        async with limiter.slot(deadline=time.monotonic() + 0.05):
            pytest.fail("begun without a lease")
    lease(gate, 2, ttl=0.1)
    async with limiter.slot(deadline=time.monotonic() + 0.05):
        pass
    await asyncio.sleep(0.1)
    with pytest.raises(LimiterUnavailable):
        async with limiter.slot(deadline=time.monotonic() + 0.05):
            pytest.fail("begun after the lease")
    assert limiter.limit == 8


async def test_what_lasts_longer_than_was_said_waits_until_it_was_said(leased: tuple[Gate, Limiter]) -> None:
    gate, limiter = leased
    told: list[float] = []
    gate.on_news = lambda: told.append(time.monotonic())

    async def work(hold: float) -> None:
        async with limiter.slot(hold=hold):
            pass

    short = asyncio.create_task(work(1.0))
    await turns(2)
    lease(gate, 4)
    await short
    assert len(told) == 1
    await work(1.0)
    assert len(told) == 1, "the same again needs no announcement"
    long = asyncio.create_task(work(5.0))
    await turns(2)
    assert len(told) == 2
    assert gate.has_news
    report = gate.report()
    assert 5.0 <= report.hold < 6.0
    assert not long.done()
    gate.apply(Lease(report.seq, 4, 10.0, False, 0.05, 8, 1))
    await long


async def test_a_shrinking_lease_lets_finish_and_begins_nothing(leased: tuple[Gate, Limiter]) -> None:
    gate, limiter = leased
    waiting = [asyncio.create_task(hold_until(limiter, event := asyncio.Event())) for _ in range(1)]
    await turns(2)
    lease(gate, 3, contended=True)
    await turns(2)
    more = [asyncio.create_task(hold_until(limiter, event)) for _ in range(4)]
    await turns(2)
    assert (gate.in_use, gate.waiting) == (3, 2)
    lease(gate, 1, contended=True)
    await turns(2)
    assert (gate.in_use, gate.waiting) == (3, 2)
    event.set()
    await asyncio.gather(*waiting, *more)
    assert gate.has_news, "in a shortage the ledger is told that less is wanted"


async def hold_until(limiter: Limiter, event: asyncio.Event) -> None:
    async with limiter.slot(hold=1.0):
        await event.wait()


def test_the_longest_hold_is_forgotten_after_a_while() -> None:
    longest = LongestAsked()
    longest.note(30.0, 0.0)
    longest.note(2.0, 50.0)
    assert longest.asked(59.0) == 30.0
    assert longest.asked(100.0) == 30.0
    assert longest.asked(200.0) == 0.0 or longest.asked(200.0) == 2.0


ALONE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from toolroll.limiter.limiter import LocalLimiter, get_limiter
limiter = get_limiter("a sandbox", 5)
assert isinstance(limiter, LocalLimiter) and limiter.limit == 5
assert get_limiter("a sandbox", 5) is limiter
assert "ray" not in sys.modules
"""


def test_a_process_without_ray_has_a_limit_of_its_own_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the limit of 5 is this process's own" in done.stderr


def test_another_limit_than_was_asked_for_before_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first = get_limiter("asked twice", 2)
    assert get_limiter("asked twice", 64) is first
    get_limiter("asked twice", 64)
    assert caplog.text.count("asked for a limit of 64, but this process has asked for another before") == 1


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LocalLimiter(0)


async def test_100_000_wait_in_order() -> None:
    limiter, order = LocalLimiter(8), list[int]()

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(100_000)))
    assert order == list(range(100_000))


FORKED = """
import asyncio, multiprocessing
from toolroll.limiter.limiter import get_limiter

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
sys.modules["ray"] = types.SimpleNamespace(is_initialized=lambda: True)  # as it says in a fork, where nothing answers
from toolroll.limiter.limiter import LocalLimiter, get_limiter

def child(answers):
    answers.put(type(get_limiter("a sandbox", 1)) is LocalLimiter)

context = multiprocessing.get_context("fork")
answers = context.Queue()
process = context.Process(target=child, args=[answers])
process.start()
assert answers.get(timeout=20)
process.join()
"""


def test_a_forked_process_isnt_connected_to_its_parents_cluster() -> None:
    done = subprocess.run([sys.executable, "-c", CONNECTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_forked_process_has_no_slots_of_its_parents() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
