"""Train a model with TRL's GRPO on arithmetic problems, with the code interpreter and SGLang.

    python train.py --model $MODEL --engine http://127.0.0.1:30000 --sandbox http://127.0.0.1:8080 --steps 20

An SGLang server with the same model and `toolroll sandbox serve` must be running. The trajectories are written to
`out/dumps`, one file per step: `toolroll view out/dumps` shows them, `python plot.py out/dumps curve.png` plots the
run.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from toolroll import Limits, SandboxFusionTool, SGLangEngine, Trajectory
from toolroll.integrations.trl import rollout_func, trajectory_reward

EXAMPLES = [
    ("What is 12 plus 30?", "12 + 30", 42),
    ("What is 81 minus 19?", "81 - 19", 62),
    ("What is 7 times 8?", "7 * 8", 56),
]
"""Examples of tool calls, which a small model needs in its prompt."""


def prompt(question: str) -> list[dict[str, Any]]:
    """Return the question, preceded by the examples."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Calculate with code_interpreter."}]
    for example, expression, value in EXAMPLES:
        function = {"name": "code_interpreter", "arguments": {"code": f"print({expression})"}}
        messages += [
            {"role": "user", "content": example},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"It is {value}."},
        ]
    return [*messages, {"role": "user", "content": question}]


def answer_reward(trajectory: Trajectory) -> float:
    """Return 0.5 for a tool call without a fault, plus 1 for the correct answer after it."""
    ran = any(call.fault is None for call in trajectory.calls)
    numbers = re.findall(r"-?\d+", str(trajectory.messages[-1].content).replace(",", ""))
    return 0.5 * ran + float(ran and numbers[-1:] == [trajectory.extra["ground_truth"]])


def main() -> None:
    """Train the model and write TRL's log to `out/log.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--engine", required=True, help="URL of the SGLang server")
    parser.add_argument("--sandbox", required=True, help="URL of the sandbox")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=2, help="problems per step")
    parser.add_argument("--samples", type=int, default=4, help="samples per problem")
    options = parser.parse_args()
    lines = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()
    rows = [{"prompt": prompt(line["question"]), **line} for line in map(json.loads, lines)]
    rollout = rollout_func(
        engine=SGLangEngine(options.engine),
        tools=[SandboxFusionTool({"sandbox_fusion_url": options.sandbox, "default_timeout": 10})],
        limits=Limits(max_assistant_turns=3, call_timeout=30, turn_timeout=600),
        rewards=answer_reward,
        weights_dir=options.out / "served",
        rollout_data_dir=options.out / "dumps",
        tool_prompt="hermes",
    )
    args = GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.samples,
        gradient_accumulation_steps=options.problems,
        num_generations=options.samples,
        max_completion_length=112,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GRPOTrainer(
        model=options.model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=trajectory_reward,
        rollout_func=rollout,
    )
    trainer.train()
    (options.out / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1))


if __name__ == "__main__":
    main()
