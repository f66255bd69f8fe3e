"""Processes die, are cancelled, change the limit: the number in flight, as the server counts it, stays within it."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.token_bucket import find, set_limit, standing

pytestmark = pytest.mark.alone
LIMIT = 32


def share(stats: dict[str, Any], name: str, since: float) -> list[tuple[float, int]]:
    """How many of one process's requests were in flight, at each change after a moment."""
    level, levels = 0, []
    for moment, by, change in stats["events"]:
        if by == name:
            level += change
            if moment >= since:
                levels.append((moment, level))
    return levels


def back_after(stats: dict[str, Any], survivor: str, since: float, level: int) -> float:
    """Seconds until the survivor had so many in flight."""
    return next(moment for moment, reached in share(stats, survivor, since) if reached >= level) - since


def begin(*loads: Any) -> None:
    """Let all of them run for their time, from when the last of them is under way."""
    for one in loads:
        one.wait_until_ready()
    for one in loads:
        one.go()


def settled(resource: str, **wanted: int) -> None:
    """Wait, briefly, until the limiter stands so."""
    for _ in range(100):
        now = standing(resource)._asdict()
        if all(now[name] == value for name, value in wanted.items()):
            return
        time.sleep(0.05)
    raise AssertionError(f"{now} instead of {wanted}")


def test_the_limit_holds_and_is_used_in_full(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load() for _ in range(3)]
    begin(*loads)
    results = [one.result() for one in loads]
    stats = server.stats()
    assert stats["most"] == LIMIT
    assert all(result["done"] > 0 and set(result) == {"done", "reports", "in_use", "longest_gap"} for result in results)
    settled(request.node.name, in_use=0, waiting=0, holders=0, quarantined=0, reserved=0)


def test_kill_9_of_a_holder(load: Callable[..., Any], server: Any, request: Any) -> None:
    """Its work goes on in the sandbox: its slots come back when that must have ended, and not before."""
    victim, survivor = load(seconds=20, ms=300), load(seconds=6, ms=20)
    begin(victim, survivor)
    time.sleep(1.5)
    killed = victim.kill()
    survivor.result()
    stats = server.stats()
    assert stats["most"] <= LIMIT
    assert back_after(stats, survivor.name, killed, LIMIT) < 0.4 + 0.1 + 0.2, "quarantine, 100 ms, and a noisy machine"
    settled(request.node.name, holders=0, reserved=0)


def test_kill_9_of_the_limiter(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(seconds=8) for _ in range(2)]
    begin(*loads)
    time.sleep(1.0)
    worker = find(request.node.name)
    pid = ray.get(worker.pid.remote())
    os.kill(pid, signal.SIGKILL)
    results = [one.result() for one in loads]
    assert server.stats()["most"] <= LIMIT
    assert max(result["longest_gap"] for result in results) < 1.0, "a stall"
    assert ray.get(worker.pid.remote()) != pid
    assert standing(request.node.name).learning


def test_a_limiter_that_was_removed_is_made_anew_by_those_who_use_it(
    load: Callable[..., Any], server: Any, request: Any
) -> None:
    loads = [load(seconds=8) for _ in range(2)]
    begin(*loads)
    ray.kill(find(request.node.name))
    late = load(seconds=4, patience=2)
    late.go()
    results = [one.result() for one in loads]
    assert server.stats()["most"] <= LIMIT
    assert max(result["longest_gap"] for result in results) < 1.0, "a stall"
    assert late.process.wait(60) is not None


async def test_longer_work_than_before_is_announced_at_once(cluster: str) -> None:
    limiter = ClusterLimiter("longer", 4, ttl=120)
    async with limiter.slot(hold=1):
        pass
    began = time.monotonic()
    async with limiter.slot(hold=5):
        assert time.monotonic() - began < 10, "it waited for the next report, which is due in 30 s"
    limiter.close()


def test_a_storm_of_cancellations(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(storm=True, concurrency=100) for _ in range(2)]
    begin(*loads)
    results = [one.result() for one in loads]
    assert server.stats()["most"] <= LIMIT
    assert all(result["in_use"] == 0 and result["done"] > 100 for result in results)
    settled(request.node.name, in_use=0, holders=0, reserved=0)


def test_the_limit_is_changed_under_load(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(seconds=7, concurrency=64) for _ in range(2)]
    begin(*loads)
    time.sleep(1.0)
    set_limit(request.node.name, 16)
    lowered = time.time()
    time.sleep(2.0)
    set_limit(request.node.name, 64)
    raised = time.time()
    for one in loads:
        one.result()
    levels, level = [], 0
    for moment, _, change in server.stats()["events"]:
        level += change
        levels.append((moment, level))
    assert max(level for _, level in levels) == 64
    assert max(level for moment, level in levels if moment < raised) == LIMIT
    assert max(level for moment, level in levels if lowered + 0.3 < moment < raised) == 16
    assert next(moment for moment, level in levels if moment > raised and level == 64) - raised < 0.5
