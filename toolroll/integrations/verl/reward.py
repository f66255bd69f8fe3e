"""Scores, for verl: programs run in the sandbox, within the limit that the rollouts have a share in.

    reward.custom_reward_function.path=pkg://toolroll.integrations.verl.reward
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.sandbox_fusion_url=http://10.0.0.1:8080

They are those of toolroll/rewards/code.py, but for one thing. A score that can't be had, because the sandbox is down,
is None there, and verl has no place for that: here it is an InfraFault. verl's newer trainers leave a sample out whose
reward function raises; the older one stops at it, and says why.

Where the agent loop computes the score itself (`rewards` in its settings), every trainer leaves such a sample out:
`reward_rule`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.errors import InfraFault
from toolroll.integrations.verl.sample import fields_of
from toolroll.integrations.verl.settings import RewardWeights
from toolroll.rewards import code
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.trajectory import Trajectory

NAME = "function"


class ScoreUnavailable(InfraFault):
    """There is no score, and 0 would be a lie: what the program does could not be found out."""


def compute_score(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float:
    """The score of one answer. It blocks."""
    if _is_left_out(extra_info):
        return 0.0
    return _had(code.compute_score(data_source, solution_str, ground_truth, extra_info, **settings))


async def compute_score_async(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float:
    """The score of one answer."""
    if _is_left_out(extra_info):
        return 0.0
    return _had(await code.compute_score_async(data_source, solution_str, ground_truth, extra_info, **settings))


def reward_rule(weights: RewardWeights | None, config: Any, tokenizer: Any) -> RewardRule | None:
    """How the agent loop composes a score; None where verl's reward loop gives it."""
    if weights is None:
        return None
    functions: dict[str, RewardFunction] = {}
    if weights.function:
        functions = {NAME: as_reward_function(_configured(config), tokenizer)}
    return RewardRule(steps=weights.steps, tools=weights.tools, functions=functions, weights={NAME: weights.function})


def _configured(config: Any) -> Callable[..., Any]:
    """verl's reward function, as its reward managers have it."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    function: Callable[..., Any] = get_custom_reward_fn(config) or default_compute_score
    return function


def as_reward_function(function: Callable[..., Any], tokenizer: Any) -> RewardFunction:
    """A reward function of verl's as one of ours; it is told what verl's reward loop would tell it.

    What it raises is no doing of the model's: there is no score then.
    """

    async def score(trajectory: Trajectory) -> float | None:
        row = trajectory.extra
        arguments = {
            "data_source": row.get("data_source"),
            "solution_str": tokenizer.decode(trajectory.tokens.response_ids, skip_special_tokens=True),
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": {**(row.get("extra_info") or {}), **fields_of(trajectory, None)},
        }
        given = await asyncio.to_thread(function, **arguments)  # one that is async only begins there
        if inspect.isawaitable(given):
            given = await given
        value = given.get("score") if isinstance(given, Mapping) else given
        return None if value is None else float(value)

    return score


def _had(score: float | None) -> float:
    if score is None:
        raise ScoreUnavailable(
            "The sandbox could not say what the program does, so there is no score. verl's newer trainers leave the "
            "sample out; with the older one, set `rewards` of the agent loop toolroll, which leaves it out as well."
        )
    return score


def _is_left_out(extra_info: Any) -> bool:
    """Whether the agent loop has left the sample out: its row is masked, and the sandbox may be what failed."""
    told = extra_info.get("toolroll") if isinstance(extra_info, Mapping) else None
    return isinstance(told, Mapping) and told.get("left_out") is not None
