"""Who runs, who waits, who is sent away: as properties over any order of coming, ending, giving up."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.server.admission import Admission, Full, Late
from toolroll.sandbox.server.answers import Answers

STEPS = st.lists(
    st.one_of(
        st.just(("come", 0)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("give up"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(capacity=st.integers(1, 4), queue=st.integers(0, 5), steps=STEPS)
def test_never_more_than_the_capacity_and_first_come_first_served(
    capacity: int, queue: int, steps: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        door = Admission(capacity, queue)
        running: dict[int, asyncio.Event] = {}
        begun: list[int] = []
        tasks: dict[int, asyncio.Task[None]] = {}

        async def visit(number: int) -> None:
            async with door.turn(None):
                begun.append(number)
                running[number] = asyncio.Event()
                try:
                    await running[number].wait()
                finally:
                    del running[number]

        async def settle() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        for number, (what, which) in enumerate(steps):
            waiting = [one for one in tasks if one not in begun and not tasks[one].done()]
            if what == "come":
                full = len(running) == capacity and len(waiting) == queue
                tasks[number] = asyncio.create_task(visit(number))
                await settle()
                if full:
                    with pytest.raises(Full) as refusal:
                        await tasks.pop(number)
                    assert 1 <= refusal.value.retry_after <= 60
            elif what == "end" and running:
                list(running.values())[which % len(running)].set()
            elif what == "give up" and tasks:
                alive = [one for one in tasks.values() if not one.done()]
                if alive:
                    alive[which % len(alive)].cancel()
            await settle()
            waiting = [one for one in tasks if one not in begun and not tasks[one].done()]
            assert len(running) == door.running <= capacity
            assert len(waiting) == door.waiting <= queue
            assert not waiting or len(running) == capacity
            assert begun == sorted(begun)
        for one in tasks.values():
            one.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (door.running, door.waiting) == (0, 0)

    asyncio.run(play())


async def test_who_is_late_is_not_let_in() -> None:
    door = Admission(1, 10)
    with pytest.raises(Late, match=r"passed 5\.\d+ s ago"):
        async with door.turn(time.time() - 5):
            raise AssertionError
    async with door.turn(None):
        with pytest.raises(Late):
            async with door.turn(time.time() + 0.05):
                raise AssertionError
    assert (door.running, door.waiting) == (0, 0)


async def test_an_answer_is_made_once_for_all_who_ask_and_kept() -> None:
    answers, made = Answers(), []

    async def make() -> bytes:
        made.append(1)
        await asyncio.sleep(0.01)
        return b"answer"

    assert await asyncio.gather(*(answers.get("a", make, finish=False) for _ in range(5))) == [b"answer"] * 5
    assert await answers.get("a", make, finish=False) == b"answer"
    assert len(made) == 1
    assert await answers.get("b", make, finish=False) == b"answer"
    assert len(made) == 2


async def test_a_failure_is_not_remembered() -> None:
    answers = Answers()

    async def fail() -> bytes:
        raise ValueError("odd")

    async def succeed() -> bytes:
        return b"now"

    with pytest.raises(ValueError, match="odd"):
        await answers.get("a", fail, finish=False)
    assert await answers.get("a", succeed, finish=False) == b"now"


@pytest.mark.parametrize("finish", [True, False])
async def test_what_nobody_waits_for_is_given_up_unless_it_must_be_finished(finish: bool) -> None:
    answers, done = Answers(), []

    async def make() -> bytes:
        await asyncio.sleep(0.05)
        done.append(1)
        return b"answer"

    asking = asyncio.create_task(answers.get("a", make, finish=finish))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.sleep(0.1)
    assert len(done) == finish


async def test_answers_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.sandbox.server.answers.MOST_BYTES", 1000)
    answers, made = Answers(), 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        return b"x" * 100

    for number in range(50):
        await answers.get(str(number), make, finish=False)
    await answers.get("49", make, finish=False)
    assert made == 50
    await answers.get("0", make, finish=False)
    assert made == 51
    assert answers._bytes <= 1000
