"""examples/trl_gsm8k/train.py as it stands, with somebody who looks on.

Run in TRL's environment: `python two_steps.py TRAIN.PY RESULT ARGUMENTS…`. Two things differ: the temperature isn't 1,
so that it shows which log-probabilities are compared with which; and rewards differ a little by length, since samples
that are worth the same, as happens with so few, have no gradient.
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
seen: dict[str, Any] = {"ratios": []}


class Watched(GRPOTrainer):
    """Writes down how TRL's own log-probabilities of what was sampled compare with the engine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seen["trainer"] = self
        seen["before"] = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
        attention = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
        keep = made["completion_ids"].size(1)
        with torch.no_grad():
            own, *_ = self._get_per_token_logps_and_entropies(self.model, ids, attention, keep, batch_size=2)
        mask = (made["completion_mask"] * made["tool_mask"]).bool()
        difference = (own - made["sampling_per_token_logps"])[mask]
        ratio = difference.exp().mean().item()
        seen["ratios"].append({"tokens": len(difference), "mean": ratio, "apart": difference.abs().mean().item()})
        return made


def main(train_py: str, result: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("train", train_py)
    assert spec
    assert spec.loader
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    train.GRPOTrainer = Watched
    train.GRPOConfig = partial(GRPOConfig, temperature=TEMPERATURE)
    worth = train.right
    train.right = lambda trajectory: worth(trajectory) - 0.001 * sum(trajectory.tokens.mask)
    sys.argv = [train_py, *arguments]
    train.main()
    trainer, before = seen.pop("trainer"), seen.pop("before")
    after = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    served = load_file(Path(trainer.args.output_dir) / "served" / "model.safetensors")
    seen["changed"] = sum(not torch.equal(after[name], before[name]) for name in before) / len(before)
    seen["served_is_the_last"] = all(torch.equal(served[name], after[name]) for name in after if name in served)
    seen["served"] = len(served)
    seen["log"] = trainer.state.log_history
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
