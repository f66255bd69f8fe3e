"""Measure the cost of the sandbox server, compared with a bare isolated fork and with a cold interpreter.

    python benchmarks/sandbox.py [--quick] [--json]

- `cpu_ms_per_exec`: CPU time of the whole server (HTTP, zygotes, programs) per request of `print(1 + 1)`.
- `front_cpu_ms_per_request`: the part of the server's main process, without zygotes and programs, at concurrency 8.
- `vs_bare_isolated_fork`: ratio of `cpu_ms_per_exec` to `bare_fork.py`, which uses the same isolation without a server.
- `p50_c1_vs_bare_fork`: time of one request at a time, divided by that of one bare isolated fork with pipes.
- `vs_python_cold`: executions per second of the server, divided by those of `bash -c "python main.py"` without
  isolation, at the same concurrency.
- `preloaded_import_speedup`: speedup of a program that imports numpy, sympy and pandas.
- `session_cell_ms`: time of a request in addition to the run time of its cell.
- `cell_vs_ping`: time of a request of the cell `x = x + 1`, divided by that of a bare `GET /v1/ping`.
- `compiled_case_speedup`: time of 20 different C++ programs, divided by that of 20 test cases of one program.
- `fronts_scaling`: responses per second of a server with two fronts, divided by those of a server with one. The
  requests have expired: they pass the front and the hub, and run no program.
- `fronts_cpu_ratio`: the same for the CPU time per request, including the hub's.
- `hub_cpu_ms_per_request`: CPU time of the hub of two fronts per request of `print(1 + 1)`, which it admits and ends,
  at some hundred requests per second.
- `hub_cpu_ms_when_busy`: the same for the expired requests, at thousands per second, where the hub is woken up less
  often.
- `lost`: requests that got neither their own result nor a 429, when four times as many requests arrive at once as fit
  into the server and its queue, and when one of two fronts is killed.

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
from http_load import HttpLoad
from report import report

from toolroll.errors import SandboxUnavailable
from toolroll.sandbox.client import SandboxClient

HERE = Path(__file__).parent
CODE = "print(1 + 1)"
CPP = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }\n"
CASES = 20
IMPORTS = "import numpy, sympy, pandas\nprint(2)"
EXPIRED = {"code": CODE, "language": "python", "deadline": 1}
CONNECTIONS = 16
BOUNDS: dict[str, Callable[[float], bool]] = {
    "cell_vs_ping": lambda value: value <= 5,
    "p50_c1_vs_bare_fork": lambda value: value <= 2.5,
    "vs_bare_isolated_fork": lambda value: value <= 2,
    "fronts_cpu_ratio": lambda value: value <= 1.4,
    "preloaded_import_speedup": lambda value: value >= 30,
    "compiled_case_speedup": lambda value: value >= 5,
    "lost": lambda value: value == 0,
    "vs_python_cold": lambda value: value >= 2,
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
        before, front_before = cpu_seconds(server), sum(server.cpu_times()[:2])
        seconds, _ = await timed(execute, count, 8)
        figures["cpu_ms_per_exec"] = (cpu_seconds(server) - before) / count * 1000
        figures["front_cpu_ms_per_request"] = (sum(server.cpu_times()[:2]) - front_before) / count * 1000
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
        cells, overheads, pings = [], [], []
        for _ in range(count):
            started = time.perf_counter()
            done = await client.run("x = x + 1", session_id="bench")
            cells.append(time.perf_counter() - started)
            overheads.append(cells[-1] - done.execution_time)
            started = time.perf_counter()
            await client.ping()
            pings.append(time.perf_counter() - started)
        assert (await client.run("x", session_id="bench")).stdout == f"{count + 1}\n"
    return {
        "session_begin_ms": start_time * 1000,
        "session_cell_ms": statistics.median(overheads) * 1000,
        "cell_vs_ping": statistics.median(cells) / statistics.median(pings),
    }


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


async def hub_figures(url: str, server: psutil.Process, requests: int) -> dict[str, float]:
    async with SandboxClient(url) as client:

        async def execute() -> None:
            assert (await client.run(CODE)).stdout == "2\n"

        await timed(execute, CONNECTIONS, CONNECTIONS)
        before = sum(server.cpu_times()[:2])
        await timed(execute, requests, CONNECTIONS)
    return {"hub_cpu_ms_per_request": (sum(server.cpu_times()[:2]) - before) / requests * 1000}


async def killed_front_figures(url: str, server: psutil.Process, requests: int) -> dict[str, float]:
    """Kill a front when some of the requests are done. The client sends those of the dead front again."""
    done = lost = 0
    numbers = iter(range(requests))

    async def work(client: SandboxClient) -> None:
        nonlocal done, lost
        for number in numbers:
            try:
                lost += (await client.run(f"print({number})", run_timeout=60)).stdout != f"{number}\n"
            except SandboxUnavailable:
                lost += 1
            done += 1
            if done == requests // 4:
                guard = server.children()[0]
                guard.children()[0].kill()

    async with SandboxClient(url) as client:
        await asyncio.gather(*(work(client) for _ in range(CONNECTIONS)))
    return {"lost": lost}


def front_figures(requests: int) -> dict[str, float]:
    """Measure servers with one front and with two alternately."""
    rates: list[list[float]] = [[], []]
    cpu_s: list[list[float]] = [[], []]
    hub_s: list[float] = []
    with serving("--fronts", "1") as one, serving("--fronts", "2") as two:
        wait_until_idle(one[1], two[1])
        for _ in range(5):
            for number, (url, server) in enumerate((one, two)):
                load = HttpLoad(f"{url}/run_code", EXPIRED, CONNECTIONS)
                before, hub_before = cpu_seconds(server), sum(server.cpu_times()[:2])
                rates[number].append(uvloop.run(load.rate(1.0)))
                assert set(load.responses) == {504}
                responses = load.responses.total()
                cpu_s[number].append((cpu_seconds(server) - before) / responses)
                if server is two[1]:
                    hub_s.append((sum(server.cpu_times()[:2]) - hub_before) / responses)
        figures = uvloop.run(hub_figures(*two, 4 * requests))  # many, as CPU times have a resolution of 10 ms
        figures |= uvloop.run(killed_front_figures(*two, requests))
    each_rate = [statistics.median(each) for each in rates]
    figures["responses_per_second_1_front"], figures["responses_per_second_2_fronts"] = each_rate
    figures["fronts_scaling"] = each_rate[1] / each_rate[0]
    figures["fronts_cpu_ratio"] = statistics.median(both / single for single, both in zip(*cpu_s, strict=True))
    figures["hub_cpu_ms_when_busy"] = statistics.median(hub_s) * 1000
    return figures


def wait_until_idle(*servers: psutil.Process) -> None:
    """Wait until all zygotes of the servers have imported their modules."""
    before, now = -1.0, sum(map(cpu_seconds, servers))
    while now - before > 0.05:
        time.sleep(1.0)
        before, now = now, sum(map(cpu_seconds, servers))


def bare_fork_figures(count: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "bare_fork.py"), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {f"bare_{name}": value for name, value in json.loads(done.stdout).items()}


def measure(count: int) -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    with serving("--fronts", "1") as (url, server):
        rounds = [bare_fork_figures(count // 2) | uvloop.run(execution_figures(url, server, count)) for _ in range(5)]
        for each in rounds:  # the speed of a shared machine varies less within a round
            each["vs_bare_isolated_fork"] = each["cpu_ms_per_exec"] / each["bare_cpu_ms_per_exec"]
            each["p50_c1_vs_bare_fork"] = each["p50_ms_c1"] / each["bare_wall_ms_per_exec"]
        figures |= {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        figures |= uvloop.run(session_figures(url, count // 2))
        figures |= uvloop.run(compile_figures(url))
    capacity, queue = 4, 121
    with serving("--fronts", "2", "--capacity", str(capacity), "--queue", str(queue)) as (url, _):
        figures |= uvloop.run(overload_figures(url, 4 * (capacity + queue)))
    of_fronts = front_figures(count)
    lost = figures["lost"] + of_fronts["lost"]
    figures |= of_fronts | {"lost": lost}
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a quarter of the executions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(240 if options.quick else 960)
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
