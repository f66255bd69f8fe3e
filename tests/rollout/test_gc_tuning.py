"""Throttling of full garbage collections."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolroll.rollout.gc_tuning import infrequent_full_gc


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    before = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before[0])
    gc.enable() if before[1] else gc.disable()


def full_collections(seconds: float) -> tuple[int, float]:
    """Return the number and total duration of full collections while objects accumulate."""
    times: list[float] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            times.append(time.perf_counter() if phase == "start" else time.perf_counter() - times.pop())

    kept, deadline = [], time.monotonic() + seconds
    gc.callbacks.append(count)
    try:
        while time.monotonic() < deadline:
            kept.append([[number] for number in range(1000)])
    finally:
        gc.callbacks.remove(count)
    return len(times), sum(times)


@pytest.mark.process
def test_full_collections_are_infrequent() -> None:
    """Measure in a subprocess, because the frequency depends on the other objects of the process."""
    script = (
        "from rollout.test_gc_tuning import full_collections\n"
        "from toolroll.rollout.gc_tuning import infrequent_full_gc\n"
        "default = full_collections(1.0)\n"
        "with infrequent_full_gc(): throttled = full_collections(1.0)\n"
        "print(*default, *throttled)"
    )
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    default, default_s, throttled, throttled_s = map(float, run.stdout.split())
    assert default > 3
    assert throttled <= 1 or throttled_s < 0.1 * default_s


def test_settings_are_restored_after_last_block() -> None:
    gc.set_threshold(500, 7, 9)
    with infrequent_full_gc():
        with infrequent_full_gc():
            gc.collect()
        full_collections(0.05)
        assert gc.get_threshold()[:2] == (500, 7)
        assert gc.get_threshold()[2] > 10**6
    assert gc.get_threshold() == (500, 7, 9)
    callbacks = len(gc.callbacks)
    with pytest.raises(RuntimeError), infrequent_full_gc():
        raise RuntimeError
    assert (gc.get_threshold(), len(gc.callbacks)) == ((500, 7, 9), callbacks)


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    gc.set_threshold(500, 7, 9)
    with infrequent_full_gc():
        assert (gc.get_threshold(), gc.isenabled()) == ((500, 7, 9), False)
    assert not gc.isenabled()


def test_young_cycles_are_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.reference = self

    with infrequent_full_gc():
        for _ in range(20_000):
            Node()
        remaining = sum(isinstance(item, Node) for item in gc.get_objects())
    assert remaining < 1000, "young objects are collected as usual"
