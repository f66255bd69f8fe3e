"""Evaluate the model that the engine currently serves, on the problems that a run has not used.

    python evaluate.py --model $MODEL --engine http://127.0.0.1:30000 --sandbox http://127.0.0.1:8080 --dumps out/dumps

After a run, the engine serves the trained weights. `--weights DIR` loads other weights first, for example those of the
original model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from train import answer_reward, prompt

from toolroll import Limits, Rollout, SandboxFusionTool, SGLangEngine, read_records


async def evaluate(options: argparse.Namespace) -> dict[str, float]:
    """Sample each problem once and return the results."""
    seen = {record.fields["extra"]["question"] for record in read_records(options.dumps)}
    lines = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()
    rows = [{"prompt": prompt(line["question"]), **line} for line in map(json.loads, lines)]
    engine = SGLangEngine(options.engine)
    if options.weights is not None:
        await engine.update_weights(options.weights, f"evaluated-{options.weights.name}")
    async with Rollout(
        engine=engine,
        tokenizer=options.model,
        tool_prompt="hermes",
        tools=[SandboxFusionTool({"sandbox_fusion_url": options.sandbox, "default_timeout": 10})],
        limits=Limits(max_response_len=112, max_assistant_turns=3),
        sampling_params={"temperature": 1.0},
        rewards=answer_reward,
        max_in_flight=32,
    ) as rollout:
        trajectories = [one async for one in rollout.run(row for row in rows if row["question"] not in seen)]
    totals = [one.rewards.total for one in trajectories if one.rewards.total is not None]
    return {
        "problems": len(trajectories),
        "scored": len(totals),
        "mean_reward": round(sum(totals) / len(totals), 3) if totals else 0.0,
        "with_a_call_that_ran": sum(any(call.fault is None for call in one.calls) for one in trajectories),
        "right": sum(total == 1.5 for total in totals),
    }


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--engine", required=True, help="URL of the SGLang server")
    parser.add_argument("--sandbox", required=True, help="URL of the sandbox")
    parser.add_argument("--dumps", type=Path, required=True, help="records of the run")
    parser.add_argument("--weights", type=Path, help="weights that the engine loads first")
    print(json.dumps(asyncio.run(evaluate(parser.parse_args()))))


if __name__ == "__main__":
    main()
