"""TRL: our rollout loop as the `rollout_func` of its GRPOTrainer, and what keeps a damaged sample out of the loss.

    rollout = rollout_func(engine=SGLangEngine(url), tools="tools.yaml", rewards=right, weights_dir="served")
    trainer = GRPOTrainer(model, reward_funcs=trajectory_reward, rollout_func=rollout, train_dataset=rows, args=args)

It promises:

- A sample that the infrastructure damaged adds nothing to the loss: its tokens are masked, and its reward is None, by
  which TRL leaves it out of its group's baseline too. Reward functions of the user's own get the same by `scored`.
- The engine samples with the trainer's weights. What it sampled with others is counted, and shown with the metrics.
- All else is as in our own rollouts: the loop is the same one (toolroll/rollout/loop.py).

TRL 1.16. Neither it nor torch is imported here: all that is asked of the trainer is asked of the one that is given.
"""

from toolroll.integrations.trl.reward import scored, trajectory_reward
from toolroll.integrations.trl.trainer_rollout import TrainerRollout

rollout_func = TrainerRollout
"""By the name that TRL has for it."""

__all__ = ["TrainerRollout", "rollout_func", "scored", "trajectory_reward"]
