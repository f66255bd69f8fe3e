"""ChatWriter: the model behind a chat server. It gives words, and there are no tokens: for evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from toolroll.rollout.clock import Clock
from toolroll.rollout.cut import cut
from toolroll.rollout.engines.engine import ChatEngine
from toolroll.rollout.parsed import Parsed, ParsedCall
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest, State
from toolroll.rollout.token_writer import SURPLUS
from toolroll.rollout.trajectory import Fidelity, FinishReason, TurnRecord
from toolroll.rollout.writer import GRACE, Written
from toolroll.schemas import Message

CHARACTERS = 4
"""Characters that count as a token, where there is no tokenizer."""


class ChatWriter:
    """A chat server. Limits in tokens are its own to keep, but for the length of tools' answers."""

    logprobs_of: Literal["scaled", "raw"] | None = None

    def __init__(self, engine: ChatEngine, tools: Sequence[dict[str, Any]], pause: Pause) -> None:
        self._engine = engine
        self._tools = list(tools)
        self._pause = pause

    async def begin(self, request: AsyncRolloutRequest) -> None:
        """Make the prompt."""
        request.fidelity = Fidelity.TEXT
        request.go(State.GENERATING)

    async def write(self, request: AsyncRolloutRequest, clock: Clock) -> Written | None:
        """Have the model write its turn."""
        await self._pause.over()
        clock.begin_turn()
        number = f"{request.request_id}-{request.turn}"
        params = dict(request.sampling_params)
        if not params.keys() & {"max_new_tokens", "max_tokens", "max_completion_tokens"}:
            params["max_new_tokens"] = request.limits.max_response_len
        left = clock.left()
        with self._pause.generating(number):
            reply = await self._engine.chat(
                number,
                request.messages,
                self._tools,
                params,
                deadline=time.monotonic() + left + GRACE,
                affinity=request.request_id,
            )
        record = TurnRecord(
            turn=request.turn, tokens=0, finish=str(reply.finish), weight_version=None, timings=reply.timings
        )
        request.turns.append(record)
        message = reply.message
        calls = tuple(
            ParsedCall(
                name=call.function.name or None,
                arguments=call.function.arguments,
                raw="",
                id=call.id or f"call_{request.turn}_{number}",
            )
            for number, call in enumerate(message.tool_calls or ())
        )
        content = message.content if isinstance(message.content, str) else ""
        parsed = Parsed(content=content, reasoning=message.reasoning_content, calls=calls)
        parsed = parsed.within(request.limits.max_parallel_calls + SURPLUS)
        kept = [
            call.model_copy(update={"id": one.id})
            for call, one in zip(message.tool_calls or (), parsed.calls, strict=False)
        ]
        return Written(
            message.model_copy(update={"tool_calls": kept or None}), parsed, reply.finish, in_time=clock.left() > 0
        )

    def go_on(self, request: AsyncRolloutRequest, new: Sequence[Message]) -> None:
        """Go on behind the tools' answers."""
        request.turn += 1
        if request.turn < request.limits.max_assistant_turns:
            request.go(State.GENERATING)
        else:
            request.finish(FinishReason.MAX_TURNS)

    def cut(self, text: str, request: AsyncRolloutRequest) -> str:
        """A tool's answer, no longer than it may be."""
        most = CHARACTERS * request.limits.max_tool_response_tokens
        return cut(text, most, request.limits.cut_tool_response, lambda part: list(map(ord, part)), _text)


def _text(characters: list[int]) -> str:
    return "".join(map(chr, characters))
