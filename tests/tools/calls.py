"""A process that calls the code interpreter as a rollout would: many trajectories at once, each with its instance.

    python calls.py '{"config": {…}, "calls": [[CODE, EXPECTED], …], "concurrency": 64, "deadline": 30}'

It joins the Ray cluster in RAY_ADDRESS, waits for a line on stdin, makes the calls, and prints one JSON line: for each
call "ok" (the answer was EXPECTED), "infra", or what was wrong; and what is left in this process.
"""

import asyncio
import json
import sys
import time
from typing import Any

import psutil
import ray

from toolroll.errors import Fault, fault_of
from toolroll.limiter.limiter import get_limiter
from toolroll.tools.instance import ToolInstance
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool


async def call(tool: SandboxFusionTool, code: str, expected: str, deadline: float) -> str:
    try:
        async with ToolInstance(tool) as instance:
            result = await instance.execute({"code": code}, deadline=time.monotonic() + deadline)
    except Exception as error:
        return "infra" if fault_of(error) is Fault.INFRA else f"{type(error).__name__}: {error}"
    said = str(result.response.text)
    return (
        "ok" if said == expected or (expected.startswith("…") and expected[1:] in said) else f"{code!r} gave {said!r}"
    )


async def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    tool = SandboxFusionTool(job["config"])
    await call(tool, "1", "1", 30)  # the lease, and a connection
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

    def left() -> dict[str, int]:
        to_sandbox = [one for one in psutil.Process().net_connections() if one.raddr and one.raddr.port == port]
        slots = {"in_use": limiter.in_use, "waiting": limiter.waiting}
        tasks = len(asyncio.all_tasks()) - 1
        return {"instances": len(tool.instances), **slots, "tasks": tasks, "connections": len(to_sandbox)}

    ends = time.monotonic() + 20
    while any(left().values()) and time.monotonic() < ends:  # idle connections are closed after some seconds
        await asyncio.sleep(0.1)
    print(json.dumps({"outcomes": outcomes, "left": left()}), flush=True)
    limiter.close()


ray.init(log_to_driver=False, logging_level="warning")
asyncio.run(main())
