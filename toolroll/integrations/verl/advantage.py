"""Advantages that set a damaged sample aside: verl's own estimators, over the rows that there is something to learn in.

    algorithm.adv_estimator=toolroll_grpo      # in place of grpo

verl's older trainer (`main_ppo` of 0.8, `trainer.use_v1=False` in 0.9) needs a row for each sample, and a score for
each row. Of a damaged sample the row is masked, which keeps it out of the loss; but its score would still count in the
baseline of its group. Here rows with nothing to learn in are taken out before the estimator sees them: for the others
the result is the very same as if these had never been sampled. Their own advantages are 0.

verl's newer trainers don't need it: there, what is damaged isn't in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from toolroll.errors import ConfigError

PREFIX = "toolroll_"
WRAPPED = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
"""Estimators by groups that verl calls with rewards, mask and groups, and nothing else."""
OTHER_GROUPED = ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Those that it calls with more, which ones of ours wouldn't get."""

Estimator = Callable[..., tuple[Any, Any]]


def register_estimators() -> None:
    """Make them known to verl, in this process. verl calls them in its trainer's."""
    from verl.trainer.ppo import core_algos

    for name in WRAPPED:
        if name in core_algos.ADV_ESTIMATOR_REGISTRY and PREFIX + name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            estimator = set_aside(core_algos.get_adv_estimator_fn(name), reads_norm=name == "grpo")
            core_algos.register_adv_est(PREFIX + name)(estimator)


def set_aside(estimator: Estimator, *, reads_norm: bool = False) -> Estimator:
    """An estimator over the rows that there is something to learn in. All others have advantages and returns of 0.

    `reads_norm`: verl's trainer tells GRPO `norm_adv_by_std_in_grpo` by itself, but no other.
    """

    @wraps(estimator)
    def over_the_rest(
        token_level_rewards: Any, response_mask: Any, index: Any = None, config: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        import torch

        if reads_norm and config is not None:
            more.setdefault("norm_adv_by_std_in_grpo", config.get("norm_adv_by_std_in_grpo", True))
        kept = response_mask.sum(dim=-1) > 0
        advantages = torch.zeros_like(token_level_rewards)
        returns = torch.zeros_like(token_level_rewards)
        if bool(kept.any()):
            groups = {} if index is None else {"index": index[kept.cpu().numpy()]}
            found = estimator(
                token_level_rewards=token_level_rewards[kept],
                response_mask=response_mask[kept],
                config=config,
                **groups,
                **more,
            )
            advantages[kept], returns[kept] = found[0].to(advantages.dtype), found[1].to(returns.dtype)
        return advantages, returns

    return over_the_rest


def check_estimator(algorithm: Mapping[str, Any]) -> None:
    """Where each sample must have a row: refuse an estimator by which a damaged one would count in its group."""
    name = str(getattr(algorithm["adv_estimator"], "value", algorithm["adv_estimator"]))
    if name in WRAPPED:
        raise ConfigError(
            f"algorithm.adv_estimator={name}: this trainer of verl's needs a row for each sample, and the row of one "
            f"that the infrastructure damaged would count in its group's baseline. Set "
            f"algorithm.adv_estimator={PREFIX}{name} and, in the environment, "
            "VERL_USE_EXTERNAL_MODULES=toolroll.integrations.verl; or take verl's newer trainer "
            "(trainer.use_v1=True in 0.9, verl.trainer.main_ppo_sync in 0.8), which does without."
        )
    if name in OTHER_GROUPED:
        raise ConfigError(
            f"algorithm.adv_estimator={name}: this trainer of verl's needs a row for each sample, and the row of one "
            "that the infrastructure damaged would count in a baseline. Take verl's newer trainer "
            "(trainer.use_v1=True in 0.9, verl.trainer.main_ppo_sync in 0.8), which does without."
        )
