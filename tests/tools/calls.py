"""Process that calls the code interpreter like a rollout: many concurrent trajectories, each with its own instance.

    python calls.py '{"config": {…}, "calls": [[CODE, EXPECTED], …], "concurrency": 64, "deadline": 30}'

It joins the Ray cluster at RAY_ADDRESS, waits for a line on stdin, makes the calls, and prints one JSON line with the
outcome of each call ("ok" if the output was EXPECTED, "infra", or a message) and the number of unreleased objects.
"""

import asyncio
import json
import sys
import time
from typing import Any

import psutil
import ray

from toolroll.errors import Fault, fault_of
from toolroll.limiter.registry import get_limiter
from toolroll.tools.instance import ToolInstance
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool


async def call(tool: SandboxFusionTool, code: str, expected: str, deadline: float) -> str:
    try:
        async with ToolInstance(tool) as instance:
            result = await instance.execute({"code": code}, deadline=time.monotonic() + deadline)
    except Exception as error:
        return "infra" if fault_of(error) is Fault.INFRA else f"{type(error).__name__}: {error}"
    output = str(result.response.text)
    is_expected = output == expected or (expected.startswith("…") and expected[1:] in output)
    return "ok" if is_expected else f"{code!r} returned {output!r}"


async def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    tool = SandboxFusionTool(job["config"])
    await call(tool, "1", "1", 30)  # acquires the lease and opens a connection
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    calls = iter(job["calls"])
    outcomes: list[str] = []

    async def trajectory() -> None:
        for code, expected in calls:
            outcomes.append(await call(tool, code, expected, job["deadline"]))

    await asyncio.gather(*(trajectory() for _ in range(job["concurrency"])))
    limiter = get_limiter(tool.resource, job["config"]["rate_limit"])
    port = int(tool.resource.rsplit(":", 1)[1])

    def unreleased() -> dict[str, int]:
        to_sandbox = [
            connection
            for connection in psutil.Process().net_connections()
            if connection.raddr and connection.raddr.port == port
        ]
        slots = {"in_use": limiter.in_use, "waiting": limiter.waiting}
        tasks = len(asyncio.all_tasks()) - 1
        return {"instances": len(tool.instances), **slots, "tasks": tasks, "connections": len(to_sandbox)}

    give_up = time.monotonic() + 20
    while any(unreleased().values()) and time.monotonic() < give_up:  # idle connections close after a few seconds
        await asyncio.sleep(0.1)
    print(json.dumps({"outcomes": outcomes, "unreleased": unreleased()}), flush=True)
    limiter.close()


ray.init(log_to_driver=False, logging_level="warning")
asyncio.run(main())
