"""What writing records costs, beside orjson and a bare write; and how soon a large directory is on the screen.

    python benchmarks/records.py [--quick] [--json]

The samples are of about 10 KB: a prompt, three turns with a tool call each, tokens with log-probabilities. Batches of
them are written in turns: by the writer (`write_all`: through its thread, to the file of a step), and by a loop that
makes the line with `orjson.dumps` of the same dict and hands it to the operating system. `vs_bare_write` is our best
rate over the best bare one. `trajectories_per_s` is for trajectories, which the writer makes dicts of, tokens and all,
each awaited by itself in one of 64 coroutines.

Then there is a directory of 1,000,000 samples in 1,000 steps, 10 GB. In the quick form it is one file under a thousand
names; else it is written, indexed and read as a whole. `first_screen_s` is the time from the start of `toolroll view`,
in a pseudo-terminal, until the first sample is on the screen. `index_bytes_per_sample` is what the index keeps of each
sample that was looked at. `peak_mb` is the most memory of either: of the viewer by its first screen, or of a process
that indexes, which is everything, or 50 steps of it in the quick form.

Ends with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop
from first_screen import first_screen

from toolroll.records.json_line import decode, encode
from toolroll.records.line import fields_of
from toolroll.records.reader import read
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.engine import Timings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import FunctionCall, Message, ToolCall

STEPS = 1000
PER_STEP = 1000
BATCH = 250
COROUTINES = 64
INDEXED = 50
"""Steps that are indexed to see what the index of a sample takes."""
BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_write": lambda value: value >= 0.8,
    "first_screen_s": lambda value: value <= 2,
    "peak_mb": lambda value: value <= 300,
    "index_bytes_per_sample": lambda value: value <= 150,
}
TEXT = """the sum of all even numbers below is computed by a loop that adds each of them to what was found before and
then prints it, so that we can see whether this agrees with what the question asks for: naïve café 数字 sum + 1"""


def trajectory(number: int, chance: random.Random) -> Trajectory:
    """One of about 10 KB."""
    words_of_text = TEXT.split()

    def text(words: int) -> str:
        return " ".join(chance.choices(words_of_text, k=words))

    def ids(count: int) -> list[int]:
        return chance.choices(range(150_000), k=count)

    tokens = TokenStream(ids(180))
    messages = [Message(role="system", content=text(40)), Message(role="user", content=text(60))]
    turns, calls = [], []
    for turn in range(3):
        arguments = {"code": f"{text(15)}\nprint({turn})"}
        asked = ToolCall(id=f"call_{turn}_0", function=FunctionCall(name="code_interpreter", arguments=arguments))
        messages.append(Message(role="assistant", content=text(20), reasoning_content=text(30), tool_calls=[asked]))
        messages.append(Message(role="tool", content=text(12), tool_call_id=asked.id, name="code_interpreter"))
        tokens.sampled(ids(80), [-chance.random() for _ in range(80)], turn=turn, weight_version="7")
        tokens.given(ids(30), turn=turn)
        timings = Timings(total=chance.random(), queue=chance.random())
        turns.append(TurnRecord(turn=turn, tokens=80, finish="stop", weight_version="7", timings=timings))
        metrics = {"queue_wait": chance.random(), "execution_time": chance.random(), "attempts": 1, "outcome": "ok"}
        answer = messages[-1].content
        assert isinstance(answer, str)
        calls.append(
            CallRecord(
                turn=turn, tool="code_interpreter", arguments=arguments, answer=answer, seconds=1, metrics=metrics
            )
        )
    score = chance.random()
    return Trajectory(
        request_id=f"{number:032x}",
        group=f"{number // 8}",
        sample=number % 8,
        messages=messages,
        tokens=tokens,
        finish_reason=FinishReason.STOP,
        outcome="ok",
        fidelity=Fidelity.EXACT,
        logprobs_of="scaled",
        rewards=Rewards(
            total=score, steps=(0.0, 0.0, 0.0), tools={"code_interpreter": 0.0}, functions={"right": score}
        ),
        turns=turns,
        calls=calls,
        seconds=12.5,
        extra={"ground_truth": str(number), "data_source": "benchmark"},
    )


def bare(file: int, samples: Sequence[dict[str, Any]]) -> float:
    """Seconds to write these, and no more than is needed for it."""
    began = time.perf_counter()
    for sample in samples:
        os.write(file, orjson.dumps(sample) + b"\n")
    return time.perf_counter() - began


async def ours(writer: RecordWriter, samples: Sequence[dict[str, Any]]) -> float:
    """Seconds to write these by the writer."""
    began = time.perf_counter()
    await writer.write_all(samples, 1)
    return time.perf_counter() - began


async def in_turns(folder: Path, samples: Sequence[dict[str, Any]], rounds: int) -> tuple[float, float]:
    """Seconds of the best of us, and of the best bare writes."""
    one, other = [], []
    path = folder / "bare.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with RecordWriter(folder) as writer:
        for number in range(rounds):
            if number % 2:
                one.append(await ours(writer, samples))
                other.append(bare(file, samples))
            else:
                other.append(bare(file, samples))
                one.append(await ours(writer, samples))
            os.truncate(folder / "1.jsonl", 0)
            os.truncate(path, 0)
    os.close(file)
    path.unlink()
    (folder / "1.jsonl").unlink()
    return min(one), min(other)


async def awaited(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """Seconds to write trajectories, each by itself, from many coroutines."""
    left = iter(trajectories)
    async with RecordWriter(folder) as writer:

        async def work() -> None:
            for one in left:
                await writer.write(one, 1)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(COROUTINES)))
        seconds = time.perf_counter() - began
    (folder / "1.jsonl").unlink()
    return seconds


def write_figures(folder: Path, trajectories: Sequence[Trajectory], rounds: int) -> dict[str, float]:
    """How fast samples are written."""
    samples = [decode(encode(fields_of(one, 1))) for one in trajectories[:BATCH]]
    size = sum(len(encode(sample)) for sample in samples) / 1e6
    seconds, bares = uvloop.run(in_turns(folder, samples, rounds))
    each = min(uvloop.run(awaited(folder, trajectories[:BATCH])) for _ in range(3))
    return {
        "kb_per_sample": round(1000 * size / len(samples), 2),
        "write_mb_per_s": round(size / seconds, 1),
        "write_mb_per_s_bare": round(size / bares, 1),
        "vs_bare_write": round(bares / seconds, 3),
        "trajectories_per_s": round(BATCH / each),
    }


INDEX = """
import json, re, sys, time
from pathlib import Path
from toolroll.records.index import Shelf

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

