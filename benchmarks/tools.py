"""What a tool instance costs: many of them alive at once on one tool, in one process.

    python benchmarks/tools.py [--quick] [--json]

Every instance is created, then all are alive together, then each is executed, rewarded and released. The same work done
by bare calls of the tool's four methods, with nobody watching over releases, is measured in the same run;
`vs_bare_calls` is the ratio. Ends with 1 if an instance is left, or if memory does not come back.

Two measures of memory: `blocks_left` counts the objects that the interpreter holds more than before, so it shows a leak
exactly; the megabytes are the process's, and keep some slack where few objects pin large arenas.
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


class Crowd:
    """Lets everybody wait until all have come."""

    def __init__(self, size: int) -> None:
        self.missing = size
        self.complete = asyncio.Event()

    async def join(self) -> None:
        """Wait for the last one."""
        self.missing -= 1
        if self.missing == 0:
            self.complete.set()
        await self.complete.wait()


async def with_instance(checker: Gsm8kTool, crowd: Crowd) -> None:
    async with ToolInstance(checker, create_kwargs=KWARGS) as instance:
        await crowd.join()
        await instance.execute(ANSWER)
        await instance.calc_reward()


async def with_bare_calls(checker: Gsm8kTool, crowd: Crowd) -> None:
    instance_id, _ = await checker.create(None, **KWARGS)
    await crowd.join()
    await checker.execute(instance_id, checker.arguments.parse(ANSWER))
    await checker.calc_reward(instance_id)
    await checker.release(instance_id)


async def seconds_for(one: Callable[[Gsm8kTool, Crowd], Awaitable[None]], checker: Gsm8kTool, count: int) -> float:
    crowd = Crowd(count)
    began = time.perf_counter()
    await asyncio.gather(*(one(checker, crowd) for _ in range(count)))
    return time.perf_counter() - began


def resident_mb() -> float:
    """The process's memory, after what can be given back to the system has been."""
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
        began = time.perf_counter()
        for _ in range(count):
            await instance.execute({"text": "a"})
        return (time.perf_counter() - began) / count * 1e6


def us_per_check(count: int) -> float:
    arguments = Gsm8kTool().arguments
    began = time.perf_counter()
    for _ in range(count):
        arguments.parse('{"answer": "72"}')
    return (time.perf_counter() - began) / count * 1e6


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Everything that is printed."""
    checker = Gsm8kTool()
    asyncio.run(seconds_for(with_instance, checker, 1000))  # imports, caches
    before, blocks_before = resident_mb(), sys.getallocatedblocks()
    ours, bare = [], []
    for _ in range(rounds):
        bare.append(asyncio.run(seconds_for(with_bare_calls, checker, count)))
        ours.append(asyncio.run(seconds_for(with_instance, checker, count)))
    after, blocks_after = resident_mb(), sys.getallocatedblocks()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "instances_at_once": count,
        "us_per_instance": round(statistics.median(ours) / count * 1e6, 1),
        "us_per_instance_bare_calls": round(statistics.median(bare) / count * 1e6, 1),
        "vs_bare_calls": round(statistics.median(ours) / statistics.median(bare), 2),
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
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(count=100_000, rounds=1 if options.quick else 5)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))
    taken, kept = figures["mb_peak"] - figures["mb_before"], figures["mb_after"] - figures["mb_before"]
    if figures["instances_left"] or figures["blocks_left"] > 1000 or kept > taken / 5:
        sys.exit("instances or memory did not come back")


if __name__ == "__main__":
    main()
