"""Limits of one trajectory: lengths in tokens, numbers of turns and calls, timeouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TruncateSide = Literal["start", "middle", "end"]


class Limits(BaseModel):
    """Limits of one trajectory. Lengths are in tokens and timeouts in seconds; None means unlimited.

    The `finish_reason` of a trajectory names the kind of limit that ended it. The timeouts nest: `call_timeout` ≤
    `turn_timeout` ≤ `trajectory_timeout`. Time spent in a pause (`Rollout.paused`) does not count.

    Raises:
        pydantic.ValidationError: If a value is out of range, a name is unknown or the timeouts do not nest.

    Example:
        >>> Limits(max_response_len=1024, max_assistant_turns=4).max_parallel_calls
        8
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_prompt_len: int | None = Field(default=None, ge=1)
    """Maximum length of the prompt. A longer prompt ends the trajectory before anything is generated."""
    max_response_len: int = Field(default=8192, ge=1)
    """Maximum length of everything after the prompt: sampled tokens and tool responses."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Maximum length of prompt and response together. The engine's context length always applies as well."""
    max_assistant_turns: int = Field(default=16, ge=1)
    """Maximum number of assistant turns. Tool calls in the last turn are not executed."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Maximum number of tool calls executed in one turn. Further calls are rejected with a message to the model."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Maximum number of tool calls executed in a trajectory. Further calls are rejected with a message to the model."""
    max_tool_response_tokens: int = Field(default=2048, ge=16)
    """Maximum length of one tool response. A longer response is truncated, and a marker is inserted."""
    tool_response_truncate_side: TruncateSide = "middle"
    """Part of a tool response that is removed if the response is too long."""
    call_timeout: float = Field(default=120, gt=0, allow_inf_nan=False)
    """Timeout for one tool call. It also applies to creating the tools and to their `calc_reward`."""
    turn_timeout: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Timeout for one turn: the generation and the tool calls in it. It also applies to each reward function."""
    trajectory_timeout: float = Field(default=3600, gt=0, allow_inf_nan=False)
    """Timeout for all turns of the trajectory."""

    @model_validator(mode="after")
    def _check_nesting(self) -> Self:
        if not self.call_timeout <= self.turn_timeout <= self.trajectory_timeout:
            raise ValueError(
                f"Expected call_timeout ({self.call_timeout:g}) ≤ turn_timeout ({self.turn_timeout:g}) ≤ "
                f"trajectory_timeout ({self.trajectory_timeout:g})"
            )
        return self
