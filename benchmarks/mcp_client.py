"""Compare calls of MCP tools with the bare client of the SDK, and count the processes that sessions leave.

    python benchmarks/mcp_client.py [--quick] [--json]

The server is @modelcontextprotocol/server-everything over stdio, and its tool `echo` is called. `vs_bare_sdk` is the
time of a call through a tool instance, which validates the arguments and can time out, relative to the SDK's client in
the same run. Then another process opens many sessions at once, each with its own server, and calls a tool in each. It
is killed with SIGKILL; `orphans` is the number of its servers' processes that remain. Exits with status 1 if a call
takes more than 1.3 times as long, or if a process remains.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client, StdioServerParameters
from mcp_servers import server_program, wait_until_gone
from report import report

from toolroll import BaseTool, ToolInstance
from toolroll.tools.mcp.mcp_tool import load_mcp_tools

SERVER = "mcp-server-everything"
CALLS_PER_ROUND = 20
BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_sdk": lambda value: value <= 1.3,
    "orphans": lambda value: value == 0,
}
SESSIONS_TIMEOUT_S = 600
END_TIMEOUT_S = 20


def load_echo(**settings: Any) -> BaseTool[Any]:
    [echo] = load_mcp_tools({"type": "mcp", "command": server_program(SERVER), "tools": ["echo"], **settings})
    return echo


async def us_per_call(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        await call()
    return (time.perf_counter() - began) / CALLS_PER_ROUND * 1e6


async def measure_calls(rounds: int) -> dict[str, float]:
    """Measure both in turns, so that a change of the machine's load affects both."""
    arguments = {"message": "hello"}
    bare_times, tool_times = [], []
    server = StdioServerParameters(command=server_program(SERVER))
    async with Client(server) as client, ToolInstance(load_echo()) as instance:
        assert (await instance.execute(arguments)).response.text == "Echo: hello"
        await us_per_call(lambda: client.call_tool("echo", arguments))  # warm-up of both servers
        await us_per_call(lambda: instance.execute(arguments))
        for _ in range(rounds):
            bare_times.append(await us_per_call(lambda: client.call_tool("echo", arguments)))
            tool_times.append(await us_per_call(lambda: instance.execute(arguments)))
    ratios = [tool / bare for tool, bare in zip(tool_times, bare_times, strict=True)]
    return {
        "us_per_call": round(statistics.median(tool_times), 1),
        "us_per_call_bare_sdk": round(statistics.median(bare_times), 1),
        "vs_bare_sdk": round(statistics.median(ratios), 2),
    }


async def open_sessions(count: int, directory: str) -> None:
    """Open sessions, print their number, and keep them."""
    echo = load_echo(scope="trajectory", args=["stdio", directory], start_timeout=SESSIONS_TIMEOUT_S)
    async with AsyncExitStack() as stack:
        sessions = [ToolInstance(echo) for _ in range(count)]
        await asyncio.gather(*map(stack.enter_async_context, sessions))
        results = await asyncio.gather(*(one.execute({"message": str(n)}) for n, one in enumerate(sessions)))
        print(sum(result.response.text == f"Echo: {n}" for n, result in enumerate(results)), flush=True)
        await asyncio.sleep(SESSIONS_TIMEOUT_S)


def measure_sessions(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as marker:
        command = [sys.executable, __file__, "--open", str(count), marker]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout is not None
                sessions = int(worker.stdout.readline())
                seconds = time.perf_counter() - began
            finally:
                worker.kill()
        orphans = len(wait_until_gone(marker, END_TIMEOUT_S))
    return {"sessions": sessions, "seconds_to_open": round(seconds, 1), "orphans": orphans}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure fewer calls, and 8 sessions instead of 200")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        asyncio.run(open_sessions(int(options.open[0]), options.open[1]))
        return
    figures = asyncio.run(measure_calls(rounds=75 if options.quick else 500))
    figures |= measure_sessions(8 if options.quick else 200)
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
