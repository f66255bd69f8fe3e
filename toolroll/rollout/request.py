"""One conversation in progress: its data and its state machine.

    PENDING → GENERATING ⇄ TOOL_CALLING → FINISHED

Every state may change to FINISHED, which is final. The module measures no time and performs no I/O: the loop drives a
request and asks it for the remaining length.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

from toolroll.errors import ToolrollError
from toolroll.images import ImageSpan
from toolroll.rollout.limits import Limits
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, TurnRecord
from toolroll.schemas import Message


class RequestState(StrEnum):
    """State of a request."""

    PENDING = "pending"
    """The tool instances are being created."""
    GENERATING = "generating"
    """The engine generates, or the rollout is paused."""
    TOOL_CALLING = "tool_calling"
    """The tool calls of the last turn are being executed."""
    FINISHED = "finished"
    """The conversation is complete. Rewards are computed and tools are released."""


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.PENDING: frozenset({RequestState.GENERATING, RequestState.FINISHED}),
    RequestState.GENERATING: frozenset({RequestState.GENERATING, RequestState.TOOL_CALLING, RequestState.FINISHED}),
    RequestState.TOOL_CALLING: frozenset({RequestState.GENERATING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}
"""Allowed transitions. GENERATING follows itself when an interrupted turn is resumed."""


class InvalidTransition(ToolrollError):
    """Raised when a request is asked for a transition that `TRANSITIONS` does not contain."""


@dataclass(kw_only=True)
class AsyncRolloutRequest:
    """One conversation in progress."""

    messages: list[Message]
    limits: Limits
    request_id: str = field(default_factory=lambda: uuid4().hex)
    group: str = ""
    sample: int = 0
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Keyword arguments by tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    started: float = field(default_factory=time.monotonic)
    """Time at which the request started, on the clock of `time.monotonic()`."""
    state: RequestState = RequestState.PENDING
    tokens: TokenStream = field(default_factory=lambda: TokenStream([]))
    earlier: list[TokenStream] = field(default_factory=list)
    fidelity: Fidelity = Fidelity.EXACT
    turn: int = 0
    """Index of the current assistant turn, from 0."""
    turn_start: int = 0
    """Index in `tokens` where the current turn starts."""
    prompt_len: int = 0
    """Number of tokens of the first prompt."""
    context_len: int | None = None
    """The engine's context length."""
    interruptions: int = 0
    """Number of aborts of the current turn that were not caused by a pause of this rollout."""
    turns: list[TurnRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    calls_made: int = 0
    """Number of tool calls that were executed."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    exhausted_budget: tuple[str, str] | None = None
    """Resource and unit of the spent budget that stopped a tool call."""

    def tool_kwargs(self, tool: str, method: str) -> Mapping[str, Any]:
        """Return the keyword arguments for a method of a tool, such as "create"."""
        return self.tools_kwargs.get(tool, {}).get(f"{method}_kwargs", {})

    def transition_to(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            InvalidTransition: If `TRANSITIONS` does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"Request {self.request_id}: invalid transition from {self.state} to {state}.")
        self.state = state

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish the request. Only the first call has an effect."""
        if self.state is not RequestState.FINISHED:
            self.transition_to(RequestState.FINISHED)
            self.finish_reason, self.error = reason, error

    def start(self, prompt_ids: list[int], images: Sequence[ImageSpan] = ()) -> None:
        """Set the prompt and change to GENERATING, or to FINISHED if the prompt exceeds a limit."""
        self.tokens = TokenStream(prompt_ids, images)
        self.prompt_len = self.turn_start = len(self.tokens)
        max_len = self.limits.max_prompt_len
        if max_len is not None and len(prompt_ids) > max_len:
            self.finish(FinishReason.LENGTH, f"The prompt has {len(prompt_ids)} tokens; max_prompt_len is {max_len}.")
        elif self.max_new_tokens() <= 0:
            self.finish(FinishReason.LENGTH, f"The prompt has {len(prompt_ids)} tokens, leaving none for a response.")
        else:
            self.transition_to(RequestState.GENERATING)

    def max_new_tokens(self) -> int:
        """Return the number of tokens that may still be sampled in the current turn."""
        remaining = self._remaining_after(len(self.tokens))
        max_per_turn: int | None = self.sampling_params.get("max_new_tokens")
        if max_per_turn is None:
            return remaining
        already_sampled = len(self.tokens) - self.turn_start  # before an interruption
        return min(remaining, max_per_turn - already_sampled)

    def append_tool_responses(self, ids: list[int], *, rerendered: bool, images: Sequence[ImageSpan] = ()) -> None:
        """Append the tokens of the tool responses and start the next turn, or finish if no tokens would remain for it.

        Args:
            ids: Tokens to append or, if the conversation was rendered again, the whole prompt of the next turn.
            rerendered: True if the conversation was rendered again. `tokens` is then moved to `earlier` and replaced.
            images: Ranges of images in `ids`.
        """
        if self._remaining_after(len(ids) if rerendered else len(self.tokens) + len(ids)) <= 0:
            self.finish(FinishReason.LENGTH)
            return
        if rerendered:
            self.earlier.append(self.tokens)
            self.tokens, self.fidelity = TokenStream(ids, images), Fidelity.RERENDERED
        else:
            self.tokens.append_unsampled(ids, turn=self.turn, images=images)
        self.turn += 1
        self.turn_start = len(self.tokens)
        self.interruptions = 0
        self.transition_to(RequestState.GENERATING)

    def _remaining_after(self, length: int) -> int:
        max_lengths = [self.prompt_len + self.limits.max_response_len, self.limits.max_seq_len, self.context_len]
        return min(max_len for max_len in max_lengths if max_len is not None) - length
