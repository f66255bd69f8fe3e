"""Adapter for TRL 1.16: toolroll's rollouts as the `rollout_func` of GRPOTrainer.

    rollout = rollout_func(engine=SGLangEngine(url), tools="tools.yaml", rewards=reward, weights_dir="served")
    trainer = GRPOTrainer(model, reward_funcs=trajectory_reward, rollout_func=rollout, train_dataset=rows, args=args)

Invariants:

- A sample with an infra fault does not contribute to the loss: its tokens are masked and its reward is None, which
  makes TRL exclude it from the baseline of its group. `scored` does the same for the user's reward functions.
- The engine samples with the trainer's weights. Tokens sampled with other weights are counted in the metrics.
- Trajectories are the same as those of `toolroll.Rollout`.

Neither TRL nor torch is imported here. The adapter only uses the trainer object that it receives.
"""

from toolroll.integrations.trl.reward import scored, trajectory_reward
from toolroll.integrations.trl.trainer_rollout import TrainerRollout

rollout_func = TrainerRollout
"""TRL's name for `TrainerRollout`."""

__all__ = ["TrainerRollout", "rollout_func", "scored", "trajectory_reward"]
