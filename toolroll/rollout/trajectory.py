"""The result of one conversation, as the trainer receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from toolroll.errors import Fault
from toolroll.images import Image
from toolroll.rollout.engines.base import GenerationTimings, LogprobsMode
from toolroll.rollout.tokens import TokenStream
from toolroll.schemas import Message


class FinishReason(StrEnum):
    """Reason why a trajectory ended.

    Example:
        >>> FinishReason("max_turns")
        <FinishReason.MAX_TURNS: 'max_turns'>
    """

    STOP = "stop"
    """The model answered without calling a tool."""
    LENGTH = "length"
    """`max_prompt_len`, `max_response_len`, `max_seq_len` or the engine's context length was reached."""
    MAX_TURNS = "max_turns"
    """The model called tools in the last allowed turn."""
    TOOL_STOP = "tool_stop"
    """A tool ended the trajectory with `"stop": True` in its metrics."""
    DEADLINE = "deadline"
    """`turn_timeout` or `trajectory_timeout` expired."""
    ABORTED = "aborted"
    """The engine aborted the generation repeatedly, without a pause of this rollout."""
    INFRA = "infra"
    """An infra fault occurred."""


INFRA_FINISH_REASONS = (FinishReason.INFRA, FinishReason.ABORTED)
"""Finish reasons that the model cannot cause. The conversation is incomplete, so it has no reward."""


class Fidelity(StrEnum):
    """Relation between the tokens of a trajectory and those of the engine."""

    EXACT = "exact"
    """Every token was received or sampled by the engine, in this order."""
    RERENDERED = "rerendered"
    """The conversation was rendered again after a turn. `tokens` starts there; the exact earlier parts are in
    `earlier`."""
    TEXT = "text"
    """The engine returns text only, without tokens."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One tool call."""

    turn: int
    """Index of the assistant turn, from 0."""
    tool: str | None
    """Tool name as the model wrote it, or None if it wrote none."""
    arguments: str | dict[str, Any] | None
    """Arguments as the model wrote them."""
    answer: str
    """Text that the model received."""
    images: tuple[Image, ...] = ()
    """Images that the model received."""
    fault: Fault | None = None
    error: str | None = None
    reward: float | None = None
    start: float | None = None
    """Time from the start of the trajectory, in seconds. None in older records."""
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the tool, such as queue wait, execution time and attempts."""


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One response of the engine. A turn that was interrupted has several."""

    turn: int
    tokens: int
    """Number of sampled tokens."""
    finish: str
    """Finish type that the engine reported."""
    weight_version: str | None = None
    start: float | None = None
    """Time from the start of the trajectory, in seconds. None in older records."""
    timings: GenerationTimings


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards of one trajectory."""

    total: float | None
    """Weighted sum by the `RewardRule`, or None after an infra fault or if a reward function returned None."""
    steps: tuple[float, ...] = ()
    """Sum of the rewards of the tool calls in each turn."""
    tools: Mapping[str, float] = field(default_factory=dict)
    """Result of each tool's `calc_reward`."""
    functions: Mapping[str, float | None] = field(default_factory=dict)
    """Result of each reward function."""

    @property
    def has_tool_rewards(self) -> bool:
        """True if the rewards of steps and tools were computed, which fails if a `calc_reward` fails."""
        return bool(self.steps)


@dataclass(kw_only=True)
class Trajectory:
    """The result of one conversation.

    Example:
        Select the trajectories to train on, and their sampled tokens:

            kept = [t for t in trajectories if t.outcome == "ok"]
            sampled = [i for i, m in zip(kept[0].tokens.ids, kept[0].tokens.mask) if m]
    """

    request_id: str
    """Unique id."""
    group: str
    """Id that all samples of one prompt share."""
    sample: int
    """Index among the samples of the prompt, from 0."""
    messages: list[Message]
    """The conversation as text. Sampled tokens are only in `tokens`."""
    tokens: TokenStream
    """Tokens, loss mask and log-probabilities. Empty if `fidelity` is "text"."""
    earlier: list[TokenStream] = field(default_factory=list)
    """The exact token sequences before each re-rendering. Empty unless `fidelity` is "rerendered"."""
    finish_reason: FinishReason
    """Reason why the trajectory ended."""
    outcome: Literal["ok", "infra"]
    """"ok", or "infra" if the trajectory must be excluded from the loss."""
    error: str | None = None
    """Error message, if something failed."""
    retryable: bool = True
    """False if another attempt would fail in the same way, because a reward function or a tool raised an exception,
    because a budget is spent, or because a replay reproduced it."""
    exhausted_budget: tuple[str, str] | None = None
    """Resource and unit of the spent budget that ended the trajectory."""
    fidelity: Fidelity
    """Relation between the tokens and those of the engine."""
    logprobs_mode: LogprobsMode | None
    """"processed_logprobs" if the log-probabilities are those of the sampling distribution, after temperature and
    other sampling parameters; "raw_logprobs" if they are those of the model; None if there are none."""
    rewards: Rewards
    """Total reward and its parts."""
    turns: list[TurnRecord]
    """Responses of the engine, with timings and weight versions."""
    calls: list[CallRecord]
    """Tool calls, in order."""
    tool_versions: Mapping[str, str] = field(default_factory=dict)
    """Fingerprint of each tool. It changes with the name of the class or function, `version`, the settings and the
    schema, but not with the code."""
    started_at: float | None = None
    """Unix time at which the trajectory started. None in older records."""
    seconds: float
    """Duration from creating the tools to releasing them."""
    extra: Mapping[str, Any]
    """Other keys of the prompt's row, such as the ground truth."""
