"""Advantage estimators that exclude masked rows: verl's estimators, applied to the other rows.

    algorithm.adv_estimator=toolroll_grpo      # instead of grpo

verl's older trainer (`main_ppo` of 0.8, `trainer.use_v1=False` in 0.9) needs a row and a score for each sample. The row
of an excluded sample is masked, which excludes it from the loss, but its score would still affect the baseline of its
group. These estimators remove masked rows before they call verl's. For the other rows the result is identical to that
of a batch without the excluded samples. The advantages of masked rows are 0.

verl's newer trainers do not need them, because their batches do not contain excluded samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from toolroll.errors import ConfigError

PREFIX = "toolroll_"
WRAPPED_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
"""Group-based estimators that verl calls with rewards, mask and groups only."""
UNSUPPORTED_ESTIMATORS = ("remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Group-based estimators that verl calls with further arguments, which a wrapper would not receive."""

_NEWER_TRAINER = "verl's newer trainer (trainer.use_v1=True in 0.9, verl.trainer.main_ppo_sync in 0.8)"

Estimator = Callable[..., tuple[Any, Any]]


def register_estimators() -> None:
    """Register the estimators with verl in this process. verl calls them in the trainer's process."""
    from verl.trainer.ppo import core_algos

    for name in WRAPPED_ESTIMATORS:
        if name in core_algos.ADV_ESTIMATOR_REGISTRY and PREFIX + name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            estimator = exclude_masked_rows(core_algos.get_adv_estimator_fn(name), reads_norm=name == "grpo")
            core_algos.register_adv_est(PREFIX + name)(estimator)


def exclude_masked_rows(estimator: Estimator, *, reads_norm: bool = False) -> Estimator:
    """Return an estimator that ignores rows without a token to train on.

    Args:
        estimator: Estimator of verl.
        reads_norm: Whether to read `norm_adv_by_std_in_grpo` from the config, which verl's trainer passes only to
        `grpo`.

    Returns:
        An estimator whose advantages and returns of masked rows are 0.
    """

    @wraps(estimator)
    def wrapper(
        token_level_rewards: Any, response_mask: Any, index: Any = None, config: Any = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        import torch

        if reads_norm and config is not None:
            kwargs.setdefault("norm_adv_by_std_in_grpo", config.get("norm_adv_by_std_in_grpo", True))
        kept = response_mask.sum(dim=-1) > 0
        advantages, returns = torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards)
        if bool(kept.any()):
            if index is not None:
                kwargs["index"] = index[kept.cpu().numpy()]
            rows = {"token_level_rewards": token_level_rewards[kept], "response_mask": response_mask[kept]}
            kept_advantages, kept_returns = estimator(**rows, config=config, **kwargs)
            advantages[kept], returns[kept] = kept_advantages.to(advantages.dtype), kept_returns.to(returns.dtype)
        return advantages, returns

    return wrapper


def counts_samples_once(algorithm: Mapping[str, Any]) -> bool:
    """Return True if verl's newer trainers count a sample with several rows once in its group's baseline.

    They do for `grpo`; `gae` has no groups. For other estimators, a sample has only its last row.

    Args:
        algorithm: verl's config under `algorithm`.
    """
    return _estimator(algorithm) in ("grpo", "gae")


def _estimator(algorithm: Mapping[str, Any]) -> str:
    return str(getattr(algorithm["adv_estimator"], "value", algorithm["adv_estimator"]))


def check_estimator(algorithm: Mapping[str, Any]) -> None:
    """Reject an estimator with which excluded samples would affect the baseline of their group.

    Args:
        algorithm: verl's config under `algorithm`.

    Raises:
        ConfigError: If the estimator is group-based and not one of this module.
    """
    name = _estimator(algorithm)
    if name not in (*WRAPPED_ESTIMATORS, *UNSUPPORTED_ESTIMATORS):
        return
    variable = "VERL_USE_EXTERNAL_MODULES=toolroll.integrations.verl"
    wrapper = f"Set algorithm.adv_estimator={PREFIX}{name} and the environment variable {variable}, or use"
    raise ConfigError(
        f"algorithm.adv_estimator={name}: this trainer needs a row for each sample, and the rows of samples with an "
        "infra fault would affect the baseline of their group. "
        f"{wrapper if name in WRAPPED_ESTIMATORS else 'Use'} {_NEWER_TRAINER}."
    )
