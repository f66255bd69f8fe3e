"""Full collections are rare while trajectories run, and the collector is as before when they have ended."""

import gc
import time
from collections.abc import Iterator

import pytest

from toolroll.rollout.collector import SHARE, rare_full_collections


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
    gc.collect()
    often, _ = full_collections(1.0)
    with rare_full_collections():
        rarely, took = full_collections(1.0)
    assert often > 3
    assert rarely <= 1 or took < 1.0 * SHARE * 2
    with rare_full_collections():
        gc.collect()  # one that is asked for is carried out


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
