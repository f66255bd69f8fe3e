"""Concurrent requests, as counted by the server, stay within the limit if processes die or the limit changes."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.token_bucket import find_token_bucket, limiter_status, set_limit

pytestmark = pytest.mark.timing
LIMIT = 32
TTL_S = 200.0
"""Lifetime of leases that outlast each test, so that slots which move don't do so because a lease ends."""


def start_together(*loads: Any) -> None:
    """Start the duration of all processes when the last one is ready."""
    for one in loads:
        one.wait_until_ready()
    for one in loads:
        one.go()


def wait_for_max_level(server: Any, expected: int, name: str | None = None) -> None:
    """Wait until the maximum number of concurrent requests, over half a second, is as expected."""
    since = time.time()
    for _ in range(40):
        time.sleep(0.5)
        highest = max((level for moment, level in server.levels(name) if moment >= since), default=0)
        if highest == expected:
            return
        since = time.time()
    raise AssertionError(f"{highest} concurrent requests instead of {expected}")


def wait_for_status(resource: str, **expected: int) -> None:
    """Wait for a status of the limiter, which may be restarting."""
    now: dict[str, Any] = {}
    for _ in range(600):
        with suppress(RayError):
            now = limiter_status(resource)._asdict()
        if now and all(now[name] == value for name, value in expected.items()):
            return
        time.sleep(0.05)
    raise AssertionError(f"{now} instead of {expected}")


def test_limit_is_reached_and_not_exceeded(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load() for _ in range(3)]
    start_together(*loads)
    results = [one.result() for one in loads]
    stats = server.stats()
    assert stats["max_in_flight"] == LIMIT
    assert all(result["done"] > 0 and set(result) == {"done", "reports", "in_use", "longest_gap"} for result in results)
    wait_for_status(request.node.name, in_use=0, waiting=0, holders=0, quarantined=0, reserved=0)


