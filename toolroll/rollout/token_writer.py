"""TokenWriter: the model behind an engine that takes and gives ids. What it samples is appended as it came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolroll.errors import InfraFault
from toolroll.rollout.clock import Clock
from toolroll.rollout.cut import cut
from toolroll.rollout.engines.engine import Finish, Generation, TokenEngine
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest, State
from toolroll.rollout.trajectory import TurnRecord
from toolroll.rollout.writer import GRACE, Written
from toolroll.schemas import FunctionCall, Message, ToolCall

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Parsed, Rendering

logger = logging.getLogger(__name__)

Schemas = Sequence[dict[str, Any]]


class TokenWriter:
    """An engine, and how its model's conversations are written in tokens."""

    def __init__(self, engine: TokenEngine, rendering: Rendering, tools: Schemas, pause: Pause) -> None:
        self._engine = engine
        self._rendering = rendering
        self._tools = list(tools)
        self._pause = pause
        self.logprobs_of: Literal["scaled", "raw"] | None = engine.logprobs_of

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Make the prompt."""
        request.begin(self._rendering.prompt(request.messages, self._tools))

    async def write(self, request: AsyncRolloutRequest, clock: Clock) -> Written | None:
        """Have the model write its turn."""
        await self._pause.over()
        if len(request.tokens) == request.turn_start:
            clock.begin_turn()
        generation, in_time = await self._generate(request, clock)
        tokens, turn = request.tokens, request.turn
        for ids, logprobs, version in generation.by_weights():
            tokens.sampled(ids, logprobs, turn=turn, weight_version=version)
        request.turns.append(
            TurnRecord(
                turn=turn,
                tokens=len(generation.ids),
                finish=str(generation.finish),
                weight_version=generation.weight_version,
                timings=generation.timings,
            )
        )
        finish = generation.finish
        if finish is Finish.ABORT and in_time:
            if request.room() <= 0:
                finish = Finish.LENGTH
            elif self._pause.is_on:
                request.go(State.GENERATING)
                return None
        sampled = tokens.ids[request.turn_start :].tolist()
        parsed = self._rendering.parse(sampled, tools=self._tools, prompt_ids=tokens.ids[: request.turn_start])
        return Written(message_of(parsed, turn), parsed, finish, in_time)

    def go_on(self, request: AsyncRolloutRequest, new: Sequence[Message]) -> None:
        """Go on behind the tools' answers."""
        ids, start = request.tokens.ids, request.turn_start
        on = self._rendering.go_on(ids[:start], ids[start:], new, messages=request.messages, tools=self._tools)
        request.go_on(on.ids, rerendered=on.rerendered)

    def cut(self, text: str, request: AsyncRolloutRequest) -> str:
        """A tool's answer, no longer than it may be."""
        limits, rendering = request.limits, self._rendering
        return cut(text, limits.max_tool_response_tokens, limits.cut_tool_response, rendering.encode, rendering.decode)

    async def _generate(self, request: AsyncRolloutRequest, clock: Clock) -> tuple[Generation, bool]:
        """What the engine sampled, and whether it was in time.

        At the deadline it is told to stop, and what it has is kept. An engine that doesn't even heed that isn't there:
        its fault, not the model's.
        """
        number, left = f"{request.request_id}-{len(request.turns)}", clock.left()
        stop_at = {"max_new_tokens": request.room(), "stop_token_ids": self._rendering.stop_ids}
        aborting: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(
            left, lambda: aborting.append(asyncio.create_task(self._abort(number)))
        )
        try:
            with self._pause.generating(number):
                generation = await self._engine.generate(
                    number,
                    request.tokens.ids,
                    {**request.sampling_params, **stop_at},
                    deadline=time.monotonic() + left + GRACE,
                    affinity=request.request_id,
                )
        finally:
            timer.cancel()
        return generation, not aborting or generation.finish is not Finish.ABORT

    async def _abort(self, number: str) -> None:
        try:
            await self._engine.abort(number)
        except InfraFault as error:
            logger.debug("request %s could not be aborted: %s", number, error)


def message_of(parsed: Parsed, turn: int) -> Message:
    """The assistant's message, for those who read it. What could not be parsed stays in the text."""
    calls = [
        ToolCall(
            id=call_id(call, turn, number),
            function=FunctionCall(name=call.name, arguments=call.raw if call.arguments is None else call.arguments),
        )
        for number, call in enumerate(parsed.calls)
        if call.name is not None
    ]
    unread = "".join(call.raw for call in parsed.calls if call.name is None)
    return Message(
        role="assistant", content=parsed.content + unread, reasoning_content=parsed.reasoning, tool_calls=calls or None
    )


def call_id(call: Any, turn: int, number: int) -> str:
    """What a call and its answer know each other by: the model's own, where its format has one."""
    return call.id or f"call_{turn}_{number}"
