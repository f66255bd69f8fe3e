"""How long the tools of a batch take, in TRL's own loop and in ours.

    python benchmarks/trl.py [--quick] [--json]

Both in one process, in TRL's environment (`.ci/trl`), with TRL's own GRPOTrainer: each sample of a batch calls a tool
that takes a second, and answers. What is sampled is scripted for both, so that nothing is measured but the loops and
the tools.

- `tool_wall_s`: 64 such calls, through `rollout_func`.
- `trl_wall_s`: through `GRPOTrainer(tools=…)`. With --quick it has half as many to carry out, since they come one after
  another.
- `tool_wall_vs_trl`: the first over the second, as they were measured.

Ends with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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
SECONDS = 1.0
QUESTION = [{"role": "user", "content": "Wait."}]
SAID = ['<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>', "Done."]


def ours(trainer: Any, count: int) -> float:
    """Seconds for a batch, through our loop."""
    from toolroll import tool
    from toolroll.integrations.trl import rollout_func
    from toolroll.rollout.engines.scripted import ScriptedEngine

    @tool(threads=CALLS)
    def wait() -> str:
        """Wait."""
        time.sleep(SECONDS)
        return "waited"

    trainer.rollout_func = rollout_func(engine=ScriptedEngine(_ids(trainer)), tools=[wait], model_format="chatml")
    trainer._generate([QUESTION] * 2)  # what is made once is made now
    return _timed(trainer, count)


def theirs(trainer: Any, count: int) -> float:
    """Seconds for a batch, through TRL's own."""
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
    time.sleep(SECONDS)
    return "waited"


def _timed(trainer: Any, count: int) -> float:
    began = time.perf_counter()
    _, completion_ids, mask, *_ = trainer._generate([QUESTION] * count)
    took = time.perf_counter() - began
    assert len(completion_ids) == count
    assert all(0 in row and row[-1] == 1 for row in mask), "every sample has a tool's answer, and went on after it"
    return took


def _ids(trainer: Any) -> list[list[int]]:
    tokenizer = trainer.processing_class
    return [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in SAID]


def trainer_for(tokenizer: Any, **more: Any) -> Any:
    """TRL's trainer, with a model that nobody asks."""
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
    made: Any = AutoModelForCausalLM
    return GRPOTrainer(
        model=made.from_config(LlamaConfig(vocab_size=len(tokenizer), **size)),
        processing_class=tokenizer,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **settings),
        train_dataset=Dataset.from_list([{"prompt": QUESTION}]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        **more,
    )


def inside(model: str, quick: bool) -> dict[str, float]:
    """The measurement, in TRL's environment."""
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    count = CALLS // 2 if quick else CALLS
    figures = {"calls": CALLS, "tool_wall_s": round(ours(trainer_for(tokenizer), CALLS), 2)}
    figures |= {"trl_calls": count, "trl_wall_s": round(theirs(trainer_for(tokenizer, tools=[wait_for_trl]), count), 2)}
    return {**figures, "tool_wall_vs_trl": round(figures["tool_wall_s"] / figures["trl_wall_s"], 4)}


def measure(quick: bool) -> dict[str, float]:
    """Make the environments, and measure in TRL's."""
    import toolroll

    python = _where(".ci/trl")["python"]
    model = _where(".ci/sglang")["model"]
    silent = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "toolroll").symlink_to(Path(toolroll.__file__).parent)
        # -P: this file is called as the package that it measures.
        done = subprocess.run(
            [python, "-P", __file__, "--inside", model, *(["--quick"] if quick else [])],
            env={**os.environ, **silent, "PYTHONPATH": folder, "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _where(script: str) -> dict[str, str]:
    made = subprocess.run([ROOT / script], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in made.split())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half as many calls for TRL's own loop")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--inside", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(options.inside, options.quick)))
        return 0
    figures = measure(options.quick)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:>12,}")
    broken = [name for name, holds in BOUNDS.items() if not holds(figures[name])]
    for name in broken:
        print(f"out of bounds: {name} = {figures[name]}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