steps = Shelf(sys.argv[1]).steps[: int(sys.argv[2]) + 1]
steps[0].index()
before, began = peak(), time.perf_counter()
for step in steps[1:]:
    step.index()
samples = sum(map(len, steps[1:]))
print(json.dumps([(peak() - before) / samples, samples / (time.perf_counter() - began), peak() / 2**20]))
"""


def index_figures(folder: Path, steps: int) -> dict[str, float]:
    """What indexing takes, in a process of its own."""
    command = [sys.executable, "-c", INDEX, str(folder), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, rate, peak = json.loads(done.stdout)
    return {"peak_mb": round(peak, 1), "index_bytes_per_sample": round(size, 1), "indexed_per_s": round(rate)}


def large(folder: Path, trajectories: Sequence[Trajectory], *, linked: bool) -> None:
    """1,000,000 samples: for real, or one file under many names."""
    with RecordWriter(folder) as writer:
        for step in range(1, 2 if linked else STEPS + 1):
            asyncio.run(writer.write_all(trajectories, step))
    for step in range(2, STEPS + 1 if linked else 2):
        (folder / f"{step}.jsonl").hardlink_to(folder / "1.jsonl")


def measure(folder: Path, *, quick: bool) -> dict[str, float]:
    """Everything that is printed."""
    chance = random.Random(7)
    trajectories = [trajectory(number, chance) for number in range(PER_STEP)]
    figures = write_figures(folder, trajectories, 150 if quick else 300)
    dumps = folder / "dumps"
    large(dumps, trajectories, linked=quick)
    figures["gb"] = round(sum(path.stat().st_size for path in dumps.iterdir()) / 1e9, 2)
    figures["samples"] = STEPS * PER_STEP
    seconds, peak = min(first_screen(dumps) for _ in range(3))
    figures |= {"first_screen_s": round(seconds, 2)} | index_figures(dumps, INDEXED if quick else STEPS - 1)
    figures["peak_mb"] = max(round(peak, 1), figures["peak_mb"])
    began, reading = time.perf_counter(), read(dumps, steps=range(1, 21 if quick else STEPS + 1))
    count = sum(1 for _ in reading)
    figures["read_mb_per_s"] = round(reading.done / 1e6 / (time.perf_counter() - began), 1)
    assert count == (20 if quick else STEPS) * PER_STEP
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one file under a thousand names, instead of 10 GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toolroll-records-") as folder:
        figures = measure(Path(folder), quick=options.quick)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:24} {value}" for name, value in figures.items()))
    if broken := [name for name, holds in BOUNDS.items() if not holds(figures[name])]:
        sys.exit(f"out of bounds: {', '.join(broken)}")


if __name__ == "__main__":
    main()
