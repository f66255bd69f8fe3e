"""Cost of tracing, while it is off and while it is on.

    python benchmarks/tracing.py [--quick] [--json]

- `tracing_off_us_per_turn`: CPU time of everything that the rollout loop does for tracing in a turn with a tool call,
  while tracing is off.
- `tracing_on_throughput`: turns per second with tracing on, divided by those with tracing off. A scripted engine takes
  100 ms for a turn, and 24 trajectories are in flight: 240 turns per second, as with a busy engine. The collector is a
  process that discards the spans. Rounds with and without tracing alternate, and the figure is the median of their
  ratios.
- `tracing_us_per_turn`: CPU time that this process spends on the spans of a turn, most of it in a thread. It includes
  the start and the end of tracing.

The exit status is 1 if a figure is out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from report import report

from toolroll import FinishReason, Rollout, ScriptedEngine, start_tracing, tool, trace_headers
from toolroll.demo.demo_model import MODEL_DIR
from toolroll.rollout.gc_tuning import infrequent_full_gc
from toolroll.tracing.context import enter_call, finish_trajectory

TRACING_BOUNDS: dict[str, Callable[[float], bool]] = {
    "tracing_off_us_per_turn": lambda value: value <= 1,
    "tracing_on_throughput": lambda value: value >= 0.97,
}
MAX_MEASUREMENTS = 3
TURN_SECONDS = 0.1
TURNS = 4
IN_FLIGHT = 24
CALL = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
COLLECTOR = """
import asyncio
from aiohttp import web

async def discard(request):
    await request.read()
    return web.Response()

async def main():
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/v1/traces", discard)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@tool
async def nothing() -> str:
    """Do nothing."""
    return "done"


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector in another process, and yield its URL."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


def off_us_per_turn() -> float:
    """Return the CPU time of the calls that a turn makes while tracing is off, in microseconds."""
    count, results = 100_000, []
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            pass
        empty = time.process_time() - started
        started = time.process_time()
        for _ in range(count):
            time.monotonic()  # the start of the generation
            enter_call("request", 0, 0)
            trace_headers()
            time.monotonic()  # the start of the call
            finish_trajectory(None)
        results.append((time.process_time() - started - empty) / count * 1e6)
    return min(results)


def make_script() -> Callable[[str, Any, int], list[int]]:
    """Return a script of calls in all turns but the last."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call, answer = ([*tokenizer.encode(text, add_special_tokens=False), stop] for text in (CALL, "That is all."))
    return lambda _, __, turn: answer if turn + 1 == TURNS else call


async def run_round(script: Any, trajectories: int) -> float:
    """Run trajectories. Return the time in seconds."""
    engine = ScriptedEngine(script, delay=TURN_SECONDS)
    async with Rollout(engine=engine, tools=[nothing], tokenizer=str(MODEL_DIR), max_in_flight=IN_FLIGHT) as rollout:
        started = time.perf_counter()
        reasons = {one.finish_reason async for one in rollout.run(f"Question {n}?" for n in range(trajectories))}
        seconds = time.perf_counter() - started
    if reasons != {FinishReason.STOP}:
        raise RuntimeError(f"Trajectories did not finish normally: {reasons}.")
    return seconds


async def compare(url: str, rounds: int, trajectories: int) -> dict[str, float]:
    """Run rounds without and with tracing alternately, and compare them."""
    script = make_script()

    async def measure(traced: bool) -> tuple[float, float]:
        cpu = time.process_time()
        tracing = start_tracing(url) if traced else None
        seconds = await run_round(script, trajectories)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
            if tracing.dropped:
                raise RuntimeError(f"{tracing.dropped} trajectories were not traced.")
        return seconds, time.process_time() - cpu

    await measure(True)  # imports
    ratios, extra = [], []
    for number in range(rounds):
        results = {traced: await measure(traced) for traced in ((False, True) if number % 2 else (True, False))}
        ratios.append(results[False][0] / results[True][0])
        extra.append((results[True][1] - results[False][1]) / (trajectories * TURNS) * 1e6)
    return {
        "tracing_on_throughput": round(statistics.median(ratios), 4),
        "tracing_us_per_turn": round(statistics.median(extra), 1),
    }


def tracing_figures(*, quick: bool) -> dict[str, float]:
    """Measure all figures. A ratio out of bounds is measured again, because other processes can disturb it."""
    figures = {"tracing_off_us_per_turn": round(off_us_per_turn(), 3)}
    rounds, trajectories = (3, 4 * IN_FLIGHT) if quick else (9, 10 * IN_FLIGHT)
    with collector() as url, infrequent_full_gc():
        for _ in range(MAX_MEASUREMENTS):
            figures |= asyncio.run(compare(url, rounds, trajectories))
            if TRACING_BOUNDS["tracing_on_throughput"](figures["tracing_on_throughput"]):
                break
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    figures = tracing_figures(quick=options.quick)
    report(figures, TRACING_BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
