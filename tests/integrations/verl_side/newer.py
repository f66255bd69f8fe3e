"""Scenarios of verl's newer trainers, whose batches may be incomplete: AgentLoopManagerTQ, TransferQueue, ReplayBuffer.

The answers to one question have no score.
"""

import time
from pathlib import Path
from typing import Any

import counting_tools
import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from scene import NEWEST, Scene
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils import tensordict_utils as tu

from toolroll.rollout.chat.rendering import Continuation, Rendering
from toolroll.rollout.generation import TokenGenerator
from toolroll.rollout.trajectory import FinishReason

if NEWEST:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
else:
    from verl.trainer.main_ppo_sync import (
        AgentLoopManagerTQ,
        ReplayBuffer,
        compute_advantage_for_multi_trajectories,
    )

N = 4


class Newer:
    """Runs all scenarios with one manager."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        sandbox = scene.spec["other_sandbox"]
        self.config = scene.config(
            sandbox,
            f"reward.custom_reward_function.path={Path(__file__).with_name('scores.py')}",
            "reward.custom_reward_function.name=score",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.n={N}",
            "actor_rollout_ref.rollout.agent.num_workers=1",
        )
        with open_dict(self.config):
            self.config.transfer_queue.enable = True
            units = OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
            queue = OmegaConf.merge(self.config.transfer_queue, units)  # the default is eight
        tq.init(queue)
        self.rewards = RewardLoopManager(self.config)
        self.buffer = _buffer()
        self.manager = AgentLoopManagerTQ.create(
            config=self.config,
            llm_client=scene.client(self.config),
            reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
            **({} if NEWEST else {"replay_buffer": self.buffer}),
        )

    def play(self) -> dict[str, Any]:
        out = {"whole": self.run(1, "toolroll")}
        (worker,) = self.manager.agent_loop_workers
        self.scene.set_mode("scripted")
        ray.get(worker.__ray_call__.remote(rerender_turns))
        out["rerendered"] = self.run(2, "toolroll")
        ray.get(worker.__ray_call__.remote(end_after_rerendering))
        out["ended"] = self.run(4, "toolroll", score_by_session=True)
        ray.get(worker.__ray_call__.remote(restore_bridge))
        self.scene.set_mode("dying", before=2, when=16, pid=self.scene.spec["other_sandbox_pid"])
        out["dying"] = self.run(3, "toolroll_hurried")
        return out

    def run(self, step: int, agent: str, *, score_by_session: bool = False) -> dict[str, Any]:
        """Run the rollouts of one step and compute the advantages: 8 prompts with 4 samples each.

        With `score_by_session`, the score of a sample is its number in the group.
        """
        began = time.monotonic()
        batch = self.scene.batch(self.config, list(range(8)), agent)
        batch["uid"] = np.array([f"{uid}in{step}" for uid in batch["uid"]], dtype=object)  # unique in every step
        prompts = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(prompts, "global_steps", step)
        if NEWEST:
            tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in range(len(prompts))]
            tq.kv_batch_put(keys=list(prompts["uid"]), partition_id="train", tags=tags)
        self.manager.generate_sequences(prompts)
        sampled = self._sample(step, len(prompts))
        took = time.monotonic() - began
        tools = ray.get(
            [worker.__ray_call__.remote(counting_tools.counts) for worker in self.manager.agent_loop_workers]
        )
        samples = self._samples(sampled)
        padded = upsample_batch_to_divisible_size(sampled, 8 * N, self.scene.tokenizer.eos_token_id)
        made = self._advantages(padded, score_by_session=score_by_session)
        tq.kv_clear(keys=padded.keys, partition_id="train")
        seen = {"samples": samples, "tools": tools, "advantages": made, "padded": len(padded), "took": took}
        return {**seen, "server": self.scene.server_log()}

    def _sample(self, step: int, prompts: int) -> Any:
        if NEWEST:
            return self.buffer.sample(global_steps=step, partition_id="train", batch_size=prompts)[0]
        for _ in range(30):
            try:
                return self.buffer.sample("train", global_steps=step)
            except KeyError as error:
                # TransferQueue adds a key before its tags. The buffer fails if it has looked in between.
                if error.args != ("global_steps",):
                    raise
        raise TimeoutError(f"The samples of step {step} have no tags")

    def _samples(self, sampled: Any) -> list[dict[str, Any]]:
        fields = [
            "prompts",
            "responses",
            "response_mask",
            "rollout_log_probs",
            "rm_scores",
            "extra_fields",
            "num_turns",
        ]
        data = tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=fields)
        rows = []
        for place, key in enumerate(sampled.keys):
            row = {name: data[name][place] for name in fields}
            extra = row["extra_fields"] if isinstance(row["extra_fields"], dict) else row["extra_fields"].data
            rows.append(
                {
                    "key": key,
                    "prompt": row["prompts"].tolist(),
                    "response": row["responses"].tolist(),
                    "mask": row["response_mask"].tolist(),
                    "logprobs": row["rollout_log_probs"].tolist(),
                    "score": float(row["rm_scores"].sum()),
                    "toolroll": extra["toolroll"],
                }
            )
        return rows

    def _advantages(self, sampled: Any, *, score_by_session: bool) -> dict[str, float]:
        """Return the advantages by key, as the trainer computes them. Those of padding are at the end."""
        fields = ["uid", "response_mask", "rm_scores"]
        data = tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=fields)
        uids = [one if isinstance(one, str) else one.data for one in data.pop("uid")]
        padded = DataProto(batch=data.to_padded_tensor())
        padded.batch["token_level_rewards"] = padded.batch["rm_scores"]
        if score_by_session:
            numbers = [float(key.rsplit("_", 2)[1]) for key in sampled.keys]
            padded.batch["token_level_rewards"] = torch.zeros_like(padded.batch["rm_scores"])
            padded.batch["token_level_rewards"][:, 0] = torch.tensor(numbers)
        padded.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        made = compute_advantage_for_multi_trajectories(
            padded, batch_keys=sampled.keys, adv_estimator="grpo", num_repeat=N, config=self.config.algorithm
        )
        return {
            key: float(row.sum() / max(1, int(mask.sum())))
            for key, row, mask in zip(sampled.keys, made.batch["advantages"], made.batch["response_mask"], strict=True)
        }


_bridge = Rendering.bridge


def rerender_turns(worker: Any) -> None:
    """Emulate a template that re-renders earlier turns, so that each turn becomes a separate sequence."""

    def bridge(rendering: Any, prompt_ids: Any, sampled_ids: Any, new: Any, **more: Any) -> Continuation:
        continuation = _bridge(rendering, prompt_ids, sampled_ids, new, **more)
        return Continuation([*prompt_ids, *sampled_ids, *continuation.ids], rerendered=True)

    Rendering.bridge = bridge  # type: ignore[method-assign]


_append_tool_responses = TokenGenerator.append_tool_responses


def end_after_rerendering(worker: Any) -> None:
    """Emulate a deadline that passes after the second re-rendering, before anything else is sampled."""

    def append_tool_responses(generator: Any, request: Any, responses: Any) -> None:
        _append_tool_responses(generator, request, responses)
        if request.turn == 2:
            request.finish(FinishReason.DEADLINE)

    TokenGenerator.append_tool_responses = append_tool_responses  # type: ignore[method-assign]


def restore_bridge(worker: Any) -> None:
    Rendering.bridge = _bridge  # type: ignore[method-assign]
    TokenGenerator.append_tool_responses = _append_tool_responses  # type: ignore[method-assign]


def _buffer() -> Any:
    if not NEWEST:
        return ReplayBuffer()
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.5,
    )
