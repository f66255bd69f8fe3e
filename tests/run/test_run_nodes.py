"""A run on several real Ray nodes, of which a worker is killed and then a whole node: all is recorded once."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import NetnsNodes, can_make_namespaces
from rollout import small_tokenizer

from toolroll.records.reader import read

TESTS = Path(__file__).parent.parent
ROWS, N, LIMIT, PORT = 120, 4, 6, 8078


@pytest.fixture
def nodes() -> Iterator[NetnsNodes]:
    if reason := can_make_namespaces():
        pytest.skip(f"NOT TESTED: the death of nodes needs network namespaces, which can't be made here: {reason}")
    with NetnsNodes(workers=2) as nodes:
        yield nodes


def configure(directory: Path, server: str) -> Path:
    """A run whose trajectories take a second and call a tool that is counted."""
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
        "engine": {"kind": "run.engine_of_fixed_latency.FixedLatency", "urls": [], "options": options},
        "model": str(model),
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
        assert time.monotonic() < ends, "it doesn't go on"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def worker_on(nodes: NetnsNodes, index: int) -> psutil.Process:
    """A worker's process on that host."""
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


def test_a_worker_and_a_node_are_killed_in_mid_run(nodes: NetnsNodes, tmp_path: Path) -> None:
    server = nodes.popen(nodes.head, str(TESTS / "limiter" / "counting_server.py"), nodes.head.ip, str(PORT))
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    file = configure(tmp_path, f"http://{nodes.head.ip}:{PORT}")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = nodes.popen(nodes.head, "-m", "toolroll.cli", "run", str(file), "--json", env={"PYTHONPATH": path})
    wait_for(tmp_path, 60, process)
    worker_on(nodes, 1).send_signal(signal.SIGKILL)
    wait_for(tmp_path, 160, process)
    nodes.kill_node(nodes.hosts[2])
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    figures = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    seen = Counter((int(str(one.group)), int(str(one.sample))) for one in read(tmp_path / "records"))
    assert seen == Counter((row, sample) for row in range(ROWS) for sample in range(N)), "all of it, once"
    assert figures["done"] == ROWS * N
    assert figures["lost_workers"] >= 2
    stats = json.loads(
        nodes.run(
            nodes.head,
            "-c",
            f"import urllib.request as u; print(u.urlopen('http://{nodes.head.ip}:{PORT}/stats').read().decode())",
        )
    )
    assert stats["most"] == LIMIT, "it was reached, and held"
    assert {one.outcome for one in read(tmp_path / "records")} == {"ok"}
    server.kill()
    server.communicate()
