"""What TRL's own trainer learns from a batch, with and without a sample that the infrastructure damaged.

Run in TRL's environment: `python losses.py RESULT`. Each case is one step of plain gradient descent by a small model;
what it learnt is the difference of its weights.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from rollout import small_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from toolroll import InfraFault, Trajectory, tool
from toolroll.integrations.trl import rollout_func, scored, trajectory_reward
from toolroll.rollout.engines.scripted import ScriptedEngine

SAID = ["It is one.", "Two, I think.", "Three it is, or four."]
WORTH = {"It is one.": 1.0, "Two, I think.": 0.25, "Three it is, or four.": 0.0}
CALL = '<tool_call>\n{"name": "broken", "arguments": {}}\n</tool_call>'
PROMPT = [{"role": "user", "content": "Which number is it?"}]


@tool
def broken() -> str:
    """Break."""
    raise InfraFault("the service is down")


def worth(trajectory: Trajectory) -> float:
    return WORTH.get(str(trajectory.messages[-1].content), 0.0)


@scored
def long_winded(completions: Any, **_: Any) -> list[float]:
    """A user's own, which knows nothing of damaged samples."""
    return [len(one[0]["content"]) / 50 for one in completions]


class Speaker(ScriptedEngine):
    """Each trajectory says something else, in order."""

    def __init__(self, tokenizer: Any, said: Sequence[str]) -> None:
        self.order: dict[str, int] = {}
        self.ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in said]
        super().__init__(lambda name, prompt, turn: [])

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any, **more: Any) -> Any:
        mine = self.order.setdefault(str(more["affinity"]), len(self.order))
        self._script = lambda *_: self.ids[mine % len(self.ids)]
        return await super().generate(request_id, prompt_ids, sampling_params, **more)


def learnt(tokenizer: Any, said: Sequence[str], functions: Any, loss_type: str, **settings: Any) -> Any:
    """The change of the weights by one step, and what TRL logged of it."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=1,
        per_device_train_batch_size=len(said),
        num_generations=len(said),
        loss_type=loss_type,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=1e9,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 4),
        reward_funcs=functions,
        rollout_func=rollout_func(
            engine=Speaker(tokenizer, said),
            tools=[broken],
            rewards=worth,
            limits={"max_assistant_turns": 2},
            model_format="chatml",
        ),
    )
    trainer.train()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return after - before, trainer.state.log_history[0]


def main(result: str) -> None:
    tokenizer = small_tokenizer.make(chat_template=small_tokenizer.CHATML_TEMPLATE)
    unmarked = lambda *, toolroll, **_: [fields["reward"] or 0.0 for fields in toolroll]  # noqa: E731
    unmarked.__name__ = "zero_for_the_damaged"
    seen = {}
    for name, loss_type, functions, settings in [
        ("dapo", "dapo", trajectory_reward, {}),
        ("bnpo", "bnpo", trajectory_reward, {}),
        ("cispo", "cispo", trajectory_reward, {}),
        ("vespo", "vespo", trajectory_reward, {}),
        ("by batch", "dapo", trajectory_reward, {"scale_rewards": "batch"}),
        ("two functions", "dapo", [trajectory_reward, long_winded], {}),
        *((name, name, trajectory_reward, {}) for name in ("grpo", "dr_grpo", "sapo", "luspo")),
        ("zero in place of None", "dapo", unmarked, {}),
    ]:
        without, log = learnt(tokenizer, SAID, functions, loss_type, **settings)
        damaged, log_damaged = learnt(tokenizer, [*SAID, CALL], functions, loss_type, **settings)
        along = (damaged @ without / (without @ without)).item()
        seen[name] = {
            "learnt": without.norm().item(),
            "times": along,
            "apart": (damaged - along * without).norm().item(),
            "reward": [log["reward"], log_damaged["reward"]],
            "left_out": log_damaged.get("toolroll/left_out"),
        }
    with open(result, "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
