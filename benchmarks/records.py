"""Speed of writing, indexing and reading records, and time until the viewer shows a large directory.

    python benchmarks/records.py [--quick] [--json]

Each sample has about 10 KB: a prompt, three turns with a tool call each, and tokens with log-probabilities. Batches of
samples are written alternately by the writer (`write_all`, through its thread, to the file of a step) and by a loop
that calls `orjson.dumps` with the same dict and writes the line. `vs_bare_write` is the ratio of their CPU times: the
median of two batches in a row. Both run on one core, because the caches of two cores would favour the loop at random.
`trajectories_per_s` is the rate for trajectories, including their conversion to dicts and tokens, each awaited by one
of 64 coroutines.

The large directory has 1,000,000 samples in 1,000 steps, 10 GB. With `--quick` it is one file with a thousand links;
otherwise it is written, indexed and read completely. `first_screen_s` is the time from the start of `toolroll view`, in
a pseudo-terminal, until the first sample is on the screen; `first_screen_vs_small` is its ratio to that of a directory
with one step of ten samples, opened alternately. `index_bytes_per_sample` is the size of the index per sample.
`peak_mb` is the larger peak memory of the viewer at its first screen, and of a process that indexes all steps
(50 steps with `--quick`).

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from first_screen import first_screen
from report import report

from toolroll.records.json_line import decode, encode
from toolroll.records.line import trajectory_fields
from toolroll.records.reader import read_records
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import FunctionCall, Message, ToolCall

STEPS = 1000
SAMPLES_PER_STEP = 1000
BATCH_SAMPLES = 250
COROUTINES = 64
SMALL_SAMPLES = 10
QUICK_INDEXED_STEPS = 50
"""Number of steps that are indexed with `--quick`."""
BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_write": lambda value: value >= 0.8,
    "first_screen_vs_small": lambda value: value <= 1.5,
    "peak_mb": lambda value: value <= 300,
    "index_bytes_per_sample": lambda value: value <= 150,
}
TEXT = """the sum of all even numbers below is computed by a loop that adds each of them to what was found before and
then prints it, so that we can see whether this agrees with what the question asks for: naïve café 数字 sum + 1"""


def trajectory(number: int, rng: random.Random) -> Trajectory:
    """Return a random trajectory of about 10 KB."""
    words_of_text = TEXT.split()

    def text(words: int) -> str:
        return " ".join(rng.choices(words_of_text, k=words))

    def ids(count: int) -> list[int]:
        return rng.choices(range(150_000), k=count)

    tokens = TokenStream(ids(180))
    messages = [Message(role="system", content=text(40)), Message(role="user", content=text(60))]
    turns, calls = [], []
    for turn in range(3):
        arguments = {"code": f"{text(15)}\nprint({turn})"}
        call = ToolCall(id=f"call_{turn}_0", function=FunctionCall(name="code_interpreter", arguments=arguments))
        messages.append(Message(role="assistant", content=text(20), reasoning_content=text(30), tool_calls=[call]))
        messages.append(Message(role="tool", content=text(12), tool_call_id=call.id, name="code_interpreter"))
        tokens.append_sampled(ids(80), [-rng.random() for _ in range(80)], turn=turn, weight_version="7")
        tokens.append_unsampled(ids(30), turn=turn)
        timings = GenerationTimings(total=rng.random(), queue=rng.random())
        turns.append(TurnRecord(turn=turn, tokens=80, finish="stop", weight_version="7", timings=timings))
        metrics = {"queue_wait": rng.random(), "execution_time": rng.random(), "attempts": 1, "outcome": "ok"}
        answer = messages[-1].content
        assert isinstance(answer, str)
        calls.append(
            CallRecord(
                turn=turn, tool="code_interpreter", arguments=arguments, answer=answer, seconds=1, metrics=metrics
            )
        )
    score = rng.random()
    return Trajectory(
        request_id=f"{number:032x}",
        group=f"{number // 8}",
        sample=number % 8,
        messages=messages,
        tokens=tokens,
        finish_reason=FinishReason.STOP,
        outcome="ok",
        fidelity=Fidelity.EXACT,
        logprobs_mode="processed_logprobs",
        rewards=Rewards(
            total=score, steps=(0.0, 0.0, 0.0), tools={"code_interpreter": 0.0}, functions={"right": score}
        ),
        turns=turns,
        calls=calls,
        seconds=12.5,
        extra={"ground_truth": str(number), "data_source": "benchmark"},
    )


def write_bare(file: int, samples: Sequence[dict[str, Any]]) -> None:
    """Write samples without a RecordWriter."""
    for sample in samples:
        os.write(file, orjson.dumps(sample) + b"\n")


@dataclass
class WriteTimes:
    """Times of one batch, in seconds."""

    wall: float
    cpu: float


@contextmanager
def measured(times: list[WriteTimes]) -> Iterator[None]:
    """Append the times of a block, in which all threads of this process are counted."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times.append(WriteTimes(time.perf_counter() - wall, time.process_time() - cpu))


async def compare_writes(
    folder: Path, samples: Sequence[dict[str, Any]], rounds: int
) -> tuple[list[WriteTimes], list[WriteTimes]]:
    """Return the times of the RecordWriter and those without it, of each round."""
    times: list[WriteTimes] = []
    bare_times: list[WriteTimes] = []
    path = folder / "bare.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with RecordWriter(folder) as writer:
        for _ in range(rounds):
            with measured(times):
                await writer.write_all(samples, 1)
            with measured(bare_times):
                write_bare(file, samples)
            os.truncate(folder / "1.jsonl", 0)
            os.truncate(path, 0)
    os.close(file)
    path.unlink()
    (folder / "1.jsonl").unlink()
    return times, bare_times


