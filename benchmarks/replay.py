"""Calls saved by the cache of tools, replay of recorded runs, re-scoring, and the cost of tracing.

    python benchmarks/replay.py [--quick] [--json]

- `upstream_calls_per_prompt`: calls that reach an HTTP server, per prompt, when 8 samples of each of 100 prompts ask a
  pure tool the same question at the same time, half of them in another process.
- `cache_hit_ms_p50`: median duration of a call whose result is in the memory of the process.
- `cache_file_hit_ms_p50`: the same for the first hit of a process, whose result is in the file. Most of the difference
  is the switch to the thread of the store and back, without which a slow disk would block the event loop.
- `replay_identical`: fraction of the trajectories of a scripted engine whose tokens, rewards and messages a replay
  without the engine reproduces. The engine and the tool are random, so nothing else than the records reproduces them.
- `replayed_per_s`: trajectories that are replayed per second, with 3 turns and 2 tool calls each.

The figures of re-scoring and of tracing are described in `rescoring.py` and `tracing.py`.

The exit status is 1 if a figure is out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from report import report
from rescoring import RESCORE_BOUNDS, measure_rescoring
from tracing import TRACING_BOUNDS, tracing_figures

from toolroll import RecordDirectory, RecordWriter, Replay, Rollout, ScriptedEngine, ToolInstance, read_records, tool
from toolroll.demo.demo_model import MODEL_DIR
from toolroll.tools.cache.tool_calls import close_result_caches
from toolroll.tools.cache_settings import CacheSettings

PROMPTS = 100
SAMPLES = 8
PROCESSES = 2
HITS = 2000
UPSTREAM_DELAY_S = 0.02
UPSTREAM_VARIABLE = "REPLAY_BENCHMARK_UPSTREAM"
BOUNDS: dict[str, Callable[[float], bool]] = {
    "upstream_calls_per_prompt": lambda value: value <= 1,
    "cache_hit_ms_p50": lambda value: value <= 0.3,
    "replay_identical": lambda value: value == 1,
    **RESCORE_BOUNDS,
    **TRACING_BOUNDS,
}


@tool(pure=True)
def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: The word.
    """
    with urlopen(f"{os.environ[UPSTREAM_VARIABLE]}/{word}", timeout=60) as answer:
        return str(answer.read().decode())


@contextmanager
def counting_server() -> Iterator[list[str]]:
    """Run an HTTP server, and yield the list of the requested paths."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            time.sleep(UPSTREAM_DELAY_S)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(2000 * b"x")

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = PROMPTS  # with the default of 5, connections are repeated after a second

    with Server(("127.0.0.1", 0), Handler) as server:
        os.environ[UPSTREAM_VARIABLE] = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield paths
        server.shutdown()
        thread.join()


async def ask(word: str) -> float:
    """Call the tool. Return the duration in milliseconds."""
    async with ToolInstance(look_up) as instance:
        start = time.perf_counter()
        await instance.execute({"word": word})
        return 1000 * (time.perf_counter() - start)


async def ask_all(samples: int) -> None:
    """Call the tool with all words, each several times at once."""
    await asyncio.gather(*(ask(f"word{number}") for number in range(PROMPTS) for _ in range(samples)))


async def hits(count: int) -> list[float]:
    """Return the durations of hits, in milliseconds."""
    return [await ask(f"word{number % PROMPTS}") for number in range(count)]


def cache_figures(folder: Path, *, quick: bool) -> dict[str, float]:
    """Measure the cache of pure tools."""
    file = folder / "results.sqlite"
    with counting_server() as paths:
        command = [sys.executable, __file__, "--ask", str(file)]
        processes = [subprocess.Popen(command) for _ in range(PROCESSES)]
        if any(process.wait() for process in processes):
            raise RuntimeError("A process of the benchmark failed.")
    look_up.cache = CacheSettings(path=str(file))
    from_file = asyncio.run(hits(PROMPTS))
    from_memory = asyncio.run(hits(HITS if quick else 10 * HITS))
    close_result_caches()
    return {
        "upstream_calls_per_prompt": len(paths) / PROMPTS,
        "cache_hit_ms_p50": round(statistics.median(from_memory), 4),
        "cache_file_hit_ms_p50": round(statistics.median(from_file), 4),
    }


@tool
def roll(sides: int) -> tuple[str, float, dict[str, Any]]:
    """Roll dice.

    Args:
        sides: Number of sides.
    """
    return f"It shows {random.randint(1, sides)}.", random.random(), {}


def random_engine(tokenizer: Any) -> ScriptedEngine:
    """Return an engine that calls the tool twice and then answers, never in the same words."""

    def script(request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        call = json.dumps({"name": "roll", "arguments": {"sides": random.randint(1, 10**6)}})
        text = f"I roll {random.random()}.\n<tool_call>\n{call}\n</tool_call>" if turn < 2 else f"{random.random()}"
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return ScriptedEngine(script)


async def write_run(folder: Path, rollout: Rollout, trajectories: int) -> float:
    """Run trajectories and record them. Return the time in seconds."""
    start = time.perf_counter()
    async with rollout, RecordWriter(folder) as writer:
        async for trajectory in rollout.run([f"Roll dice, please ({number})." for number in range(trajectories)]):
            await writer.write(trajectory, 0)
    return time.perf_counter() - start


def replayable(folder: Path) -> dict[str | None, tuple[Any, ...]]:
    """Return what a replay must reproduce of each trajectory."""
    names = ("tokens", "rewards", "messages", "finish_reason")
    return {record.group: tuple(record.fields[name] for name in names) for record in read_records(folder)}


def replay_figures(folder: Path, *, quick: bool) -> dict[str, float]:
    """Record trajectories of a scripted engine, and replay them."""
    from transformers import AutoTokenizer

    trajectories = 200 if quick else 1000
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR), local_files_only=True)
    recorded, replayed = folder / "recorded", folder / "replayed"
    options: dict[str, Any] = {"tokenizer": tokenizer, "tools": [roll], "max_in_flight": 64}
    asyncio.run(write_run(recorded, Rollout(engine=random_engine(tokenizer), **options), trajectories))
    rollout = Rollout(replay=Replay(RecordDirectory(recorded)), **options)
    seconds = asyncio.run(write_run(replayed, rollout, trajectories))
    old, new = replayable(recorded), replayable(replayed)
    return {
        "replay_identical": sum(new.get(group) == content for group, content in old.items()) / trajectories,
        "replayed_per_s": round(trajectories / seconds, 1),
    }


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Measure all figures, one group after another."""
    return {
        **cache_figures(folder, quick=quick),
        **replay_figures(folder, quick=quick),
        **measure_rescoring(folder / "rescoring", quick=quick),
        **tracing_figures(quick=quick),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure fewer calls and trajectories")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ask", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        look_up.cache = CacheSettings(path=options.ask)
        asyncio.run(ask_all(SAMPLES // PROCESSES))
        return
    with tempfile.TemporaryDirectory(prefix="toolroll-replay-") as folder:
        figures = measure(Path(folder), quick=options.quick)
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
