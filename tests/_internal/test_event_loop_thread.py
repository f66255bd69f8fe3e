"""Coroutines run from blocking code: from any thread, after a fork, and until the loop is closed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import uvloop

from toolroll._internal.event_loop_thread import EventLoopThread, shared_event_loop_thread

NAME = "test-event-loop"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def thread(request: pytest.FixtureRequest) -> Iterator[EventLoopThread]:
    thread = EventLoopThread(NAME, request.param)
    yield thread
    thread.close()
    assert NAME not in [running.name for running in threading.enumerate()]


async def current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def fail(error: BaseException) -> None:
    raise error


async def sleep_until_cancelled(started: threading.Event, stopped: threading.Event) -> None:
    started.set()
    try:
        await asyncio.sleep(60)
    finally:
        stopped.set()


def test_all_calls_use_one_loop(thread: EventLoopThread) -> None:
    with ThreadPoolExecutor(16) as pool:
        loops = set(pool.map(lambda _: thread.run(current_loop()), range(64)))
    assert len(loops) == 1
    assert [running.daemon for running in threading.enumerate() if running.name == NAME] == [True]


async def test_runs_from_a_thread_with_a_running_loop(thread: EventLoopThread) -> None:
    assert thread.run(current_loop()) is not asyncio.get_running_loop()


def test_callers_thread_keeps_its_current_loop() -> None:
    own = asyncio.new_event_loop()
    asyncio.set_event_loop(own)
    try:
        thread = EventLoopThread(NAME)
        assert asyncio.get_event_loop() is own
        thread.close()
        assert asyncio.get_event_loop() is own
    finally:
        asyncio.set_event_loop(None)
        own.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_exception_reaches_caller_and_loop_survives(thread: EventLoopThread, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        thread.run(fail(error))
    assert caught.value.args == error.args
    assert thread.run(current_loop()).is_running()


def test_interrupted_caller_cancels_its_coroutine(thread: EventLoopThread) -> None:
    started, stopped = threading.Event(), threading.Event()

    def interrupt() -> None:
        started.wait(5)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        thread.run(sleep_until_cancelled(started, stopped))
    assert stopped.wait(5)


def test_cancelled_future_cancels_its_coroutine(thread: EventLoopThread) -> None:
    started, stopped = threading.Event(), threading.Event()
    future = thread.submit(sleep_until_cancelled(started, stopped))
    assert started.wait(5)
    future.cancel()
    assert stopped.wait(5)


def test_callback_runs_on_the_loops_thread(thread: EventLoopThread) -> None:
    names: list[str] = []
    called = threading.Event()
    thread.call_soon_threadsafe(lambda: names.append(threading.current_thread().name))
    thread.call_soon_threadsafe(called.set)
    assert called.wait(5)
    assert names == [NAME]


def test_close_cancels_tasks_and_closes_the_loop(thread: EventLoopThread) -> None:
    started, stopped = threading.Event(), threading.Event()
    loop = thread.run(current_loop())
    future = thread.submit(sleep_until_cancelled(started, stopped))
    assert started.wait(5)
    thread.close()
    assert stopped.is_set()
    assert future.cancelled()
    assert loop.is_closed()


def test_closed_thread_rejects_coroutines(thread: EventLoopThread) -> None:
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="'test-event-loop' is closed"):
        thread.run(current_loop())


def test_every_call_ends_when_closed_meanwhile(thread: EventLoopThread) -> None:
    """Each call returns, is cancelled or is rejected; none waits forever."""

    def call_until_closed() -> None:
        while True:
            try:
                thread.submit(asyncio.sleep(0.001)).result(5)
            except (CancelledError, RuntimeError):
                return

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call_until_closed) for _ in range(8)]
        time.sleep(0.1)
        thread.close()
        for call in calls:
            call.result(10)


def test_shared_threads_are_shared_by_name() -> None:
    with ThreadPoolExecutor(16) as pool:
        threads = set(pool.map(lambda _: shared_event_loop_thread("test-shared"), range(64)))
    assert len(threads) == 1
    assert sum(running.name == "test-shared" for running in threading.enumerate()) == 1
    assert shared_event_loop_thread("test-other") not in threads


FORK = """
import asyncio, os, sys
from toolroll._internal.event_loop_thread import EventLoopThread, shared_event_loop_thread

async def pid():
    await asyncio.sleep(0.01)
    return os.getpid()

def shared():
    return shared_event_loop_thread("shared", close_at_exit=True)

own, inherited = EventLoopThread("own"), shared()
assert inherited.run(pid()) == os.getpid()
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own.run(pid()) == os.getpid()
    own.close()
else:
    for thread in (own, inherited):
        try:
            thread.run(pid())
        except RuntimeError as error:
            assert "Create another one after the fork." in str(error)
        else:
            raise AssertionError("it ran")
        thread.close()
    assert shared() is not inherited
assert shared().run(pid()) == os.getpid()
"""

EXIT = """
import asyncio
from toolroll._internal.event_loop_thread import shared_event_loop_thread

async def wait():
    try:
        await asyncio.sleep(60)
    finally:
        print("cancelled")

thread = shared_event_loop_thread("shared", close_at_exit=True)
thread.submit(wait())
thread.run(asyncio.sleep(0.1))
"""


def run_script(script: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.process
def test_forked_process_starts_its_own_thread() -> None:
    code, _, stderr = run_script(FORK)
    assert code == 0, stderr


@pytest.mark.process
def test_thread_is_closed_at_exit() -> None:
    assert run_script(EXIT) == (0, "cancelled\n", "")
