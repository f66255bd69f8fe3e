"""Measure the cost of a tool instance with 100,000 concurrent instances of one tool in one process.

    python benchmarks/tools.py [--quick] [--json]

All instances are created first; then each one is executed, rewarded and released. The same work with direct calls of
the tool's four methods, without the guarantees of ToolInstance, is measured in the same run; `vs_bare_calls` is the
ratio. Exits with status 1 if an instance is not released or memory is not freed.

There are two measures of memory. `blocks_left` is the number of additional memory blocks of the interpreter, which
shows a leak exactly. The resident memory in megabytes includes arenas that a few objects keep from being freed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from toolroll import ToolInstance, tool
from toolroll.tools.gsm8k_tool import Gsm8kTool

ANSWER = {"answer": "72"}
KWARGS = {"ground_truth": "72"}


class Barrier:
    """Blocks until all participants have arrived."""

    def __init__(self, size: int) -> None:
        self.missing = size
        self.complete = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the last participant."""
        self.missing -= 1
        if self.missing == 0:
            self.complete.set()
        await self.complete.wait()


async def with_instance(checker: Gsm8kTool, barrier: Barrier) -> None:
    async with ToolInstance(checker, create_kwargs=KWARGS) as instance:
        await barrier.wait()
        await instance.execute(ANSWER)
        await instance.calc_reward()


async def with_bare_calls(checker: Gsm8kTool, barrier: Barrier) -> None:
    instance_id, _ = await checker.create(None, **KWARGS)
    await barrier.wait()
    await checker.execute(instance_id, checker.arguments.parse(ANSWER))
    await checker.calc_reward(instance_id)
    await checker.release(instance_id)


async def seconds_for(
    trajectory: Callable[[Gsm8kTool, Barrier], Awaitable[None]], checker: Gsm8kTool, count: int
) -> float:
    barrier = Barrier(count)
    start = time.perf_counter()
    await asyncio.gather(*(trajectory(checker, barrier) for _ in range(count)))
    return time.perf_counter() - start


def resident_mb() -> float:
    """Return the resident memory of the process after freeing unused memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process(os.getpid()).memory_info().rss) / 2**20


@tool
async def nothing(text: str) -> str:
    """Do nothing.

    Args:
        text: Anything.
    """
    return text


async def us_per_function_call(count: int) -> float:
    async with ToolInstance(nothing) as instance:
        start = time.perf_counter()
        for _ in range(count):
            await instance.execute({"text": "a"})
        return (time.perf_counter() - start) / count * 1e6


def us_per_check(count: int) -> float:
    arguments = Gsm8kTool().arguments
    start = time.perf_counter()
    for _ in range(count):
        arguments.parse('{"answer": "72"}')
    return (time.perf_counter() - start) / count * 1e6


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    checker = Gsm8kTool()
    asyncio.run(seconds_for(with_instance, checker, 1000))  # warm-up: imports and caches
    before, blocks_before = resident_mb(), sys.getallocatedblocks()
    with_instances, with_bare = [], []
    for _ in range(rounds):
        with_bare.append(asyncio.run(seconds_for(with_bare_calls, checker, count)))
        with_instances.append(asyncio.run(seconds_for(with_instance, checker, count)))
    after, blocks_after = resident_mb(), sys.getallocatedblocks()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "instances_at_once": count,
        "us_per_instance": round(statistics.median(with_instances) / count * 1e6, 1),
        "us_per_instance_bare_calls": round(statistics.median(with_bare) / count * 1e6, 1),
        "vs_bare_calls": round(statistics.median(with_instances) / statistics.median(with_bare), 2),
        "us_per_argument_check": round(us_per_check(20_000), 1),
        "us_per_function_call": round(asyncio.run(us_per_function_call(20_000)), 1),
        "instances_left": len(checker.instances),
        "blocks_left": blocks_after - blocks_before,
        "mb_before": round(before, 1),
        "mb_peak": round(peak, 1),
        "mb_after": round(after, 1),
        "kb_per_instance_at_peak": round((peak - before) / count * 1024, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run one round instead of five")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(count=100_000, rounds=1 if options.quick else 5)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))
    allocated, retained = figures["mb_peak"] - figures["mb_before"], figures["mb_after"] - figures["mb_before"]
    if figures["instances_left"] or figures["blocks_left"] > 1000 or retained > allocated / 5:
        sys.exit("Instances or memory were not released.")


if __name__ == "__main__":
    main()
