"""Convert GSM8K, or a dataset of the same format, from JSON lines to verl's Parquet format.

    python prepare.py questions.jsonl data/train.parquet --split train

Each line has a `question`, and an `answer` that ends with `#### ` and a number. The rows contain the agent loop
(`agent_name`) and the arguments of the tools (`tools_kwargs`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from toolroll.rewards.gsm8k import parse_ground_truth

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reason before any tool "
    "call. Use the `code_interpreter` tool to calculate, and the `calc_gsm8k_reward` tool to check your answer before "
    "you give it; refine the answer if necessary. Put your final answer in the format of `#### <answer>`."
)
INSTRUCTION = "Let's think step by step and output the final answer after `####`."


def row(line: dict[str, Any], number: int, split: str, agent_name: str) -> dict[str, Any]:
    """Return the row of one question."""
    ground_truth = parse_ground_truth(line["answer"])
    return {
        "data_source": "openai/gsm8k",
        "agent_name": agent_name,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{line['question']} {INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": number,
            "question": line["question"],
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": ground_truth}}},
        },
    }


def main() -> None:
    """Read the lines and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="input file (JSON lines)")
    parser.add_argument("target", type=Path, help="output file (Parquet)")
    parser.add_argument("--split", default="train")
    parser.add_argument("--agent-name", default="toolroll")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.source.read_text().splitlines() if line.strip()]
    rows = [row(line, number, options.split, options.agent_name) for number, line in enumerate(lines)]
    options.target.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(options.target)


if __name__ == "__main__":
    main()
