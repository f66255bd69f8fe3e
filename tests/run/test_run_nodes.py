"""A run on several Ray nodes records every sample once, although a worker and a node are killed."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import NetnsNodes
from rollout import small_tokenizer

from toolroll.records.reader import read_records

pytestmark = pytest.mark.timing  # shares its nodes with the tests of the limiter

TESTS = Path(__file__).parent.parent
ROWS, N, LIMIT, PORT = 70, 4, 6, 8078


def configure(directory: Path, server: str) -> Path:
    """Write the config of a run whose trajectories take a second and call a counted tool."""
    model = directory / "model"
    tokenizer = small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    )
    tokenizer.save_pretrained(model)
    rows = [json.dumps({"prompt": f"Question {number}?"}) for number in range(ROWS)]
    (directory / "data.jsonl").write_text("\n".join(rows) + "\n")
    tool = {"class_name": "run.counted_tool.CountedTool", "config": {"limit": LIMIT, "server": server, "ms": 400}}
    (directory / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    options = {"tokenizer": str(model), "delay": 1.0, "has_tool": True}
    config = {
        "engine": {"kind": "run.fixed_latency_engine.FixedLatency", "urls": [], "options": options},
        "model": str(model),
        "tool_prompt": "hermes",
        "tools": "tools.yaml",
        "data": {"path": "data.jsonl"},
        "n": N,
        "rollout_data_dir": "records",
        "prompts_per_step": 16,
        "max_in_flight": 12,
        "cluster": "auto",
        "workers": 3,
    }
    file = directory / "run.yaml"
    file.write_text(json.dumps(config))
    return file


def recorded(directory: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in directory.glob("records/*/*.jsonl"))


def wait_for(directory: Path, count: int, process: Any) -> None:
    ends = time.monotonic() + 120
    while recorded(directory) < count:
        assert time.monotonic() < ends, "the run makes no progress"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def worker_on(nodes: NetnsNodes, index: int) -> psutil.Process:
    """Return the process of a worker on a host."""
    namespace = os.readlink(f"/proc/{nodes._first[index].pid}/ns/net")
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        try:
            if "WorkerProcess" in " ".join(process.info["cmdline"] or ()) and (
                os.readlink(f"/proc/{process.pid}/ns/net") == namespace
            ):
                return process
        except OSError:
            continue
    raise AssertionError(f"no worker on host {index}")


def test_killed_worker_and_node_lose_no_sample(nodes: NetnsNodes, tmp_path: Path) -> None:
    nodes.kill_node(nodes.hosts[1])  # in case an earlier test left processes
    nodes.start_node(nodes.hosts[1])
    server = nodes.popen(nodes.head, str(TESTS / "limiter" / "counting_server.py"), nodes.head.ip, str(PORT))
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    file = configure(tmp_path, f"http://{nodes.head.ip}:{PORT}")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = nodes.popen(nodes.head, "-m", "toolroll.cli", "run", str(file), "--json", env={"PYTHONPATH": path})
    wait_for(tmp_path, 40, process)
    worker_on(nodes, 1).send_signal(signal.SIGKILL)
    wait_for(tmp_path, 120, process)
    nodes.kill_node(nodes.hosts[2])
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    figures = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    seen = Counter((int(str(one.group)), int(str(one.sample))) for one in read_records(tmp_path / "records"))
    assert seen == Counter((row, sample) for row in range(ROWS) for sample in range(N)), "each sample is recorded once"
    assert figures["done"] == ROWS * N
    assert figures["lost_workers"] >= 1  # a worker that had no sample when its node died is not counted
    stats = json.loads(
        nodes.run(
            nodes.head,
            "-c",
            f"import urllib.request as u; print(u.urlopen('http://{nodes.head.ip}:{PORT}/stats').read().decode())",
        )
    )
    assert stats["max_in_flight"] == LIMIT, "the limit is reached and never exceeded"
    assert {one.outcome for one in read_records(tmp_path / "records")} == {"ok"}
    server.kill()
    server.communicate()
