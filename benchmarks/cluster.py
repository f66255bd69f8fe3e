"""Measure the scaling of workers, the cost of the coordinator and the speed of reading data, on a local Ray cluster.

    python benchmarks/cluster.py [--quick] [--json]

- `scaling_2_workers`: throughput of two workers on two nodes relative to one worker. The engine is scripted and each
  trajectory takes two seconds, so throughput depends on the trajectories in flight and not on the machine's cores.
  Records are written as in any run. `coordinator_us_per_trajectory`: CPU time of the coordinator process.
- `coordinator_cores_at_1000_nodes`: CPU use of the coordinator actor with 1,000 workers of 100 trajectories each. A
  trajectory is assumed to last 50 seconds. Every worker exchanges once per second: it reports the trajectories that
  ended in this second, and takes as many new ones.
- `rows_per_s`: speed of reading JSON lines in the coordinator; `rows_per_s_ray_data`: the same with Ray Data.
  `row_in_the_middle_s`: time to the first row of the second half, as needed to resume a run.

Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from report import report

from toolroll.rollout.distributed.worker_pool import local_actor
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.config import DataConfig, RunConfig
from toolroll.run.data import PromptRows
from toolroll.run.resume import SampleItem
from toolroll.run.run import Run
from toolroll.run.run_coordinator import RunCoordinator

IN_FLIGHT = 100
"""Maximum number of concurrent trajectories per worker."""
TRAJECTORY_DELAY_S = 2.0
NODES, IN_FLIGHT_PER_NODE = 1000, 100
TRAJECTORY_DURATION_S = 50
BOUNDS: dict[str, Callable[[float], bool]] = {"scaling_2_workers": lambda value: value >= 1.8}


class SlowEngine(ScriptedEngine):
    """Answers after a fixed delay and calls no tool, so that only the overhead of the run is measured."""

    def __init__(self, urls: Any, *, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        end = [*loaded.encode("That is all.", add_special_tokens=False), loaded.convert_tokens_to_ids("<|im_end|>")]
        super().__init__([end], delay=TRAJECTORY_DELAY_S)


def configure(directory: Path, model: str, prompts: int, workers: int) -> RunConfig:
    """Write and load the config of a run."""
    directory.mkdir()
    (directory / "data.jsonl").write_text("".join(f'{{"prompt": "Question {n}?"}}\n' for n in range(prompts)))
    config = {
        "engine": {"kind": "cluster.SlowEngine", "urls": [], "options": {"tokenizer": model}},
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


async def run(config: RunConfig) -> tuple[float, float]:
    """Return trajectories per second once all workers are registered, and coordinator CPU seconds per trajectory."""
    async with Run(config) as running:
        while (await running.status()).workers < (config.workers or 1):
            await asyncio.sleep(0.05)
        cpu_before, began = _coordinator_cpu(), await running.status()
        await running.wait()
        ended = await running.status()
        used = _coordinator_cpu() - cpu_before
    done, seconds = ended.done - began.done, ended.seconds - began.seconds
    print(f"{config.workers} workers: {done} in {seconds:.1f} s", file=sys.stderr)
    return done / seconds, used / done


def _coordinator_cpu() -> float:
    """Return the CPU seconds that the coordinator process has used."""
    times = _coordinator_process().cpu_times()
    return float(times.user + times.system)


def _coordinator_process() -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        if "ray::RunCoordinator" in " ".join(process.info["cmdline"] or ()):
            return process
    raise RuntimeError("No coordinator process found.")


async def scaling(quick: bool, model: str, scratch: Path) -> dict[str, float]:
    """Measure one worker, then two."""
    rounds = 6 if quick else 30
    rates, costs = [], []
    for workers in (1, 2):
        prompts = rounds * IN_FLIGHT * workers
        rate, cost = await run(configure(scratch / str(workers), model, prompts, workers))
        rates.append(rate)
        costs.append(cost)
    return {
        "scaling_2_workers": round(rates[1] / rates[0], 3),
        "trajectories_per_s_1_worker": round(rates[0], 1),
        "trajectories_per_s_2_workers": round(rates[1], 1),
        "coordinator_us_per_trajectory": round(min(costs) * 1e6, 1),
    }


async def thousand_nodes(model: str, scratch: Path) -> dict[str, float]:
    """Measure a coordinator with 1,000 workers in the middle of a run."""
    per_second = IN_FLIGHT_PER_NODE // TRAJECTORY_DURATION_S
    seconds = 5
    config = configure(scratch / "many", model, NODES * (IN_FLIGHT_PER_NODE + per_second * seconds), NODES)
    coordinator = local_actor(RunCoordinator).remote(config, NODES)
    names = [f"worker-{number}" for number in range(NODES)]
    await asyncio.gather(*(coordinator.register.remote(name) for name in names))
    first = await asyncio.gather(*(coordinator.exchange.remote(name, 1, [], IN_FLIGHT_PER_NODE) for name in names))
    held_items = [list(assignment.items) for assignment in first]
    in_flight = sum(map(len, held_items))
    before = _coordinator_cpu()
    for second in range(seconds):
        requests = [
            coordinator.exchange.remote(
                name, 2 + second, [(item.key, outcome(item.payload)) for item in held[:per_second]], per_second
            )
            for name, held in zip(names, held_items, strict=True)
        ]
        for held, assignment in zip(held_items, await asyncio.gather(*requests), strict=True):
            held[:] = [*held[per_second:], *assignment.items]
    used = _coordinator_cpu() - before
    memory = _coordinator_process().memory_info().rss
    await coordinator.close.remote()
    ray.kill(coordinator)
    return {
        "coordinator_in_flight_at_1000_nodes": in_flight,
        "coordinator_trajectories_per_s_at_1000_nodes": NODES * per_second,
        "coordinator_cores_at_1000_nodes": round(used / seconds, 3),
        "coordinator_mb_at_1000_nodes": round(memory / 1e6),
    }


def outcome(sample: SampleItem) -> SampleOutcome:
    """Return the outcome that a worker reports."""
    return SampleOutcome(sample.row, sample.sample, 1.0, "ok", "stop", 4, 3000, 4000, 3, 0, 0, 50.0, 2.0, 0.1, "exact")


def reading(quick: bool, scratch: Path) -> dict[str, float]:
    """Measure our reader and Ray Data with the same file."""
    from ray import data as ray_data

    count = 200_000 if quick else 2_000_000
    file = scratch / "rows.jsonl"
    question = "A question about some apples, as long as those of GSM8K are: about 250 characters. " * 3
    with file.open("w") as rows:
        rows.writelines(f'{{"prompt": "{question} {n}", "answer": "{n}"}}\n' for n in range(count))
    ours = PromptRows(DataConfig(path=str(file), ground_truth="answer"))
    ray_data.DataContext.get_current().enable_progress_bars = False
    theirs = ray_data.read_json(str(file))
    figures: dict[str, float] = {}
    for name, make in (("", lambda: ours.rows(0)), ("_ray_data", theirs.iter_rows)):
        began = time.perf_counter()
        found = sum(1 for _ in make())
        assert found == count
        figures[f"rows_per_s{name}"] = round(count / (time.perf_counter() - began))
    for name, rows_from in (
        ("", lambda: ours.rows(count // 2)),
        ("_ray_data", lambda: islice(theirs.iter_rows(), count // 2, None)),
    ):
        began = time.perf_counter()
        next(iter(rows_from()))
        figures[f"row_in_the_middle_s{name}"] = round(time.perf_counter() - began, 3)
    return figures


async def measure(quick: bool, model: str) -> dict[str, float]:
    """Return all figures."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        scratch = Path(folder)
        figures = await scaling(quick, model, scratch)
        figures |= await thousand_nodes(model, scratch)
        # In a separate process: threads of Ray Data outlive an iteration that is stopped early, and Ray aborts a
        # process in which a thread calls it after `ray.shutdown()`.
        return figures | await ray.remote(num_cpus=0)(reading).remote(quick, scratch)


def main() -> None:
    """Measure, print the figures, and check the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer trajectories")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
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
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
