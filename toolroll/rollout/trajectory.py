"""Trajectory: what a rollout hands to the trainer. One conversation, and everything that happened in it.

It says why it ended, whose fault that was, whether its tokens are the engine's, and carries every turn and every call
with what it took and what it earned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from toolroll.errors import Fault
from toolroll.rollout.engines.engine import Timings
from toolroll.rollout.tokens import TokenStream
from toolroll.schemas import Message


class FinishReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The model answered without calling a tool."""
    LENGTH = "length"
    """max_prompt_len, max_response_len or max_seq_len was reached, or the engine's own limit."""
    MAX_TURNS = "max_turns"
    """The model called tools in the last turn that it had."""
    TOOL_STOP = "tool_stop"
    """A tool said that this is the end."""
    DEADLINE = "deadline"
    """The time of a turn or of the trajectory was up."""
    ABORTED = "aborted"
    """It was told to end."""
    INFRA = "infra"
    """Something that the model had no part in failed."""


class Fidelity(StrEnum):
    """How far the tokens can be trusted."""

    EXACT = "exact"
    """Every token is one that the engine saw or sampled, in its place."""
    RERENDERED = "rerendered"
    """The template wrote an earlier turn anew. `tokens` begins there; what was before is in `earlier`, exact too."""
    TEXT = "text"
    """The engine gives text only. There are no tokens."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One call of a tool."""

    turn: int
    tool: str | None
    """As the model named it; None where it named none."""
    arguments: str | dict[str, Any] | None
    """As the model wrote them."""
    answer: str
    """What the model was told."""
    fault: Fault | None = None
    error: str | None = None
    reward: float | None = None
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One answer of the engine. A turn that was interrupted has several."""

    turn: int
    tokens: int
    finish: str
    weight_version: str | None
    timings: Timings


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """What it earned."""

    total: float | None
    """By the rule of rewards.py; None where the infrastructure failed, or a reward function gave none."""
    steps: tuple[float, ...] = ()
    """By turn: the sum of what its calls earned."""
    tools: Mapping[str, float] = field(default_factory=dict)
    """By tool: its `calc_reward`."""
    functions: Mapping[str, float | None] = field(default_factory=dict)
    """By reward function."""


@dataclass(kw_only=True)
class Trajectory:
    """One conversation."""

    request_id: str
    group: str
    """The same for all samples of one prompt."""
    sample: int
    """Which of these it is, from 0."""
    messages: list[Message]
    tokens: TokenStream
    """Empty where fidelity is "text"."""
    earlier: list[TokenStream] = field(default_factory=list)
    """Where it was rendered anew: the tokens up to there, each a sequence of its own."""
    finish_reason: FinishReason
    outcome: Literal["ok", "infra"]
    """ "infra": keep it out of the loss."""
    error: str | None = None
    """What failed, where something did."""
    fidelity: Fidelity
    logprobs_of: Literal["scaled", "raw"] | None
    """Which distribution the log-probabilities are of; None where there are none."""
    rewards: Rewards
    turns: list[TurnRecord]
    calls: list[CallRecord]
    seconds: float
    extra: Mapping[str, Any]
    """What else the prompt carried, e.g. the ground truth."""
