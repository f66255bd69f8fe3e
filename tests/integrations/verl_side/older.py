"""Scenarios of verl's older trainer, which needs a row for each sample: AgentLoopManager, RewardLoopManager."""

import asyncio
import concurrent.futures
import copy
import time
from typing import Any

import counting_tools
import numpy as np
import ray
import torch
from losses import compare
from scene import Scene, code_rewards
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager

SUMS = ["59 - 7", "23 + 19", "64 - 8", "9 * 6"]
SHOWN = [("12 + 30", 42), ("81 - 19", 62), ("7 * 8", 56), ("45 + 28", 73)]


class Older:
    """Runs all scenarios with one manager."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.config = scene.config(scene.spec["sandbox"])
        self.rewards = RewardLoopManager(self.config)
        self.manager = AgentLoopManager.create(
            config=self.config,
            llm_client=scene.client(self.config),
            reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
        )
        self.out: dict[str, Any] = {}

    def play(self) -> dict[str, Any]:
        self.run("whole", self.scene.rows(self.config, list(range(64))))
        self.run("verl_loop", self.scene.rows(self.config, [0, 1, 2, 4], agent="tool_agent"))
        self.run("scored", self.scene.rows(self.config, list(range(8)), agent="toolroll_scored"))
        self.with_rewards()
        if self.scene.spec.get("sglang"):
            self.scene.set_mode("real", url=self.scene.spec["sglang"])
            self.run("real", self.conversations())
        pid = self.scene.spec["sandbox_pid"]
        self.scene.set_mode("dying", before=2, when=32, pid=pid)
        asked = self.scene.rows(self.config, list(range(16)), n=4, agent="toolroll_hurried")
        given = self.run("dying", asked)
        self.out["dying"]["compared"] = compare(asked, given, self.config)
        return self.out

    def stop(self) -> None:
        """Stop the workers, because those of another trainer have the same names."""
        for actor in (*self.manager.agent_loop_workers, *self.rewards.reward_loop_workers):
            ray.kill(actor)

    def run(self, name: str, asked: DataProto) -> DataProto:
        began = time.monotonic()
        workers = self.manager.agent_loop_workers
        ray.get([worker.__ray_call__.remote(counting_tools.reset) for worker in workers])
        ready = time.monotonic()
        given = self.manager.generate_sequences(copy.deepcopy(asked))
        took = time.monotonic() - ready
        tools = ray.get([worker.__ray_call__.remote(counting_tools.counts) for worker in workers])
        self.out[name] = {
            "rows": rows_of(given),
            "server": self.scene.server_log(),
            "tools": tools,
            "took": took,
            "until_ready": ready - began,
        }
        self.scene.set_mode("scripted")
        return given

    def with_rewards(self) -> None:
        """Run rollouts in the workers and verl's reward manager here, with one limit for both."""
        sandbox = self.scene.spec["sandbox"]
        config = self.scene.config(sandbox, *code_rewards(sandbox))

        async def score() -> list[dict[str, Any]]:
            tokenizer = self.scene.tokenizer
            manager = load_reward_manager(config, tokenizer)
            return await asyncio.gather(*(manager.run_single(program(number, tokenizer)) for number in range(48)))

        with concurrent.futures.ThreadPoolExecutor() as threads:
            scores = threads.submit(lambda: asyncio.run(score()))
            self.run("with_rewards", self.scene.rows(self.config, list(range(32))))
            self.out["with_rewards"]["scores"] = [one["reward_score"] for one in scores.result()]

    def conversations(self) -> DataProto:
        """Return questions for a real model, preceded by four examples of tool calls."""
        rows = self.scene.rows(self.config, list(range(len(SUMS))))
        for place, expression in enumerate(SUMS):
            rows.non_tensor_batch["raw_prompt"][place] = conversation(expression)
        return rows


def program(number: int, tokenizer: Any) -> DataProto:
    """Return an answer that is a program, correct for even numbers, as a reward manager receives it."""
    ids = torch.tensor([tokenizer.encode(f"```python\nprint({number} + {number % 2})\n```")])
    cases = {"inputs": [""], "outputs": [str(number)]}
    fields = {"data_source": "sums", "reward_model": {"ground_truth": cases}, "extra_info": {}}
    arrays = {}
    for key, value in fields.items():
        arrays[key] = np.empty(1, dtype=object)
        arrays[key][0] = value
    return DataProto.from_dict({"responses": ids, "attention_mask": torch.ones_like(ids)}, arrays)


def conversation(expression: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Calculate with the code_interpreter."}]
    for shown, value in SHOWN:
        function = {"name": "code_interpreter", "arguments": {"code": f"print({shown})"}}
        messages += [
            {"role": "user", "content": f"What is {shown}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"{shown} is {value}."},
        ]
    return [*messages, {"role": "user", "content": f"What is {expression}?"}]


def rows_of(given: DataProto) -> list[dict[str, Any]]:
    """Return the rows of a batch without padding."""
    batch, rows = given.batch, []
    width = batch["prompts"].shape[1]
    for place in range(len(given)):
        attention = batch["attention_mask"][place].bool()
        size = int(attention[width:].sum())
        fields = {key: values[place] for key, values in given.non_tensor_batch.items()}
        names = ("turn_scores", "tool_rewards", "toolroll", "min_global_steps", "max_global_steps")
        rows.append(
            {
                "prompt": batch["prompts"][place][attention[:width]].tolist(),
                "response": batch["responses"][place][:size].tolist(),
                "mask": batch["response_mask"][place][:size].tolist(),
                "logprobs": batch["rollout_log_probs"][place][:size].tolist(),
                "beyond": int(batch["response_mask"][place][size:].sum()),
                "score": float(batch["rm_scores"][place].sum()),
                "num_turns": int(fields["__num_turns__"]),
                **{key: fields.get(key) for key in names},
            }
        )
    return rows
