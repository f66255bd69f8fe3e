"""Settings of the agent loop, and limits from verl's config.

The settings are in the file that `rollout.agent.agent_loop_config_path` names, next to `_target_`:

    - name: toolroll
      _target_: toolroll.integrations.verl.ToolrollAgentLoop
      limits: {call_timeout: 60, trajectory_timeout: 1800}

Lengths, turns and parallel calls are read from verl's keys (`rollout.response_length`, `rollout.multi_turn.*`). Limits
in this file override them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolroll.errors import validate
from toolroll.rollout.limits import Limits

CHARS_PER_TOKEN = 4
"""Conversion factor for the limit of a tool response, which verl states in characters and toolroll in tokens."""
TRUNCATE_SIDES = {"left": "start", "right": "end", "middle": "middle"}
"""Names in toolroll for verl's values of `tool_response_truncate_side`."""
MIN_TOOL_RESPONSE_TOKENS = 16


class RewardWeights(BaseModel):
    """Weights of the score if the agent loop computes it, see `toolroll.RewardRule`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: float = 1.0
    """Weight of the sum of the step rewards."""
    tools: dict[str, float] = Field(default_factory=dict)
    """Weight of each tool's `calc_reward`. 1 for tools that are not listed."""
    function: float = 1.0
    """Weight for verl's reward function (`reward.custom_reward_function`, or verl's default). With 0, it is not called.
    """


class AgentSettings(BaseModel):
    """Settings of one agent loop in verl's config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Limits`."""
    tools: str | None = None
    """Path of a tool config with further tools, such as MCP tools, which verl itself cannot load."""
    model_format: str | None = None
    """Chat format of the model. By default, it is found by the chat template."""
    tool_prompt: Literal["hermes"] | None = None
    """`hermes` for a model whose chat template does not show tools: the system message lists them."""
    thinking: Literal["keep", "strip"] | None = None
    """Whether the reasoning of earlier turns stays in the prompt. By default as the chat template does it."""
    rewards: RewardWeights | None = None
    """Weights with which the agent loop computes the score, excluding samples without one. By default, verl's reward
    loop computes the score."""


def resolve_limits(rollout: Mapping[str, Any], overrides: Mapping[str, Any]) -> Limits:
    """Return the limits of a trajectory.

    Args:
        rollout: verl's config under `actor_rollout_ref.rollout`.
        overrides: Limits from the settings of the agent loop.

    Raises:
        ConfigError: If a limit is unknown or invalid.
    """
    multi_turn = rollout["multi_turn"]
    response_length = rollout["response_length"]
    # verl limits assistant turns, user turns, both or neither. Each assistant turn has at least one token.
    user_turns = multi_turn.get("max_user_turns") or response_length
    max_assistant_turns = min(multi_turn.get("max_assistant_turns") or response_length, user_turns + 1, response_length)
    max_response_tokens = math.ceil((multi_turn.get("max_tool_response_length") or 256) / CHARS_PER_TOKEN)
    from_verl: dict[str, Any] = {
        "max_prompt_len": rollout["prompt_length"],
        "max_response_len": response_length,
        "max_seq_len": rollout.get("max_model_len"),
        "max_assistant_turns": max_assistant_turns,
        "max_parallel_calls": multi_turn.get("max_parallel_calls") or 1,
        "max_tool_response_tokens": max(MIN_TOOL_RESPONSE_TOKENS, max_response_tokens),
        "tool_response_truncate_side": TRUNCATE_SIDES.get(multi_turn.get("tool_response_truncate_side"), "middle"),
    }
    return validate(Limits, {**from_verl, **overrides}, "Agent loop toolroll: limits")
