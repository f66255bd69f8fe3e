"""Use a limited service like a rollout: many coroutines, each of which acquires a slot and sends a request in it.

    python service_load.py '{"server": [host, port], "name": …, "concurrency": …, "seconds": …, "limits": …, …}'

Keys of the job:

- `resource`, `limits`: Name and `ResourceLimits` of the resource. Without `limits`, the process uses neither the
  limiter nor Ray.
- `ttl`: Lifetime of a lease, in seconds.
- `tokens`: Estimated tokens of a request. `true_tokens`: Range of the true number, which is random. The service counts
  the true number, and the slot is corrected after the request.
- `hold`: Timeout of a request, in seconds. `patience`: Timeout for a slot.

A refused request is reported to the limiter and sent again. A coroutine ends when the budget is exhausted, and the
process ends when all coroutines have ended.

Prints `ready` when the first request has ended and the process is watched. Its duration starts when it then receives a
line or its input is closed. At the end it prints its counts as one JSON line.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from math import inf
from typing import Any

outcomes: Counter[str] = Counter()
connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
ends = inf


def discard(writer: asyncio.StreamWriter) -> None:
    """Close a connection and discard data that was not sent yet, so that no request arrives after a partition."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def request(job: dict[str, Any], tokens: int) -> tuple[int, float | None]:
    """Send one request on a pooled connection. Return its status and the value of `Retry-After`."""
    async with asyncio.timeout(job["hold"]):
        reader, writer = connections.pop() if connections else await asyncio.open_connection(*job["server"])
        writer.write(f"GET /use?by={job['name']}&tokens={tokens} HTTP/1.1\r\n\r\n".encode())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            await reader.readexactly(int(head.split("Content-Length: ")[1]))
        except BaseException:
            discard(writer)
            raise
    connections.append((reader, writer))
    _, found, wait = head.partition("Retry-After: ")
    return int(head.split(" ", 2)[1]), float(wait.split("\r\n")[0]) if found else None


def count(status: int) -> None:
    outcomes["done" if status == 200 else "refused"] += 1


async def send_without_limiter(job: dict[str, Any]) -> None:
    while time.monotonic() < ends:
        try:
            count((await request(job, job["tokens"]))[0])
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcomes[type(error).__name__] += 1


async def send_in_slots(limiter: Any, job: dict[str, Any]) -> None:
    from toolroll.errors import BudgetExhausted, LimiterUnavailable, SlotTimeout

    cost = {"tokens": job["tokens"]} if job["tokens"] else {}
    while (now := time.monotonic()) < ends:
        try:
            async with limiter.acquire(cost=cost, deadline=now + job["patience"], hold=job["hold"]) as slot:
                tokens = random.randint(*job["true_tokens"]) if "true_tokens" in job else job["tokens"]
                status, retry_after = await request(job, tokens)
                count(status)
                if status != 200:
                    slot.reject(retry_after)
                elif "true_tokens" in job:
                    slot.correct(tokens=tokens)
        except BudgetExhausted:
            outcomes["BudgetExhausted"] += 1
            return
        except (SlotTimeout, LimiterUnavailable, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.05)


async def start_duration(job: dict[str, Any]) -> None:
    """Start the duration when the process that started this one has read `ready`."""
    global ends
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ends = time.monotonic() + job["seconds"]


async def run_without_limiter(job: dict[str, Any]) -> None:
    tasks = [asyncio.create_task(send_without_limiter(job)) for _ in range(job["concurrency"])]
    await start_duration(job)
    await asyncio.wait(tasks)
    print(json.dumps(outcomes), flush=True)


async def run_with_limiter(job: dict[str, Any]) -> None:
    from toolroll import ResourceLimits
    from toolroll.limiter.cluster import ClusterLimiter

    limiter = ClusterLimiter(job["resource"], ResourceLimits(**job["limits"]).policy(), job["ttl"])
    tasks = [asyncio.create_task(send_in_slots(limiter, job)) for _ in range(job["concurrency"])]
    while not (outcomes and limiter.watched):
        await asyncio.sleep(0.01)
    await start_duration(job)
    await asyncio.wait(tasks)
    print(json.dumps({**outcomes, "reports": limiter.reports_sent, "in_use": limiter.in_use}), flush=True)
    limiter.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    job = {"concurrency": 32, "tokens": 0, "ttl": 10.0, "hold": 5.0, "patience": 60.0, **json.loads(sys.argv[1])}
    if "limits" not in job:
        asyncio.run(run_without_limiter(job))
        return
    import ray

    where: dict[str, Any] = {"_node_ip_address": os.environ["RAY_NODES_IP"]} if "RAY_NODES_IP" in os.environ else {}
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **where)
    asyncio.run(run_with_limiter(job))
    with contextlib.suppress(Exception):
        ray.shutdown()


main()
