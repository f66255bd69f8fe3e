"""What a second worker brings, and what the board costs: whole runs on a Ray cluster of two nodes, on one machine.

    python benchmarks/cluster.py [--quick] [--json]

The engine is scripted: each of a trajectory's two turns takes a second, so that a worker is as fast as it has
trajectories in flight, and the machine's cores don't matter. `scaling_2_workers` is the trajectories per second of two
workers, on two nodes, over those of one. Records are written, as in any run.

`board_us_per_trajectory` is the CPU time of the board's process, which hands out all work and hears of all that is
done, for one trajectory. From it follow `board_trajectories_per_s`, what one board can take, and
`board_cores_at_1000_nodes`, if each node did as many trajectories per second as `trajectories_per_s_of_a_node` says.

Ends with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
from toolroll.run.status import Status

IN_FLIGHT = 100
"""Trajectories at once, of each worker."""
SECONDS_PER_TURN = 1.0
A_BUSY_NODE = 40.0
"""Trajectories per second of a node, for the arithmetic: eight GPUs that sample 20,000 tokens per second each, in
trajectories of 4,000."""
BOUNDS: dict[str, Callable[[float], bool]] = {"scaling_2_workers": lambda value: value >= 1.8}


class Slow(ScriptedEngine):
    """Calls no tool, and takes its time: what a run costs beside its engine and its tools is seen best so."""

    def __init__(self, urls: Any, *, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        end = [*loaded.encode("That is all.", add_special_tokens=False), loaded.convert_tokens_to_ids("<|im_end|>")]
        super().__init__([end], delay=2 * SECONDS_PER_TURN)


def configure(directory: Path, model: str, prompts: int, workers: int) -> RunConfig:
    """A run of so many prompts."""
    directory.mkdir()
    (directory / "data.jsonl").write_text("".join(f'{{"prompt": "Question {n}?"}}\n' for n in range(prompts)))
    config = {
        "engine": {"kind": "cluster.Slow", "urls": [], "options": {"tokenizer": model}},
        "model": model,
        "data": {"path": str(directory / "data.jsonl")},
        "rollout_data_dir": str(directory / "records"),
        "max_in_flight": IN_FLIGHT,
        "cluster": "auto",
        "workers": workers,
    }
    file = directory / "run.yaml"
    file.write_text(json.dumps(config))
    return RunConfig.load(file)


async def run(config: RunConfig) -> tuple[Status, float]:
    """How it ended, and what the board's process used of the CPU in seconds."""
    async with Run(config) as running:
        while (await running.status()).workers < (config.workers or 1):
            await asyncio.sleep(0.1)
        before, began = _board_cpu(), await running.status()
        await running.wait()
        ended = await running.status()
        used = _board_cpu() - before
    done = ended.done - began.done
    print(f"{config.workers} workers: {done} in {ended.seconds - began.seconds:.1f} s", file=sys.stderr)
    return ended, used / done


def _board_cpu() -> float:
    """Seconds of CPU that the board's process has used."""
    for process in psutil.process_iter(["cmdline"]):
        if "ray::RunBoard" in " ".join(process.info["cmdline"] or ()):
            times = process.cpu_times()
            return float(times.user + times.system)
    raise RuntimeError("there is no process of a board")


async def measure(quick: bool, model: str) -> dict[str, float]:
    """All figures."""
    rounds = 6 if quick else 30
    rates, costs = [], []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        for workers in (1, 2):
            prompts = rounds * IN_FLIGHT * workers
            status, cost = await run(configure(Path(scratch) / str(workers), model, prompts, workers))
            rates.append(status.done / status.seconds)
            costs.append(cost)
    cost = min(costs)
    return {
        "scaling_2_workers": round(rates[1] / rates[0], 3),
        "trajectories_per_s_1_worker": round(rates[0], 1),
        "trajectories_per_s_2_workers": round(rates[1], 1),
        "board_us_per_trajectory": round(cost * 1e6, 1),
        "board_trajectories_per_s": round(1 / cost),
        "trajectories_per_s_of_a_node": A_BUSY_NODE,
        "board_cores_at_1000_nodes": round(1000 * A_BUSY_NODE * cost, 2),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer trajectories")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "rollout"))
    import small_tokenizer  # type: ignore[import-not-found]

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000})
    cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    ray.init(cluster.address, log_to_driver=False, include_dashboard=False)
    try:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as model:
            made = small_tokenizer.make(
                small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
            )
            made.save_pretrained(model)
            figures = asyncio.run(measure(options.quick, model))
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    broken = [name for name, holds in BOUNDS.items() if not holds(figures[name])]
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:>12,}")
    for name in broken:
        print(f"out of bounds: {name} = {figures[name]}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
