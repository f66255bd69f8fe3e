"""Limits: how long a trajectory may be, how many calls it may make, how long each part may take.

What a limit ends is said by the trajectory's finish reason. Deadlines nest: a call's is within its turn's, a turn's
within the trajectory's.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Cut = Literal["start", "middle", "end"]


class Limits(BaseModel):
    """What a trajectory may use. Lengths are in tokens, times in seconds; None is no limit of ours.

    >>> Limits(max_response_len=1024, max_assistant_turns=4).max_parallel_calls
    8
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_prompt_len: int | None = Field(default=None, ge=1)
    """A longer prompt ends the trajectory before it begins."""
    max_response_len: int = Field(default=8192, ge=1)
    """Everything after the prompt: what the model wrote, and what the tools answered."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """Prompt and response together: the model's context."""
    max_assistant_turns: int = Field(default=16, ge=1)
    """Turns of the model. Calls that it makes in the last one aren't carried out."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls carried out in one turn. Those beyond it are answered with that."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Calls carried out in a trajectory. Those beyond it are answered with that."""
    max_tool_response_tokens: int = Field(default=2048, ge=16)
    """Of one call's answer. What is over it is cut out, and marked."""
    cut_tool_response: Cut = "middle"
    """Which part of an answer that is too long is cut out."""
    call_timeout: float = Field(default=120, gt=0, allow_inf_nan=False)
    turn_timeout: float = Field(default=600, gt=0, allow_inf_nan=False)
    """A turn is what the model writes and the calls that it makes there."""
    trajectory_timeout: float = Field(default=3600, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _deadlines_nest(self) -> Self:
        if not self.call_timeout <= self.turn_timeout <= self.trajectory_timeout:
            raise ValueError(
                f"deadlines nest: call_timeout ({self.call_timeout:g}) ≤ turn_timeout ({self.turn_timeout:g}) ≤ "
                f"trajectory_timeout ({self.trajectory_timeout:g})"
            )
        return self
