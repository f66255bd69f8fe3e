"""Compare advantages, losses and gradients with and without excluded samples, with verl's functions."""

import copy
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.config import omega_conf_to_dataclass

from toolroll.integrations.verl.advantage import PREFIX, WRAPPED_ESTIMATORS

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def compare(asked: DataProto, given: DataProto, config: DictConfig) -> dict[str, Any]:
    """Compare a batch with excluded samples with the same batch without them."""
    data = DataProto.from_dict(
        {"response_mask": given.batch["response_mask"], "token_level_rewards": given.batch["rm_scores"]},
        {"uid": asked.non_tensor_batch["uid"]},
    )
    kept = (data.batch["response_mask"].sum(-1) > 0).numpy()
    rest = data.select_idxs(kept)
    difference = {name: _advantages(data, rest, kept, PREFIX + name, name, config) for name in WRAPPED_ESTIMATORS}
    plain = _advantages(data, rest, kept, "grpo", "grpo", config)
    by_gae = _by_gae(data, rest, kept, config)
    advantages = _advantage(data, PREFIX + "grpo", config).batch["advantages"]
    return {
        "kept": int(kept.sum()),
        "advantages": difference,
        "of_plain_grpo": plain,
        "by_gae": by_gae,
        "of_excluded": float(advantages[~torch.tensor(kept)].abs().max()),
        "spread": float(advantages.abs().max()),
        "losses": {mode: _losses(data, kept, advantages, mode, config) for mode in MODES},
    }


def _advantage(data: DataProto, name: str, config: DictConfig) -> DataProto:
    return compute_advantage(copy.deepcopy(data), adv_estimator=name, config=config.algorithm)


def _advantages(
    data: DataProto, rest: DataProto, kept: np.ndarray, name: str, without: str, config: DictConfig
) -> float:
    """Return the maximum difference that excluded samples make to the advantages and returns of the others."""
    actual, expected = _advantage(data, name, config), _advantage(rest, without, config)
    return max(float((actual.batch[of][kept] - expected.batch[of]).abs().max()) for of in ("advantages", "returns"))


def _by_gae(data: DataProto, rest: DataProto, kept: np.ndarray, config: DictConfig) -> float:
    data = copy.deepcopy(data)
    data.batch["values"] = torch.rand(data.batch["response_mask"].shape, generator=torch.manual_seed(1))
    rest = data.select_idxs(kept)
    mask = rest.batch["response_mask"]
    actual, expected = (_advantage(one, "gae", config).batch["advantages"] for one in (data, rest))
    return float(((actual[kept] - expected) * mask).abs().max())


def _losses(data: DataProto, kept: np.ndarray, advantages: torch.Tensor, mode: str, config: DictConfig) -> list[float]:
    """Return the differences of loss and gradient."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mask = data.batch["response_mask"]
    seed = torch.manual_seed(2)
    old = -torch.rand(mask.shape, generator=seed)
    new = (old + 0.1 * torch.randn(mask.shape, generator=seed)).requires_grad_()
    loss_of = get_policy_loss_fn("vanilla")

    def loss(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = loss_of(
            old_log_prob=old[rows],
            log_prob=new[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            loss_agg_mode=mode,
            config=actor,
        )[0]
        (gradient,) = torch.autograd.grad(made, new)
        return made, gradient

    (whole, by_whole), (rest, by_rest) = loss(slice(None)), loss(torch.tensor(kept))
    assert float(by_rest.abs().max()) > 0
    return [float((whole - rest).abs()), float((by_whole - by_rest).abs().max())]
