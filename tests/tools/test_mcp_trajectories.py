"""Many trajectories at once, each with a separate MCP server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mcp_servers import processes_with, server_program, wait_until_gone

pytestmark = pytest.mark.timing

COUNT = 200
TIMEOUT_S = 550
KILL_TIMEOUT_S = 20


def test_each_trajectory_has_a_server_and_none_remains(
    root: Path, tmp_path: Path, report_figure: Callable[[str], None]
) -> None:
    command = [sys.executable, root / "tests/tools/mcp_worker.py", server_program("mcp-server-filesystem")]
    environment = {**os.environ, "PYTHONPATH": str(root / "tests")}
    marker = str(tmp_path)

    def servers() -> list[psutil.Process]:
        return [one for one in processes_with(marker) if "node" in one.name()]

    with subprocess.Popen(
        [*command, tmp_path, str(COUNT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as worker:
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None

            def next_step() -> dict[str, object]:
                return dict(json.loads(worker.stdout.readline()))  # type: ignore[union-attr]

            assert next_step() == {"step": "all", "right": COUNT}
            running = servers()
            assert len(running) == COUNT
            private = sum(process.memory_full_info().uss for process in running) / COUNT
            guards = [one for one in processes_with("server_guard.py") if marker in one.info["cmdline"]]
            guard_private = sum(process.memory_full_info().uss for process in guards) / COUNT
            report_figure(f"{COUNT} servers, {private / 2**20:.0f} MB each, guards {guard_private / 2**20:.1f} MB each")
            print("", file=worker.stdin, flush=True)
            assert next_step() == {"step": "ended", "outcomes": ["ok"] * (COUNT // 2), "calls": COUNT}
            assert len(servers()) == COUNT // 2
            print("", file=worker.stdin, flush=True)
            assert next_step() == {"step": "cancelled"}
            assert len(servers()) == COUNT // 4
        finally:
            worker.kill()
    assert wait_until_gone(marker, KILL_TIMEOUT_S) == []
