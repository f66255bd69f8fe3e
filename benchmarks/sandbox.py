"""What the sandbox server costs, beside the bare isolated fork and beside a cold interpreter, measured in one run.

    python benchmarks/sandbox.py [--quick] [--json]

`cpu_ms_per_exec` is the CPU time of the whole server (front, interpreters, programs) per request of `print(1 + 1)`,
from the kernel's accounting. `vs_bare_isolated_fork` is its ratio to `bare_fork.py`: the same isolation with no server
around it. `vs_python_cold` is the server's executions per second over those of `bash -c "python main.py"`, bare, at the
same concurrency. `preloaded_import_speedup` is how much sooner a program is done that imports numpy, sympy and pandas.
`session_cell_ms` is a request's time beyond the cell's own work. `lost` counts the requests of the overload at the end,
four times the capacity and its queue together, that got neither their own result nor a 429.

Ends with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from toolroll.sandbox.client import SandboxClient

HERE = Path(__file__).parent
CODE = "print(1 + 1)"
IMPORTS = "import numpy, sympy, pandas\nprint(2)"
BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_isolated_fork": lambda value: value <= 1.6,
    "preloaded_import_speedup": lambda value: value >= 30,
    "lost": lambda value: value == 0,
    # Times on a clock, which a shared machine stretches: these only say that something has gone wrong.
    "vs_python_cold": lambda value: value >= 1.5,
    "p50_ms_c1": lambda value: value <= 20,
    "session_cell_ms": lambda value: value <= 5,
}


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "toolroll.cli", "sandbox", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            url = next(found[1] for line in process.stdout if (found := re.search(r"serving on (\S+)", line)))
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def cpu_seconds(server: psutil.Process) -> float:
    """What the server's processes, and those that they have waited for, have used."""
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        total += sum(process.cpu_times()[:4])
    return total


async def timed(one: Callable[[], Awaitable[Any]], count: int, concurrency: int) -> tuple[float, list[float]]:
    """Seconds for all, and for each in order."""
    each: list[float] = []
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            began = time.perf_counter()
            await one()
            each.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - began, sorted(each)


async def cold(directory: str, concurrency: int, count: int) -> float:
    """Executions per second of a cold interpreter."""

    async def one() -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", f"{sys.executable} {directory}/main.py", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert out == b"2\n"

    seconds, _ = await timed(one, count, concurrency)
    return count / seconds


def cold_seconds(directory: str, code: str) -> float:
    Path(directory, "main.py").write_text(code)
    began = time.perf_counter()
    subprocess.run([sys.executable, f"{directory}/main.py"], check=True, capture_output=True)
    return time.perf_counter() - began


async def execution_figures(url: str, server: psutil.Process, count: int) -> dict[str, float]:
    cpus = len(os.sched_getaffinity(0))
    figures: dict[str, float] = {}
    async with SandboxClient(url) as client:

        async def one() -> None:
            assert (await client.run(CODE)).stdout == "2\n"

        while (await client.run(IMPORTS)).execution_time > 0.2:  # not all is preloaded yet
            pass
        await client.run("1", session_id="warm")
        await timed(one, 50, 4)  # connections, caches
        before = cpu_seconds(server)
        seconds, _ = await timed(one, count, 8)
        figures["cpu_ms_per_exec"] = (cpu_seconds(server) - before) / count * 1000
        figures["executions_per_second_c8"] = count / seconds
        seconds, each = await timed(one, count // 2, 64)
        figures["executions_per_second_c64"] = count // 2 / seconds
        figures["p99_ms_c64"] = each[int(len(each) * 0.99)] * 1000
        seconds, each = await timed(one, count // 4, 1)
        figures["p50_ms_c1"], figures["p99_ms_c1"] = (each[int(len(each) * part)] * 1000 for part in (0.5, 0.99))
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "main.py").write_text(CODE)
            colds, ours = [], []
            for _ in range(3):
                colds.append(await cold(directory, 2 * cpus, max(20, count // 20)))
                seconds, _ = await timed(one, count // 4, 2 * cpus)
                ours.append(count // 4 / seconds)
            figures["executions_per_second_cold"] = statistics.median(colds)
            figures["vs_python_cold"] = statistics.median(ours) / statistics.median(colds)
            _, warm = await timed(lambda: client.run(IMPORTS), 20, 1)
            bare = statistics.median(cold_seconds(directory, IMPORTS) for _ in range(5))
            figures["import_ms"], figures["import_ms_cold"] = warm[10] * 1000, bare * 1000
            figures["preloaded_import_speedup"] = bare / warm[10]
    return figures


async def session_figures(url: str, count: int) -> dict[str, float]:
    async with SandboxClient(url) as client:
        begun = time.perf_counter()
        await client.run("x = 1", session_id="bench")
        begun = time.perf_counter() - begun
        beyond = []
        for _ in range(count):
            began = time.perf_counter()
            done = await client.run("x = x + 1", session_id="bench")
            beyond.append(time.perf_counter() - began - done.execution_time)
        assert (await client.run("x", session_id="bench")).stdout == f"{count + 1}\n"
    return {"session_begin_ms": begun * 1000, "session_cell_ms": statistics.median(beyond) * 1000}


async def lost(url: str, requests: int) -> dict[str, float]:
    """Everything at once: each must get its own result, or be refused."""
    bad = refused = 0

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal bad, refused
        body = {"code": f"print({number})", "language": "python", "run_timeout": 60}
        try:
            async with session.post(f"{url}/run_code", json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            bad += 1
            return
        refused += response.status == 429
        bad += response.status != 429 and answer.get("run_result", {}).get("stdout") != f"{number}\n"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, number) for number in range(requests)))
    return {"overload_requests": requests, "overload_refused": refused, "lost": bad}


def bare_fork(count: int) -> float:
    done = subprocess.run(
        [sys.executable, HERE / "bare_fork.py", str(count)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["cpu_ms_per_exec"])


def measure(count: int) -> dict[str, float]:
    """Everything that is printed."""
    figures: dict[str, float] = {}
    with serving() as (url, server):
        ratios, ours = [], []
        for _ in range(3):  # alternately, so that both meet the same noise
            bare = bare_fork(count // 2)
            figures |= uvloop.run(execution_figures(url, server, count))
            ratios.append(figures["cpu_ms_per_exec"] / bare)
            ours.append(figures["cpu_ms_per_exec"])
        figures["cpu_ms_per_exec"] = statistics.median(ours)
        figures["vs_bare_isolated_fork"] = statistics.median(ratios)
        figures |= uvloop.run(session_figures(url, count // 2))
    capacity, queue = 4, 121
    with serving("--capacity", str(capacity), "--queue", str(queue)) as (url, _):
        figures |= uvloop.run(lost(url, 4 * (capacity + queue)))
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the executions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(400 if options.quick else 1600)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))
    if broken := [name for name, holds in BOUNDS.items() if not holds(figures[name])]:
        sys.exit(f"out of bounds: {', '.join(broken)}")


if __name__ == "__main__":
    main()
