"""What a second worker brings, what the board costs, and how fast the data is read: runs on a real Ray, one machine.

    python benchmarks/cluster.py [--quick] [--json]

- `scaling_2_workers`: trajectories per second of two workers on two nodes, over those of one. The engine is scripted:
  a trajectory takes two seconds, so a worker is as fast as it has trajectories in flight, and the machine's cores don't
  matter. Records are written, as in any run. `board_us_per_trajectory` is what the board's process used of the CPU.
- `board_cores_at_1000_nodes`: the board, in its actor, with 1,000 workers that have 100 trajectories each, all of which
  speak once: they tell what they did of it in a second, and take as much. Each does that once in a second, so what the
  board's process uses of the CPU is the part of a core that it needs. A trajectory is taken to last 50 seconds.
- `rows_per_s`: how fast the board reads data (JSON lines), and `rows_per_s_ray_data` how fast Ray Data does, with the
  same file. `row_in_the_middle_s`: seconds until there is the first row of the second half, as a run needs it that goes
  on after an interruption.

Ends with 1 if a bound is broken.
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

from toolroll.rollout.crew import actor_here
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.run.config import DataConfig, RunConfig
from toolroll.run.data import Rows
from toolroll.run.progress import Sample
from toolroll.run.run import Run
from toolroll.run.run_board import RunBoard
from toolroll.run.tally import Outcome

IN_FLIGHT = 100
"""Trajectories at once, of each worker."""
SECONDS_PER_TURN = 1.0
NODES, IN_FLIGHT_OF_EACH = 1000, 100
SECONDS_PER_TRAJECTORY = 50
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


async def run(config: RunConfig) -> tuple[float, float]:
    """Trajectories per second, once all workers are there; and the CPU time of the board's process for one."""
    async with Run(config) as running:
        while (await running.status()).workers < (config.workers or 1):
            await asyncio.sleep(0.05)
        before, began = _board_cpu(), await running.status()
        await running.wait()
        ended = await running.status()
        used = _board_cpu() - before
    done, seconds = ended.done - began.done, ended.seconds - began.seconds
    print(f"{config.workers} workers: {done} in {seconds:.1f} s", file=sys.stderr)
    return done / seconds, used / done


def _board_cpu() -> float:
    """Seconds of CPU that the board's process has used."""
    times = _board_process().cpu_times()
    return float(times.user + times.system)


def _board_process() -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        if "ray::RunBoard" in " ".join(process.info["cmdline"] or ()):
            return process
    raise RuntimeError("there is no process of a board")


async def scaling(quick: bool, model: str, scratch: Path) -> dict[str, float]:
    """One worker, then two."""
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
        "board_us_per_trajectory": round(min(costs) * 1e6, 1),
    }


async def a_thousand_nodes(model: str, scratch: Path) -> dict[str, float]:
    """A board with so many workers, as one would be in a second of a run's middle."""
    told = IN_FLIGHT_OF_EACH // SECONDS_PER_TRAJECTORY
    seconds = 5
    config = configure(scratch / "many", model, NODES * (IN_FLIGHT_OF_EACH + told * seconds), NODES)
    board = actor_here(RunBoard).remote(config, NODES)
    names = [f"worker-{number}" for number in range(NODES)]
    await asyncio.gather(*(board.join.remote(name) for name in names))
    first = await asyncio.gather(*(board.exchange.remote(name, 1, [], IN_FLIGHT_OF_EACH) for name in names))
    holds = [list(orders.pieces) for orders in first]
    in_flight = sum(map(len, holds))
    before = _board_cpu()
    for second in range(seconds):
        words = [[(piece.key, outcome(piece.work)) for piece in held[:told]] for held in holds]
        asked = [board.exchange.remote(name, 2 + second, word, told) for name, word in zip(names, words, strict=True)]
        for held, orders in zip(holds, await asyncio.gather(*asked), strict=True):
            held[:] = [*held[told:], *orders.pieces]
    used = _board_cpu() - before
    memory = _board_process().memory_info().rss
    await board.close.remote()
    ray.kill(board)
    return {
        "board_in_flight_at_1000_nodes": in_flight,
        "board_trajectories_per_s_at_1000_nodes": NODES * told,
        "board_cores_at_1000_nodes": round(used / seconds, 3),
        "board_mb_at_1000_nodes": round(memory / 1e6),
    }


def outcome(sample: Sample) -> Outcome:
    """What a worker tells of a trajectory."""
    return Outcome(sample.row, sample.sample, 1.0, "ok", "stop", 4, 3000, 4000, 3, 0, 0, 50.0, 2.0, 0.1, "exact")


def reading(quick: bool, scratch: Path) -> dict[str, float]:
    """The board's reader and Ray Data, with one file."""
    from ray import data as ray_data

    count = 200_000 if quick else 2_000_000
    file = scratch / "rows.jsonl"
    question = "A question about some apples, as long as those of GSM8K are: of some 250 characters. " * 3
    with file.open("w") as rows:
        rows.writelines(f'{{"prompt": "{question} {n}", "answer": "{n}"}}\n' for n in range(count))
    ours = Rows(DataConfig(path=str(file), ground_truth="answer"))
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
    """All figures."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        scratch = Path(folder)
        figures = await scaling(quick, model, scratch)
        figures |= await a_thousand_nodes(model, scratch)
        # In a process of its own: Ray Data's threads outlive an iteration that is left in the middle, and Ray ends a
        # process in which one speaks to it after `ray.shutdown()`.
        return figures | await ray.remote(num_cpus=0)(reading).remote(quick, scratch)


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