async def write_from_coroutines(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """Write trajectories one by one from many coroutines. Return the time in seconds."""
    remaining = iter(trajectories)
    async with RecordWriter(folder) as writer:

        async def work() -> None:
            for one in remaining:
                await writer.write(one, 1)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(COROUTINES)))
        seconds = time.perf_counter() - start
    (folder / "1.jsonl").unlink()
    return seconds


@contextmanager
def one_core() -> Iterator[None]:
    """Use one core in this thread and in those that it starts."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def write_figures(folder: Path, trajectories: Sequence[Trajectory], rounds: int) -> dict[str, float]:
    """Measure the speed of writing."""
    samples = [decode(encode(trajectory_fields(one, 1))) for one in trajectories[:BATCH_SAMPLES]]
    size = sum(len(encode(sample)) for sample in samples) / 1e6
    with one_core():
        times, bare_times = uvloop.run(compare_writes(folder, samples, rounds))
    seconds, bare_seconds = (statistics.median(one.wall for one in each) for each in (times, bare_times))
    ratio = statistics.median(bare.cpu / ours.cpu for ours, bare in zip(times, bare_times, strict=True))
    each = min(uvloop.run(write_from_coroutines(folder, trajectories[:BATCH_SAMPLES])) for _ in range(3))
    return {
        "kb_per_sample": round(1000 * size / len(samples), 2),
        "bytes_per_token": round(1e6 * size / sum(len(one.tokens) for one in trajectories[:BATCH_SAMPLES]), 1),
        "write_mb_per_s": round(size / seconds, 1),
        "write_mb_per_s_bare": round(size / bare_seconds, 1),
        "vs_bare_write": round(ratio, 3),
        "trajectories_per_s": round(BATCH_SAMPLES / each),
    }


def screen_figures(dumps: Path, small: Path, few: Sequence[Trajectory]) -> dict[str, float]:
    """Open the large directory and a small one alternately in the viewer."""
    with RecordWriter(small) as writer:
        asyncio.run(writer.write_all(few, 1))
    screens = [(first_screen(dumps), first_screen(small)) for _ in range(3)]
    (seconds, peak), (small_seconds, _) = (min(each) for each in zip(*screens, strict=True))
    return {
        "first_screen_s": round(seconds, 2),
        "first_screen_vs_small": round(seconds / small_seconds, 2),
        "peak_mb": round(peak, 1),
    }


INDEX = """
import json, re, sys, time
from pathlib import Path
from toolroll.records.index import DumpDirectory

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

steps = DumpDirectory(sys.argv[1]).steps[: int(sys.argv[2]) + 1]
steps[0].index()
before, start = peak(), time.perf_counter()
for step in steps[1:]:
    step.index()
samples = sum(map(len, steps[1:]))
print(json.dumps([(peak() - before) / samples, samples / (time.perf_counter() - start), peak() / 2**20]))
"""


def index_figures(folder: Path, steps: int) -> dict[str, float]:
    """Measure memory and speed of indexing in a separate process."""
    command = [sys.executable, "-c", INDEX, str(folder), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, rate, peak = json.loads(done.stdout)
    return {"peak_mb": round(peak, 1), "index_bytes_per_sample": round(size, 1), "indexed_per_s": round(rate)}


def write_large(folder: Path, trajectories: Sequence[Trajectory], *, linked: bool) -> None:
    """Write 1,000,000 samples, or one file with many links."""
    with RecordWriter(folder) as writer:
        for step in range(1, 2 if linked else STEPS + 1):
            asyncio.run(writer.write_all(trajectories, step))
    for step in range(2, STEPS + 1 if linked else 2):
        (folder / f"{step}.jsonl").hardlink_to(folder / "1.jsonl")


def measure(folder: Path, *, quick: bool) -> dict[str, float]:
    """Measure all figures."""
    rng = random.Random(7)
    trajectories = [trajectory(number, rng) for number in range(SAMPLES_PER_STEP)]
    figures = write_figures(folder, trajectories, 150 if quick else 300)
    dumps = folder / "dumps"
    write_large(dumps, trajectories, linked=quick)
    figures["gb"] = round(sum(path.stat().st_size for path in dumps.iterdir()) / 1e9, 2)
    figures["samples"] = STEPS * SAMPLES_PER_STEP
    screen = screen_figures(dumps, folder / "small", trajectories[:SMALL_SAMPLES])
    index = index_figures(dumps, QUICK_INDEXED_STEPS if quick else STEPS - 1)
    figures |= screen | index | {"peak_mb": max(screen["peak_mb"], index["peak_mb"])}
    start, records = time.perf_counter(), read_records(dumps, steps=range(1, 21 if quick else STEPS + 1))
    count = sum(1 for _ in records)
    figures["read_mb_per_s"] = round(records.bytes_read / 1e6 / (time.perf_counter() - start), 1)
    assert count == (20 if quick else STEPS) * SAMPLES_PER_STEP
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use one file with a thousand links instead of 10 GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toolroll-records-") as folder:
        figures = measure(Path(folder), quick=options.quick)
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
