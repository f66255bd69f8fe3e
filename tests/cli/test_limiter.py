"""The `toolroll limiter` command on a real cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

HOLD_SLOTS = """
import asyncio, ray
from toolroll.limiter.cluster import ClusterLimiter
ray.init(log_to_driver=False, logging_level="error")
async def main():
    limiter = ClusterLimiter("http://sandbox:8080", 4)
    waiting = [asyncio.create_task(limiter.slot(hold=60).acquire()) for _ in range(6)]
    while limiter.in_use < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    while limiter.in_use < 6:
        await asyncio.sleep(0.01)
    print("six", flush=True)
asyncio.run(main())
"""


def toolroll(*words: str) -> "subprocess.CompletedProcess[str]":
    command = Path(sys.executable).with_name("toolroll")
    return subprocess.run(
        [command, "limiter", *words], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"}
    )


def test_status_and_set(cluster: str) -> None:
    user = subprocess.Popen([sys.executable, "-c", HOLD_SLOTS], stdout=subprocess.PIPE, text=True)
    with user:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
        shown = json.loads(toolroll("status", "--json", "--address", cluster).stdout)["http://sandbox:8080"]
        assert (shown["limit"], shown["in_use"], shown["waiting"], shown["holders"]) == (4, 4, 2, 1)
        assert "http://sandbox:8080" in toolroll("status", "--address", cluster).stdout
        wrong = toolroll("set", "http://sandbox:8081", "6", "--address", cluster)
        assert wrong.returncode == 2
        assert "Did you mean 'http://sandbox:8080'?" in wrong.stderr
        changed = toolroll("set", "http://sandbox:8080", "6", "--address", cluster)
        assert changed.stdout == "http://sandbox:8080: 4 → 6\n"
        assert user.stdout.readline() == "six\n"


def test_unreachable_cluster_prints_one_line() -> None:
    done = toolroll("status", "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert "Cannot connect to a Ray cluster at '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr
