"""GRPO by TRL on arithmetic problems, with the code interpreter, SGLang as the engine, and our rollouts between them.

    python train.py --model $MODEL --engine http://127.0.0.1:30000 --sandbox http://127.0.0.1:8080 --steps 20

It needs an SGLang server with the same model, and `toolroll sandbox serve`. What the model wrote is in `out/dumps`, one
file for each step: `toolroll view out/dumps`; `python plot.py out/dumps curve.png` draws the run.
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

from toolroll import Limits, SandboxFusionTool, Trajectory
from toolroll.integrations.trl import rollout_func, trajectory_reward
from toolroll.rollout.engines.sglang import SGLangEngine

EXAMPLES = [
    ("What is 12 plus 30?", "12 + 30", 42),
    ("What is 81 minus 19?", "81 - 19", 62),
    ("What is 7 times 8?", "7 * 8", 56),
]
"""What a small model needs to see before it calls a tool."""


def prompt(question: str) -> list[dict[str, Any]]:
    """The question, after three that were answered by the tool."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Calculate with code_interpreter."}]
    for asked, expression, value in EXAMPLES:
        function = {"name": "code_interpreter", "arguments": {"code": f"print({expression})"}}
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"It is {value}."},
        ]
    return [*messages, {"role": "user", "content": question}]


def right(trajectory: Trajectory) -> float:
    """Half for a call that ran, and one for the right answer after it."""
    ran = any(call.fault is None for call in trajectory.calls)
    numbers = re.findall(r"-?\d+", str(trajectory.messages[-1].content).replace(",", ""))
    return 0.5 * ran + float(ran and numbers[-1:] == [trajectory.extra["ground_truth"]])


def main() -> None:
    """Train, and say what became of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="the model's directory")
    parser.add_argument("--engine", required=True, help="where SGLang serves it")
    parser.add_argument("--sandbox", required=True, help="where the sandbox is")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=2, help="for each step")
    parser.add_argument("--samples", type=int, default=4, help="of each problem")
    given = parser.parse_args()
    lines = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()
    rows = [{"prompt": prompt(line["question"]), **line} for line in map(json.loads, lines)]
    rollout = rollout_func(
        engine=SGLangEngine(given.engine),
        tools=[SandboxFusionTool({"sandbox_fusion_url": given.sandbox, "default_timeout": 10})],
        limits=Limits(max_assistant_turns=3, call_timeout=30, turn_timeout=600),
        rewards=right,
        weights_dir=given.out / "served",
        rollout_data_dir=given.out / "dumps",
        model_format="chatml",
    )
    args = GRPOConfig(
        output_dir=str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=given.samples,
        gradient_accumulation_steps=given.problems,
        num_generations=given.samples,
        max_completion_length=112,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GRPOTrainer(
        model=given.model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=trajectory_reward,
        rollout_func=rollout,
    )
    trainer.train()
    (given.out / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1))


if __name__ == "__main__":
    main()
