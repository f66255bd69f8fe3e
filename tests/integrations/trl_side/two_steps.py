"""Run examples/trl_gsm8k/train.py and record measurements.

Runs in TRL's environment: `python two_steps.py TRAIN.PY RESULT ARGUMENTS…`. There are two differences from the example:
the temperature is not 1, so that raw and processed log-probabilities differ; and rewards depend slightly on the length,
because a group of few samples often has equal rewards and therefore no gradient.
"""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer

TEMPERATURE = 0.7
# On a CPU without instructions for bfloat16, float32 is up to four times as fast.
PRECISION: dict[str, Any] = (
    {} if torch.cpu._is_avx512_bf16_supported() else {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}
)
results: dict[str, Any] = {"ratios": []}


class RecordingTrainer(GRPOTrainer):
    """Trainer that compares TRL's log-probabilities of the sampled tokens with the engine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        results["trainer"] = self
        results["before"] = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        keep = batch["completion_ids"].size(1)
        with torch.no_grad():
            own, *_ = self._get_per_token_logps_and_entropies(self.model, ids, attention, keep, batch_size=2)
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        difference = (own - batch["sampling_per_token_logps"])[mask]
        ratio = difference.exp().mean().item()
        results["ratios"].append(
            {"tokens": len(difference), "mean": ratio, "deviation": difference.abs().mean().item()}
        )
        return batch


def main(train_py: str, result: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("train", train_py)
    assert spec
    assert spec.loader
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    train.GRPOTrainer = RecordingTrainer
    train.GRPOConfig = partial(GRPOConfig, temperature=TEMPERATURE, **PRECISION)
    reward = train.answer_reward
    train.answer_reward = lambda trajectory: reward(trajectory) - 0.001 * sum(trajectory.tokens.mask)
    sys.argv = [train_py, *arguments]
    train.main()
    trainer, before = results.pop("trainer"), results.pop("before")
    after = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    served = load_file(Path(trainer.args.output_dir) / "served" / "model.safetensors")
    results["changed"] = sum(not torch.equal(after[name], before[name]) for name in before) / len(before)
    results["served_is_final"] = all(torch.equal(served[name], after[name]) for name in after if name in served)
    results["served"] = len(served)
    results["log"] = trainer.state.log_history
    Path(result).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
