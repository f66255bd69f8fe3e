"""Full collections are rare while trajectories run, and the collector is as before when they have ended."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolroll.rollout.collector import rare_full_collections


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before[0])
    gc.enable() if before[1] else gc.disable()


def full_collections(seconds: float) -> tuple[int, float]:
    """How many there are, and how long they take, while objects are made that stay."""
    times: list[float] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            times.append(time.perf_counter() if phase == "start" else time.perf_counter() - times.pop())

    kept, ends = [], time.monotonic() + seconds
    gc.callbacks.append(count)
    try:
        while time.monotonic() < ends:
            kept.append([[number] for number in range(1000)])
    finally:
        gc.callbacks.remove(count)
    return len(times), sum(times)


def test_full_collections_are_rare_within() -> None:
    """In a process of its own: how often they come depends on what else there is."""
    script = (
        "from rollout.test_collector import full_collections\n"
        "from toolroll.rollout.collector import rare_full_collections\n"
        "often = full_collections(1.0)\n"
        "with rare_full_collections(): rarely = full_collections(1.0)\n"
        "print(*often, *rarely)"
    )
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    often, often_took, rarely, rarely_took = map(float, run.stdout.split())
    assert often > 3
    assert rarely <= 1 or rarely_took < 0.1 * often_took


def test_it_is_as_before_when_the_last_run_ends() -> None:
    gc.set_threshold(500, 7, 9)
    with rare_full_collections():
        with rare_full_collections():
            gc.collect()
        full_collections(0.05)
        assert gc.get_threshold()[:2] == (500, 7)
        assert gc.get_threshold()[2] > 10**6
    assert gc.get_threshold() == (500, 7, 9)
    callbacks = len(gc.callbacks)
    with pytest.raises(RuntimeError), rare_full_collections():
        raise RuntimeError
    assert (gc.get_threshold(), len(gc.callbacks)) == ((500, 7, 9), callbacks)


def test_one_that_is_switched_off_is_left_alone() -> None:
    gc.disable()
    gc.set_threshold(500, 7, 9)
    with rare_full_collections():
        assert (gc.get_threshold(), gc.isenabled()) == ((500, 7, 9), False)
    assert not gc.isenabled()


def test_what_cycles_hold_is_freed_in_the_end() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    with rare_full_collections():
        for _ in range(20_000):
            Node()
        left = sum(isinstance(one, Node) for one in gc.get_objects())
    assert left < 1000, "young ones are collected as ever"
