"""Use the limiter like a rollout: many coroutines, each of which acquires a slot and sends an HTTP request in it.

    python load.py '{"resource": …, "limit": …, "server": [host, port], "name": …, "concurrency": …, "ms": …, …}'

Prints `ready` when requests are being sent and the process is watched. Its duration starts when it then receives a
line, so that several processes end together. At the end it prints its counts as one JSON line.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from math import inf
from typing import Any

import ray

from toolroll._internal.cancellation import finish_despite_cancellation
from toolroll.errors import LimiterUnavailable, SlotTimeout
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.slot import Slot

outcomes: Counter[str] = Counter()
connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
longest_gap = last_done = 0.0
ends = inf


async def request(job: dict[str, Any], slot: Slot) -> str:
    """Send one request that ends before its slot expires, on a pooled connection."""
    now = time.time()  # before the other clock: the process may be suspended in between
    until = now + slot.expires_at - time.monotonic()
    await asyncio.sleep(job.get("pause", 0.0))
    reader, writer = connections.pop() if connections else await asyncio.open_connection(*job["server"])
    path = f"/work?ms={job['ms']}&by={job['name']}&until={until}"
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    try:
        async with asyncio.timeout(until - time.time()):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split(b"Content-Length: ")[1]))
    except BaseException:
        writer.close()
        raise
    connections.append((reader, writer))
    return "done" if b" 200 " in head else "rejected"


async def trajectory(limiter: ClusterLimiter, job: dict[str, Any]) -> None:
    global longest_gap, last_done
    while time.monotonic() < ends:
        try:
            async with limiter.slot(deadline=time.monotonic() + job["patience"], hold=job["hold"]) as slot:
                outcomes[await finish_despite_cancellation(request(job, slot))] += 1
                if last_done:
                    longest_gap = max(longest_gap, time.monotonic() - last_done)
                last_done = time.monotonic()
        except (SlotTimeout, LimiterUnavailable, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.05)


async def cancel_at_random(tasks: "list[asyncio.Task[None]]", limiter: ClusterLimiter, job: dict[str, Any]) -> None:
    """Cancel trajectories at random and start others in their place."""
    while time.monotonic() < ends - 0.5:
        await asyncio.sleep(0.01)
        for number in random.sample(range(len(tasks)), len(tasks) // 4):
            tasks[number].cancel()
            tasks[number] = asyncio.create_task(trajectory(limiter, job))


async def main() -> None:
    global ends
    job = json.loads(sys.argv[1])
    limiter = ClusterLimiter(job["resource"], job["limit"], job["ttl"])
    tasks = [asyncio.create_task(trajectory(limiter, job)) for _ in range(job["concurrency"])]
    while not (outcomes and limiter.watched):
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ends = time.monotonic() + job["seconds"]
    if job.get("cancel_at_random"):
        await cancel_at_random(tasks, limiter, job)
    await asyncio.wait(tasks)
    print(
        json.dumps({**outcomes, "reports": limiter.reports_sent, "in_use": limiter.in_use, "longest_gap": longest_gap}),
        flush=True,
    )
    if not job.get("stay"):
        limiter.close()


logging.basicConfig(level=logging.INFO, stream=sys.stderr)
where = {"_node_ip_address": os.environ["RAY_NODES_IP"]} if "RAY_NODES_IP" in os.environ else {}
ray.init(log_to_driver=False, logging_level="warning", **where)
asyncio.run(main())
with contextlib.suppress(Exception):
    ray.shutdown()
