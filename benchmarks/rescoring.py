"""Measure re-scoring against sampling with a real engine, and against sending programs directly to the sandbox.

    python benchmarks/rescoring.py [--quick] [--json]
    python benchmarks/rescoring.py --record

- `rescore_vs_sampling`: records that are re-scored with `gsm8k_flexible` per second, divided by the trajectories that a
  real SGLang server on the CPU of this machine samples per second: 64 answers to word problems, of at most
  `MAX_NEW_TOKENS` tokens. The 10,000 records have three turns each and about 10 KB (`records.py`). With `--quick`,
  there are 2,000 records and no server is started: the sampling rate is the recorded one of `data/sampling.json`,
  which `--record` measures and writes.
- `rescore_code_vs_bare_sandbox`: time for sending programs with a plain HTTP client to the sandbox server, divided by
  the time for re-scoring records with these programs and their test cases, with the same concurrency. The two
  alternate.

Exits with status 1 if a bound is exceeded, or if a new score is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from records import trajectory
from report import report
from rewards import MAX_IN_FLIGHT, PARTS, ExpectedGrade, batch, requests_of, send_directly, serving

from toolroll.records.rescoring.rescore import Rescorer
from toolroll.records.writer import RecordWriter
from toolroll.rewards.grader import GraderSettings
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.gc_tuning import infrequent_full_gc
from toolroll.rollout.rollout import Rollout
from toolroll.run.reward_functions import code_tests_passed, gsm8k_flexible
from toolroll.schemas import Message

ROOT = Path(__file__).parent
RECORDED_SAMPLING = ROOT / "data" / "sampling.json"
PROBLEMS = ROOT.parent / "examples" / "gsm8k" / "problems.jsonl"
SAMPLES_PER_PROBLEM = 4
RECORDS_PER_STEP = 1000
MAX_NEW_TOKENS = 64
"""Short answers favour sampling."""
SAMPLING_CONCURRENCY = 32
SYSTEM = "Solve the problem step by step. End with the answer on a separate line, like this: #### 42"
MAX_MEASUREMENTS = 3
"""Maximum number of measurements of a ratio that is out of bounds."""
RESCORE_BOUNDS: dict[str, Callable[[float], bool]] = {
    "rescore_vs_sampling": lambda value: value >= 100,
    "rescore_code_vs_bare_sandbox": lambda value: value >= 0.9,
    "wrong_scores": lambda value: value == 0,
}


async def sample(url: str, model: str) -> dict[str, float]:
    """Sample answers to word problems, and return the number of samples and the time in seconds."""
    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    prompts = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem["question"]}],
            "ground_truth": problem["answer"],
        }
        for problem in problems
    ]
    rollout = Rollout(
        engine=SGLangEngine(url),
        rendering=load_rendering(model, "chatml"),
        sampling_params={"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS},
        rewards=gsm8k_flexible,
        max_in_flight=SAMPLING_CONCURRENCY,
    )
    async with rollout:
        started = time.perf_counter()
        count = sum([one.outcome == "ok" async for one in rollout.run(prompts, n=SAMPLES_PER_PROBLEM)])
        return {"samples": count, "seconds": round(time.perf_counter() - started, 1)}


def measure_sampling() -> dict[str, float]:
    """Start a real engine and return the number of samples and the time in seconds."""
    from real_engine import real_engine

    with real_engine() as engine:
        return uvloop.run(sample(engine.url, str(engine.model_dir)))


def write_answers(folder: Path, count: int) -> None:
    """Record trajectories whose answers are right and wrong in turn."""
    rng = random.Random(7)
    trajectories = []
    for number in range(RECORDS_PER_STEP):
        base, is_right = trajectory(number, rng), number % 2 == 0
        messages = [*base.messages, Message(role="assistant", content=f"It is #### {number + (not is_right)}")]
        rewards = replace(base.rewards, functions={"right": float(is_right)})
        trajectories.append(replace(base, messages=messages, rewards=rewards))
    with RecordWriter(folder) as writer:
        for step in range(count // RECORDS_PER_STEP):
            uvloop.run(writer.write_all(trajectories, step))


async def measure_gsm8k(dumps: Path, sampled_per_s: float) -> dict[str, float]:
    """Re-score recorded answers."""
    started = time.perf_counter()
    result = await Rescorer({"right": gsm8k_flexible}).run(dumps, dumps.with_name("gsm8k-rescored"))
    rate = result.records / (time.perf_counter() - started)
    changes = result.changes.total("right")
    return {
        "records": result.records,
        "rescored_per_s": round(rate),
        "sampled_per_s": round(sampled_per_s, 2),
        "rescore_vs_sampling": round(rate / sampled_per_s),
        "wrong_scores": result.records - changes.compared + changes.changed,
    }


def write_programs(folder: Path, part: Sequence[ExpectedGrade]) -> None:
    """Record trajectories whose last messages have the programs."""
    base = trajectory(0, random.Random(0))
    with RecordWriter(folder) as writer:
        for number, one in enumerate(part):
            messages = [*base.messages, Message(role="assistant", content=one.answer)]
            rewards = replace(base.rewards, total=one.score, functions={"passed": one.score})
            extra = {"ground_truth": one.truth}
            writer.append(replace(base, sample=number, messages=messages, rewards=rewards, extra=extra), 1)


async def measure_code(url: str, folder: Path, count: int) -> dict[str, float]:
    """Re-score programs, and send the same programs directly, a part of them at a time."""
    settings = {"sandbox_fusion_url": url, "rate_limit": MAX_IN_FLIGHT}
    rescorer = Rescorer({"passed": partial(code_tests_passed, **settings)})
    grader_settings = GraderSettings(sandbox_fusion_url=(url,), rate_limit=MAX_IN_FLIGHT, continuous=True)
    everything = list(batch(count))
    write_programs(folder / "first", everything[:2])  # connections, caches
    await rescorer.run(folder / "first", folder / "first-rescored")
    rescoring_s = direct_s = 0.0
    wrong = 0
    for number in range(PARTS):
        part = everything[number::PARTS]
        dumps = folder / f"code-{number}"
        write_programs(dumps, part)
        bodies = requests_of(part, grader_settings)
        if number % 2:
            direct_s += await send_directly(url, bodies)
        started = time.perf_counter()
        changes = (await rescorer.run(dumps, folder / f"{dumps.name}-rescored")).changes.total("passed")
        rescoring_s += time.perf_counter() - started
        wrong += changes.records - changes.compared + changes.changed
        if not number % 2:
            direct_s += await send_directly(url, bodies)
    return {
        "rescore_code_vs_bare_sandbox": round(direct_s / rescoring_s, 3),
        "programs_per_s": round(count * len(everything[0].cases.cases) / rescoring_s, 1),
        "wrong_scores": wrong,
    }


def measure_rescoring(folder: Path, *, quick: bool) -> dict[str, float]:
    """Return all figures.

    Args:
        folder: Directory for records.
        quick: Use fewer records, and the recorded rate of a real engine.
    """
    sampling = json.loads(RECORDED_SAMPLING.read_text()) if quick else measure_sampling()
    dumps = folder / "gsm8k"
    write_answers(dumps, 2000 if quick else 10_000)
    with infrequent_full_gc():
        figures = uvloop.run(measure_gsm8k(dumps, sampling["samples"] / sampling["seconds"]))
        with serving() as url:
            for number in range(MAX_MEASUREMENTS):  # other processes can disturb it
                code = uvloop.run(measure_code(url, folder / f"programs-{number}", 32 if quick else 512))
                if RESCORE_BOUNDS["rescore_code_vs_bare_sandbox"](code["rescore_code_vs_bare_sandbox"]):
                    break
    return {**figures, **code, "wrong_scores": figures["wrong_scores"] + code["wrong_scores"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use fewer records, and start no engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", action="store_true", help="measure the rate of sampling for --quick")
    options = parser.parse_args()
    if options.record:
        RECORDED_SAMPLING.write_text(json.dumps(measure_sampling()) + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="toolroll-rescoring-") as folder:
        figures = measure_rescoring(Path(folder), quick=options.quick)
    report(figures, RESCORE_BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
