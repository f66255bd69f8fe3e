"""AsyncRolloutRequest: one conversation under way. What it holds, and the states it goes through.

    PENDING → GENERATING ⇄ TOOL_CALLING → FINISHED

Any state may go to FINISHED; nothing leaves it. It has no clock and does no I/O: the loop carries it along, and asks it
what may be done next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

from toolroll.errors import ToolrollError
from toolroll.rollout.limits import Limits
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, TurnRecord
from toolroll.schemas import Message


class State(StrEnum):
    """Where a request is."""

    PENDING = "pending"
    """Its tools are being created."""
    GENERATING = "generating"
    """The engine writes, or would if it weren't paused."""
    TOOL_CALLING = "tool_calling"
    """The tools that were called are at work."""
    FINISHED = "finished"
    """Nothing more is written. Rewards are computed, tools released."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.GENERATING, State.FINISHED}),
    State.GENERATING: frozenset({State.GENERATING, State.TOOL_CALLING, State.FINISHED}),
    State.TOOL_CALLING: frozenset({State.GENERATING, State.FINISHED}),
    State.FINISHED: frozenset(),
}
"""What may follow what. GENERATING follows itself where a turn was interrupted and goes on."""


class WrongTransition(ToolrollError):
    """A request was to go where it can't: a fault of ours."""


@dataclass(kw_only=True)
class AsyncRolloutRequest:
    """One conversation under way."""

    messages: list[Message]
    limits: Limits
    request_id: str = field(default_factory=lambda: uuid4().hex)
    group: str = ""
    sample: int = 0
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """By tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    state: State = State.PENDING
    tokens: TokenStream = field(default_factory=lambda: TokenStream([]))
    earlier: list[TokenStream] = field(default_factory=list)
    fidelity: Fidelity = Fidelity.EXACT
    turn: int = 0
    """The model's turn that is under way, from 0."""
    turn_start: int = 0
    """Where in `tokens` it began."""
    prompt_len: int = 0
    """Tokens of the first prompt."""
    context_len: int | None = None
    """What the engine takes, prompt and response together."""
    interruptions: int = 0
    """How often the turn that is under way was aborted, and nobody here had asked for it."""
    turns: list[TurnRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    calls_made: int = 0
    """Those that were carried out."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    def go(self, state: State) -> None:
        """Change the state, by the table."""
        if state not in TRANSITIONS[self.state]:
            raise WrongTransition(f"Request {self.request_id} can't go from {self.state} to {state}.")
        self.state = state

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End it. The first reason stays."""
        if self.state is not State.FINISHED:
            self.go(State.FINISHED)
            self.finish_reason, self.error = reason, error

    def begin(self, prompt_ids: list[int]) -> None:
        """The prompt is there: the model may write, if it is within the limits."""
        self.tokens = TokenStream(prompt_ids)
        self.prompt_len = self.turn_start = len(self.tokens)
        longest = self.limits.max_prompt_len
        if longest is not None and len(prompt_ids) > longest:
            self.finish(FinishReason.LENGTH, f"The prompt has {len(prompt_ids)} tokens; max_prompt_len is {longest}.")
        elif self.room() <= 0:
            self.finish(FinishReason.LENGTH, f"The prompt's {len(prompt_ids)} tokens leave no room for an answer.")
        else:
            self.go(State.GENERATING)

    def room(self) -> int:
        """How many tokens the model may write now."""
        room = self._left(len(self.tokens))
        most = self.sampling_params.get("max_new_tokens")
        if most is not None:  # for one turn; part of it may be written already
            room = min(room, most - (len(self.tokens) - self.turn_start))
        return room

    def go_on(self, ids: list[int], *, rerendered: bool) -> None:
        """The tools have answered, in these tokens: the model's next turn, if there is room for them and for one.

        Where the template wrote an earlier turn anew, `ids` is the whole prompt, and a sequence of its own begins.
        """
        if self._left(len(ids) if rerendered else len(self.tokens) + len(ids)) <= 0:
            self.finish(FinishReason.LENGTH)
            return
        if rerendered:
            self.earlier.append(self.tokens)
            self.tokens, self.fidelity = TokenStream(ids), Fidelity.RERENDERED
        else:
            self.tokens.given(ids, turn=self.turn)
        self.turn += 1
        self.turn_start = len(self.tokens)
        self.interruptions = 0
        self.go(State.GENERATING)

    def _left(self, length: int) -> int:
        """How many tokens there may be behind so many."""
        ends = [self.prompt_len + self.limits.max_response_len, self.limits.max_seq_len, self.context_len]
        return min(end for end in ends if end is not None) - length
