"""How well the model does that the engine serves now, on the problems that a run hasn't seen.

    python evaluate.py --model $MODEL --engine http://127.0.0.1:30000 --sandbox http://127.0.0.1:8080 --dumps out/dumps

When a run has ended, the engine serves what came of it. `--weights DIR` has it load others first: those of the model
that the run began with, say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from train import prompt, right

from toolroll import Limits, Rollout, SandboxFusionTool
from toolroll.records.reader import read
from toolroll.rollout.engines.sglang import SGLangEngine


async def evaluate(given: argparse.Namespace) -> dict[str, float]:
    """One sample of each problem."""
    seen = {record.fields["extra"]["question"] for record in read(given.dumps)}
    lines = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()
    rows = [{"prompt": prompt(line["question"]), **line} for line in map(json.loads, lines)]
    engine = SGLangEngine(given.engine)
    if given.weights is not None:
        await engine.update_weights(given.weights, f"evaluated-{given.weights.name}")
    async with Rollout(
        engine=engine,
        tokenizer=given.model,
        model_format="chatml",
        tools=[SandboxFusionTool({"sandbox_fusion_url": given.sandbox, "default_timeout": 10})],
        limits=Limits(max_response_len=112, max_assistant_turns=3),
        sampling_params={"temperature": 1.0},
        rewards=right,
        max_in_flight=32,
    ) as rollout:
        ended = [one async for one in rollout.run(row for row in rows if row["question"] not in seen)]
    totals = [one.rewards.total for one in ended if one.rewards.total is not None]
    return {
        "problems": len(ended),
        "scored": len(totals),
        "mean_reward": round(sum(totals) / len(totals), 3) if totals else 0.0,
        "with_a_call_that_ran": sum(any(call.fault is None for call in one.calls) for one in ended),
        "right": sum(total == 1.5 for total in totals),
    }


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="the model's directory")
    parser.add_argument("--engine", required=True, help="where SGLang serves it")
    parser.add_argument("--sandbox", required=True, help="where the sandbox is")
    parser.add_argument("--dumps", type=Path, required=True, help="what the run wrote")
    parser.add_argument("--weights", type=Path, help="which the engine is to load first")
    print(json.dumps(asyncio.run(evaluate(parser.parse_args()))))


if __name__ == "__main__":
    main()
