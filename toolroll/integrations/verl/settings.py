"""AgentSettings: what a user may set of the agent loop, and what verl's own config says already.

The settings stand in the file that `rollout.agent.agent_loop_config_path` names, beside `_target_`:

    - name: toolroll
      _target_: toolroll.integrations.verl.ToolrollAgentLoop
      limits: {call_timeout: 60, trajectory_timeout: 1800}

Lengths, turns and parallel calls are verl's keys (`rollout.response_length`, `rollout.multi_turn.*`); a limit given
here goes before them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolroll.errors import ConfigError, explain
from toolroll.rollout.limits import Limits

CHARACTERS = 4
"""Characters that count as a token: verl's limit of a tool's answer is in characters, ours in tokens."""
SIDES = {"left": "start", "right": "end", "middle": "middle"}
"""verl names the side that is cut off by its place; ours is where the cut is made."""


class RewardWeights(BaseModel):
    """How the score is composed where the agent loop computes it itself: see toolroll/rollout/reward.py."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: float = 1.0
    """Of the sum of what the calls earned."""
    tools: dict[str, float] = Field(default_factory=dict)
    """Of each tool's `calc_reward`; 1 for one that isn't named."""
    function: float = 1.0
    """Of verl's reward function (`reward.custom_reward_function`, else verl's default); 0: it isn't called."""


class AgentSettings(BaseModel):
    """What stands in verl's file of agent loops."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Limits`."""
    model_format: str | None = None
    """How the model's conversations are written; by default found from the tokenizer."""
    rewards: RewardWeights | None = None
    """None: verl's reward loop gives the score. Else the agent loop does, and a score that it can't have leaves the
    sample out."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> AgentSettings:
        """The settings, or ConfigError that says what is wrong with them."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"The agent loop toolroll: {explain(error, cls.model_fields)}.") from error


def limits_of(rollout: Mapping[str, Any], given: Mapping[str, Any]) -> Limits:
    """The limits of a trajectory, from verl's `actor_rollout_ref.rollout` and our own settings."""
    turns = rollout["multi_turn"]
    longest = rollout["response_length"]
    by_verl: dict[str, Any] = {
        "max_prompt_len": rollout["prompt_length"],
        "max_response_len": longest,
        "max_seq_len": rollout.get("max_model_len"),
        "max_assistant_turns": _turns(turns, longest),
        "max_parallel_calls": turns.get("max_parallel_calls") or 1,
        "max_tool_response_tokens": max(16, math.ceil((turns.get("max_tool_response_length") or 256) / CHARACTERS)),
        "cut_tool_response": SIDES.get(turns.get("tool_response_truncate_side") or "middle", "middle"),
    }
    try:
        return Limits.model_validate({**by_verl, **given})
    except ValidationError as error:
        raise ConfigError(f"The agent loop toolroll: limits: {explain(error, Limits.model_fields)}.") from error


def _turns(turns: Mapping[str, Any], longest: int) -> int:
    """verl limits the model's turns, the tools' turns, both, or neither; a turn has at least one token."""
    most = [longest]
    if turns.get("max_assistant_turns"):
        most.append(turns["max_assistant_turns"])
    if turns.get("max_user_turns"):
        most.append(turns["max_user_turns"] + 1)
    return min(most)