def test_killed_holder(load: Callable[..., Any], server: Any, request: Any) -> None:
    """The victim's work still runs in the sandbox, so its slots return only after its `hold`."""
    victim, survivor = (load(seconds=100, ms=300, hold=2.0, ttl=TTL_S) for _ in range(2))
    start_together(victim, survivor)
    wait_for_max_level(server, LIMIT // 2, survivor.name)
    killed = victim.kill()
    wait_for_max_level(server, LIMIT, survivor.name)
    levels = server.levels(survivor.name)
    recovery = next(moment for moment, level in levels if moment >= killed and level > LIMIT // 2) - killed
    assert recovery > 1.0, "the victim's last request may still run"
    assert server.stats()["max_in_flight"] <= LIMIT
    survivor.kill()
    wait_for_status(request.node.name, holders=0, reserved=0)


def kill_limiter(resource: str) -> int:
    """Send SIGKILL to the actor of a resource and return its process id."""
    pid = int(ray.get(find_token_bucket(resource).pid.remote()))
    os.kill(pid, signal.SIGKILL)
    return pid


def test_killed_limiter(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(seconds=8, ttl=TTL_S) for _ in range(2)]
    start_together(*loads)
    time.sleep(1.0)
    worker = find_token_bucket(request.node.name)
    pid = kill_limiter(request.node.name)
    results = [one.result() for one in loads]
    assert server.stats()["max_in_flight"] <= LIMIT
    assert max(result["longest_gap"] for result in results) < 4.0, "a stall"
    assert ray.get(worker.pid.remote()) != pid


def test_new_holder_gets_slots_after_restart_of_limiter(load: Callable[..., Any], server: Any, request: Any) -> None:
    """The restarted limiter grants slots when the others have reported, long before their leases expire."""
    old = load(seconds=20, ttl=TTL_S)
    start_together(old)
    kill_limiter(request.node.name)
    new = load(seconds=2, ttl=TTL_S)
    start_together(new)
    assert new.result()["done"] > 0
    assert server.stats()["max_in_flight"] <= LIMIT


def test_holder_and_limiter_killed_in_a_row(load: Callable[..., Any], server: Any, request: Any) -> None:
    """The victim's work still runs in the sandbox, and only the limiter that was killed knew for how long."""
    victim = load(seconds=100, ms=6000, hold=8.0, ttl=2.0)
    victim.go()
    wait_for_max_level(server, LIMIT)
    survivor = load(seconds=12, ms=100, hold=0.5, ttl=2.0)
    start_together(survivor)
    victim.kill()
    time.sleep(0.5)
    kill_limiter(request.node.name)
    assert survivor.result()["done"] > 0
    assert server.stats()["max_in_flight"] == LIMIT


def test_changed_limit_survives_restart_of_limiter(cluster: str, request: Any) -> None:
    limiter = ClusterLimiter(request.node.name, 4)
    limiter.set_limit(7)
    limiter.close()
    kill_limiter(request.node.name)
    wait_for_status(request.node.name, limit=7, holders=0)


def test_suspended_holders(load: Callable[..., Any], server: Any, request: Any) -> None:
    """Processes are stopped for longer than their leases, 100 times, while they have slots that they do not use yet."""
    loads = [load(seconds=100, ms=100, pause=0.05, hold=0.5, ttl=1.0) for _ in range(5)]
    start_together(*loads)
    chance = random.Random(0)

    def suspend_repeatedly(process: Any) -> None:
        for _ in range(20):
            process.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(1.6, 2.2))  # the lease and the work in its slots
            process.send_signal(signal.SIGCONT)
            time.sleep(chance.uniform(0.2, 0.8))

    with ThreadPoolExecutor(len(loads)) as threads:
        for suspended in [threads.submit(suspend_repeatedly, one.process) for one in loads]:
            suspended.result()
    stats = server.stats()
    assert stats["max_in_flight"] <= LIMIT
    assert stats["rejected"] > 0, "no slot was used late, so that nothing was tested"
    assert all(stats["done"][one.name] > 0 for one in loads)


def test_removed_limiter_is_recreated(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(seconds=8, ttl=TTL_S) for _ in range(2)]
    start_together(*loads)
    ray.kill(find_token_bucket(request.node.name))
    late = load(seconds=4, patience=2, ttl=TTL_S)
    late.go()
    results = [one.result() for one in loads]
    assert server.stats()["max_in_flight"] <= LIMIT
    assert max(result["longest_gap"] for result in results) < 4.0, "a stall"
    assert late.process.wait(60) is not None


async def test_longer_hold_is_announced_at_once(cluster: str) -> None:
    limiter = ClusterLimiter("longer", 4, ttl=1200)
    async with asyncio.timeout(120):  # the next renewal is due in 300 s
        for hold in range(1, 100, 5):
            async with limiter.slot(hold=hold):
                pass
    limiter.close()


def test_random_cancellations(load: Callable[..., Any], server: Any, request: Any) -> None:
    loads = [load(cancel_at_random=True, concurrency=100) for _ in range(2)]
    start_together(*loads)
    results = [one.result() for one in loads]
    assert server.stats()["max_in_flight"] <= LIMIT
    assert all(result["in_use"] == 0 and result["done"] > 100 for result in results)
    wait_for_status(request.node.name, in_use=0, holders=0, reserved=0)


def test_limit_changes_under_load(load: Callable[..., Any], server: Any, request: Any) -> None:
    """All processes get a new limit long before they renew their leases."""
    start_together(*(load(seconds=100, concurrency=64, ttl=TTL_S) for _ in range(2)))
    wait_for_max_level(server, LIMIT)
    set_limit(request.node.name, 16)
    wait_for_max_level(server, 16)
    raised = time.time()
    set_limit(request.node.name, 64)
    wait_for_max_level(server, 64)
    levels = server.levels()
    assert max(level for _, level in levels) == 64
    assert max(level for moment, level in levels if moment < raised) == LIMIT
