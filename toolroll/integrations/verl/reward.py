"""Reward functions for verl that run programs in the sandbox, with the same limit as the rollouts.

    reward.custom_reward_function.path=pkg://toolroll.integrations.verl.reward
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.sandbox_fusion_url=http://10.0.0.1:8080

They are those of `toolroll.rewards.code` with one difference: if a score cannot be computed because the sandbox is
down, they raise an InfraFault instead of returning None, which verl does not support. verl's newer trainers exclude a
sample whose reward function raises; the older trainer stops with the error.

If the agent loop computes the score itself (`rewards` in its settings, see `reward_rule`), all trainers exclude such a
sample.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.errors import InfraFault
from toolroll.integrations.verl.sample import sample_fields
from toolroll.integrations.verl.settings import RewardWeights
from toolroll.rewards import code
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.trajectory import Trajectory

FUNCTION_NAME = "function"


class ScoreUnavailable(InfraFault):
    """Raised when a score could not be computed. A score of 0 would be wrong."""


def compute_score(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float:
    """Return the score of one answer, blocking until it is available.

    Args:
        data_source: Name of the dataset.
        solution_str: The answer.
        ground_truth: Test cases.
        extra_info: Further columns, and the fields of the agent loop.
        **settings: Settings of `toolroll.rewards.code`, such as `sandbox_fusion_url`.

    Returns:
        The score, or 0.0 for an excluded sample.

    Raises:
        ScoreUnavailable: If the sandbox failed.
    """
    if _is_excluded(extra_info):
        return 0.0
    return _require_score(code.compute_score(data_source, solution_str, ground_truth, extra_info, **settings))


async def compute_score_async(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float:
    """Return the score of one answer. The async version of `compute_score`.

    Args:
        data_source: Name of the dataset.
        solution_str: The answer.
        ground_truth: Test cases.
        extra_info: Further columns, and the fields of the agent loop.
        **settings: Settings of `toolroll.rewards.code`, such as `sandbox_fusion_url`.

    Returns:
        The score, or 0.0 for an excluded sample.

    Raises:
        ScoreUnavailable: If the sandbox failed.
    """
    if _is_excluded(extra_info):
        return 0.0
    score = await code.compute_score_async(data_source, solution_str, ground_truth, extra_info, **settings)
    return _require_score(score)


def reward_rule(weights: RewardWeights | None, config: Any, tokenizer: Any) -> RewardRule | None:
    """Return the rule by which the agent loop computes scores, or None if verl's reward loop does.

    Args:
        weights: Weights from the settings of the agent loop.
        config: verl's config.
        tokenizer: Tokenizer that decodes the response.
    """
    if weights is None:
        return None
    functions: dict[str, RewardFunction] = {}
    if weights.function:
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        configured = get_custom_reward_fn(config) or default_compute_score
        functions = {FUNCTION_NAME: adapt_reward_function(configured, tokenizer)}
    return RewardRule(
        steps=weights.steps, tools=weights.tools, functions=functions, weights={FUNCTION_NAME: weights.function}
    )


def adapt_reward_function(function: Callable[..., Any], tokenizer: Any) -> RewardFunction:
    """Convert a reward function of verl to one of toolroll.

    It receives the same arguments as from verl's reward loop. An exception is an infra fault without a score.

    Args:
        function: Reward function of verl, sync or async.
        tokenizer: Tokenizer that decodes the response.
    """

    async def score(trajectory: Trajectory) -> float | None:
        row = trajectory.extra
        arguments = {
            "data_source": row.get("data_source"),
            "solution_str": tokenizer.decode(trajectory.tokens.response_ids, skip_special_tokens=True),
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": {**(row.get("extra_info") or {}), **sample_fields(trajectory, None)},
        }
        result = await asyncio.to_thread(function, **arguments)  # an async function only creates its coroutine there
        if inspect.isawaitable(result):
            result = await result
        value = result.get("score") if isinstance(result, Mapping) else result
        return None if value is None else float(value)

    return score


def _require_score(score: float | None) -> float:
    if score is None:
        raise ScoreUnavailable(
            "The score could not be computed, because the sandbox failed. verl's newer trainers exclude the sample. "
            "With the older trainer, set `rewards` of the agent loop toolroll to exclude it."
        )
    return score


def _is_excluded(extra_info: Any) -> bool:
    """Return True if the agent loop has excluded the sample. Its row is masked, and the sandbox may be down."""
    fields = extra_info.get("toolroll") if isinstance(extra_info, Mapping) else None
    return isinstance(fields, Mapping) and fields.get("left_out") is not None
