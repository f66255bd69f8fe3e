"""Work is completed however often the waiting task is cancelled."""

import asyncio

import pytest

from toolroll._internal.cancellation import finish_despite_cancellation, wait_despite_cancellation

pytestmark = pytest.mark.virtual_time


async def sleep_and_return(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("no")


async def test_result_is_returned() -> None:
    assert await finish_despite_cancellation(sleep_and_return(0)) == "done"
    assert await finish_despite_cancellation(asyncio.create_task(sleep_and_return(0))) == "done"


async def test_exception_is_raised() -> None:
    with pytest.raises(ValueError, match="no"):
        await finish_despite_cancellation(fail())


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_cancellation_is_raised_after_the_work(cancellations: int) -> None:
    work = asyncio.create_task(sleep_and_return(0.1))
    waiting = asyncio.create_task(finish_despite_cancellation(work))
    for _ in range(cancellations):
        await asyncio.sleep(0.01)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.result() == "done"


async def test_timeout_around_the_work_is_a_timeout() -> None:
    work = asyncio.create_task(sleep_and_return(0.1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await finish_despite_cancellation(work)
    assert work.done()


async def test_wait_ends_at_its_timeout() -> None:
    work = asyncio.create_task(sleep_and_return(60))
    await wait_despite_cancellation(work, timeout_s=0.05)
    assert not work.done()
    work.cancel()


async def test_cancellations_do_not_change_the_timeout() -> None:
    work = asyncio.create_task(sleep_and_return(60))
    started = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(wait_despite_cancellation(work, timeout_s=0.3))
    for _ in range(5):
        await asyncio.sleep(0.04)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert 0.29 < asyncio.get_running_loop().time() - started < 2
    assert not work.done()
    work.cancel()


async def test_wait_does_not_raise_the_works_exception() -> None:
    work = asyncio.create_task(fail())
    await wait_despite_cancellation(work)
    assert isinstance(work.exception(), ValueError)
