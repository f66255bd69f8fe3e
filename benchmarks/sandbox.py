"""Measure the cost of the sandbox server, compared with a bare isolated fork and with a cold interpreter.

    python benchmarks/sandbox.py [--quick] [--json]

- `cpu_ms_per_exec`: CPU time of the whole server (HTTP, zygotes, programs) per request of `print(1 + 1)`.
- `vs_bare_isolated_fork`: its ratio to `bare_fork.py`, which uses the same isolation without a server.
- `vs_python_cold`: executions per second of the server, divided by those of `bash -c "python main.py"` without
  isolation, at the same concurrency.
- `preloaded_import_speedup`: speedup of a program that imports numpy, sympy and pandas.
- `session_cell_ms`: time of a request in addition to the run time of its cell.
- `compiled_case_speedup`: time of 20 different C++ programs, divided by that of 20 test cases of one program.
- `lost`: requests that got neither their own result nor a 429, when four times as many requests arrive at once as fit
  into the server and its queue.

Exits with status 1 if a bound is violated.
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
CPP = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }\n"
CASES = 20
IMPORTS = "import numpy, sympy, pandas\nprint(2)"
BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_isolated_fork": lambda value: value <= 1.6,
    "preloaded_import_speedup": lambda value: value >= 30,
    "compiled_case_speedup": lambda value: value >= 5,
    "lost": lambda value: value == 0,
    "vs_python_cold": lambda value: value >= 1.5,  # wall-clock times vary: this only detects gross regressions
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
    """Return the CPU time of the server's processes, including exited children."""
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        total += sum(process.cpu_times()[:4])
    return total


async def timed(call: Callable[[], Awaitable[Any]], count: int, concurrency: int) -> tuple[float, list[float]]:
    """Return the total time and the sorted times of the calls, in seconds."""
    each: list[float] = []
    remaining = iter(range(count))

    async def work() -> None:
        for _ in remaining:
            started = time.perf_counter()
            await call()
            each.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - started, sorted(each)


async def cold_throughput(directory: str, concurrency: int, count: int) -> float:
    """Return the executions per second of a cold interpreter."""

    async def execute() -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", f"{sys.executable} {directory}/main.py", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert out == b"2\n"

    seconds, _ = await timed(execute, count, concurrency)
    return count / seconds


def cold_seconds(directory: str, code: str) -> float:
    Path(directory, "main.py").write_text(code)
    started = time.perf_counter()
    subprocess.run([sys.executable, f"{directory}/main.py"], check=True, capture_output=True)
    return time.perf_counter() - started


async def execution_figures(url: str, server: psutil.Process, count: int) -> dict[str, float]:
    cpus = len(os.sched_getaffinity(0))
    figures: dict[str, float] = {}
    async with SandboxClient(url) as client:

        async def execute() -> None:
            assert (await client.run(CODE)).stdout == "2\n"

        while (await client.run(IMPORTS)).execution_time > 0.2:  # until the scientific zygotes are ready
            pass
        await client.run("1", session_id="warm")
        await timed(execute, 50, 4)  # connections, caches
        before = cpu_seconds(server)
        seconds, _ = await timed(execute, count, 8)
        figures["cpu_ms_per_exec"] = (cpu_seconds(server) - before) / count * 1000
        figures["executions_per_second_c8"] = count / seconds
        seconds, each = await timed(execute, count // 2, 64)
        figures["executions_per_second_c64"] = count // 2 / seconds
        figures["p99_ms_c64"] = each[int(len(each) * 0.99)] * 1000
        seconds, each = await timed(execute, count // 4, 1)
        figures["p50_ms_c1"], figures["p99_ms_c1"] = (each[int(len(each) * part)] * 1000 for part in (0.5, 0.99))
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "main.py").write_text(CODE)
            colds, ours = [], []
            for _ in range(3):
                colds.append(await cold_throughput(directory, 2 * cpus, max(20, count // 20)))
                seconds, _ = await timed(execute, count // 4, 2 * cpus)
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
        started = time.perf_counter()
        await client.run("x = 1", session_id="bench")
        start_time = time.perf_counter() - started
        overheads = []
        for _ in range(count):
            started = time.perf_counter()
            done = await client.run("x = x + 1", session_id="bench")
            overheads.append(time.perf_counter() - started - done.execution_time)
        assert (await client.run("x", session_id="bench")).stdout == f"{count + 1}\n"
    return {"session_begin_ms": start_time * 1000, "session_cell_ms": statistics.median(overheads) * 1000}


async def compile_figures(url: str) -> dict[str, float]:
    """Run programs that differ in a comment, each of which is compiled, and the test cases of one program."""
    seconds = []
    async with SandboxClient(url) as client:
        for codes in ([f"{CPP}// {number}" for number in range(CASES)], [CPP] * CASES):
            started = time.perf_counter()
            for number, code in enumerate(codes):
                assert (await client.run(code, "cpp", stdin=str(number))).stdout == str(2 * number)
            seconds.append(time.perf_counter() - started)
    return {"compiled_case_speedup": seconds[0] / seconds[1]}


async def overload_figures(url: str, requests: int) -> dict[str, float]:
    """Send all requests at once. Each must get its own result or be rejected."""
    lost = rejected = 0

    async def send(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal lost, rejected
        body = {"code": f"print({number})", "language": "python", "run_timeout": 60}
        try:
            async with session.post(f"{url}/run_code", json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            lost += 1
            return
        rejected += response.status == 429
        lost += response.status != 429 and answer.get("run_result", {}).get("stdout") != f"{number}\n"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(send(session, number) for number in range(requests)))
    return {"overload_requests": requests, "overload_refused": rejected, "lost": lost}


def bare_fork(count: int) -> float:
    done = subprocess.run(
        [sys.executable, HERE / "bare_fork.py", str(count)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["cpu_ms_per_exec"])


def measure(count: int) -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    with serving() as (url, server):
        ours, bare = [], []
        for _ in range(5):  # alternately, so that both are subject to the same noise, which only adds to CPU times
            bare.append(bare_fork(count // 2))
            figures |= uvloop.run(execution_figures(url, server, count))
            ours.append(figures["cpu_ms_per_exec"])
        figures["cpu_ms_per_exec"] = min(ours)
        figures["vs_bare_isolated_fork"] = min(ours) / min(bare)
        figures |= uvloop.run(session_figures(url, count // 2))
        figures |= uvloop.run(compile_figures(url))
    capacity, queue = 4, 121
    with serving("--capacity", str(capacity), "--queue", str(queue)) as (url, _):
        figures |= uvloop.run(overload_figures(url, 4 * (capacity + queue)))
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a quarter of the executions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(240 if options.quick else 960)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))
    if violated := [name for name, holds in BOUNDS.items() if not holds(figures[name])]:
        sys.exit(f"out of bounds: {', '.join(violated)}")


if __name__ == "__main__":
    main()
