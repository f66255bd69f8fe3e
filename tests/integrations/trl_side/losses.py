"""Compare the update of TRL's trainer with and without a sample that has an infra fault.

Runs in TRL's environment: `python losses.py RESULT`. Each case is one step of gradient descent of a small model. The
update is the difference of its weights.
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

ANSWERS = ["It is one.", "Two, I think.", "Three it is, or four."]
REWARDS = {"It is one.": 1.0, "Two, I think.": 0.25, "Three it is, or four.": 0.0}
CALL = '<tool_call>\n{"name": "broken", "arguments": {}}\n</tool_call>'
PROMPT = [{"role": "user", "content": "Which number is it?"}]


@tool
def broken() -> str:
    """Raise an infra fault."""
    raise InfraFault("the service is down")


def answer_reward(trajectory: Trajectory) -> float:
    return REWARDS.get(str(trajectory.messages[-1].content), 0.0)


@scored
def length_reward(completions: Any, **_: Any) -> list[float]:
    """Reward function of a user, which does not handle excluded samples."""
    return [len(one[0]["content"]) / 50 for one in completions]


class AnswersEngine(ScriptedEngine):
    """Engine that returns the next answer for each trajectory."""

    def __init__(self, tokenizer: Any, answers: Sequence[str]) -> None:
        self.order: dict[str, int] = {}
        self.ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in answers]
        super().__init__(lambda name, prompt, turn: [])

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any, **more: Any) -> Any:
        mine = self.order.setdefault(str(more["affinity"]), len(self.order))
        self._script = lambda *_: self.ids[mine % len(self.ids)]
        return await super().generate(request_id, prompt_ids, sampling_params, **more)


def weight_update(tokenizer: Any, answers: Sequence[str], functions: Any, loss_type: str, **settings: Any) -> Any:
    """Return the change of the weights by one step, and TRL's log of it."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=1,
        per_device_train_batch_size=len(answers),
        num_generations=len(answers),
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
            engine=AnswersEngine(tokenizer, answers),
            tools=[broken],
            rewards=answer_reward,
            limits={"max_assistant_turns": 2},
            model_format="chatml",
        ),
    )
    trainer.train()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return after - before, trainer.state.log_history[0]


def main(result: str) -> None:
    tokenizer = small_tokenizer.make(chat_template=small_tokenizer.CHATML_TEMPLATE)
    zero_if_excluded = lambda *, toolroll, **_: [fields["reward"] or 0.0 for fields in toolroll]  # noqa: E731
    zero_if_excluded.__name__ = "zero_if_excluded"
    results = {}
    for name, loss_type, functions, settings in [
        ("dapo", "dapo", trajectory_reward, {}),
        ("bnpo", "bnpo", trajectory_reward, {}),
        ("cispo", "cispo", trajectory_reward, {}),
        ("vespo", "vespo", trajectory_reward, {}),
        ("by batch", "dapo", trajectory_reward, {"scale_rewards": "batch"}),
        ("two functions", "dapo", [trajectory_reward, length_reward], {}),
        *((name, name, trajectory_reward, {}) for name in ("grpo", "dr_grpo", "sapo", "luspo")),
        ("zero in place of None", "dapo", zero_if_excluded, {}),
    ]:
        without, log = weight_update(tokenizer, ANSWERS, functions, loss_type, **settings)
        with_fault, log_with_fault = weight_update(tokenizer, [*ANSWERS, CALL], functions, loss_type, **settings)
        ratio = (with_fault @ without / (without @ without)).item()
        results[name] = {
            "update": without.norm().item(),
            "ratio": ratio,
            "deviation": (with_fault - ratio * without).norm().item(),
            "reward": [log["reward"], log_with_fault["reward"]],
            "left_out": log_with_fault.get("toolroll/left_out"),
        }
    with open(result, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
