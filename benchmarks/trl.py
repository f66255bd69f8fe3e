"""Measure the duration of a batch of tool calls in TRL's loop and in toolroll's.

    python benchmarks/trl.py [--quick] [--json]

Both run in one process, in TRL's environment (`.ci/trl`), with TRL's GRPOTrainer. Each sample of a batch calls a tool
that takes one second, and answers. The sampling is scripted, so only the loops and the tools are measured.

- `tool_wall_s`: duration of 64 calls through `rollout_func`.
- `trl_wall_s`: duration through `GRPOTrainer(tools=…)`, which runs calls one after another. With --quick, it is half
  the number of calls.
- `tool_wall_vs_trl`: ratio of the two durations.

Exits with status 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BOUNDS: dict[str, Callable[[float], bool]] = {
    "tool_wall_s": lambda value: value < 3,
    "trl_wall_s": lambda value: value > 30,
    "tool_wall_vs_trl": lambda value: value <= 0.1,
}
CALLS = 64
TOOL_DURATION_S = 1.0
QUESTION = [{"role": "user", "content": "Wait."}]
TURNS = ['<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>', "Done."]


def measure_toolroll(trainer: Any, count: int) -> float:
    """Return the duration of a batch through `rollout_func`, in seconds."""
    from toolroll import tool
    from toolroll.integrations.trl import rollout_func
    from toolroll.rollout.engines.scripted import ScriptedEngine

    @tool(threads=CALLS)
    def wait() -> str:
        """Wait."""
        time.sleep(TOOL_DURATION_S)
        return "waited"

    trainer.rollout_func = rollout_func(engine=ScriptedEngine(_ids(trainer)), tools=[wait], model_format="chatml")
    trainer._generate([QUESTION] * 2)  # warm-up
    return _timed(trainer, count)


def measure_trl(trainer: Any, count: int) -> float:
    """Return the duration of a batch through TRL's loop, in seconds."""
    calls, answers = _ids(trainer)

    def scripted(prompt_ids: list[list[int]], *_: Any, **more: Any) -> tuple[list[list[int]], None]:
        first = more.get("num_generations") != 1
        return [list(calls if first else answers) for _ in prompt_ids], None

    trainer._generate_single_turn = scripted
    trainer._sync_tool_dicts = [{"wait": wait_for_trl}] * count
    trainer._async_tool_dicts = [{}] * count
    return _timed(trainer, count)


def wait_for_trl() -> str:
    """Wait."""
    time.sleep(TOOL_DURATION_S)
    return "waited"


def _timed(trainer: Any, count: int) -> float:
    start = time.perf_counter()
    _, completion_ids, mask, *_ = trainer._generate([QUESTION] * count)
    duration = time.perf_counter() - start
    assert len(completion_ids) == count
    assert all(0 in row and row[-1] == 1 for row in mask), "every sample has a tool response and a turn after it"
    return duration


def _ids(trainer: Any) -> list[list[int]]:
    tokenizer = trainer.processing_class
    return [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TURNS]


def trainer_for(tokenizer: Any, **more: Any) -> Any:
    """Return TRL's trainer with a model that is not used."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig
    from trl import GRPOConfig, GRPOTrainer

    size: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    model_class: Any = AutoModelForCausalLM
    return GRPOTrainer(
        model=model_class.from_config(LlamaConfig(vocab_size=len(tokenizer), **size)),
        processing_class=tokenizer,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **settings),
        train_dataset=Dataset.from_list([{"prompt": QUESTION}]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        **more,
    )


def measure_in_environment(model: str, quick: bool) -> dict[str, float]:
    """Return all figures. Runs in TRL's environment."""
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    count = CALLS // 2 if quick else CALLS
    figures = {"calls": CALLS, "tool_wall_s": round(measure_toolroll(trainer_for(tokenizer), CALLS), 2)}
    trl_wall_s = measure_trl(trainer_for(tokenizer, tools=[wait_for_trl]), count)
    figures |= {"trl_calls": count, "trl_wall_s": round(trl_wall_s, 2)}
    return {**figures, "tool_wall_vs_trl": round(figures["tool_wall_s"] / figures["trl_wall_s"], 4)}


def measure(quick: bool) -> dict[str, float]:
    """Create the environments and run the measurement in TRL's."""
    import toolroll

    python = _run_setup(".ci/trl")["python"]
    model = _run_setup(".ci/sglang")["model"]
    variables = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "toolroll").symlink_to(Path(toolroll.__file__).parent)
        # -P: otherwise this file would be imported as the module trl.
        completed = subprocess.run(
            [python, "-P", __file__, "--inside", model, *(["--quick"] if quick else [])],
            env={**os.environ, **variables, "PYTHONPATH": directory, "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return figures


def _run_setup(script: str) -> dict[str, str]:
    output = subprocess.run([ROOT / script], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.split())


def main() -> None:
    """Print the figures and check the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run half as many calls in TRL's loop")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--inside", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure_in_environment(options.inside, options.quick)))
        return
    figures = measure(options.quick)
    from report import report  # the environment of TRL cannot import it

    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
