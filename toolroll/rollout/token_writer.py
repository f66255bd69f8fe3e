"""TokenWriter: the model behind an engine that takes and gives ids. What it samples is appended as it came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolroll.errors import ConfigError, EngineUnavailable, InfraFault
from toolroll.rollout.clock import Clock
from toolroll.rollout.cut import cut
from toolroll.rollout.engines.engine import Finish, Generation, TokenEngine
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest, State
from toolroll.rollout.trajectory import FinishReason, TurnRecord
from toolroll.rollout.writer import GRACE, Written
from toolroll.schemas import FunctionCall, Message, ToolCall

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Parsed, Rendering

logger = logging.getLogger(__name__)

Schemas = Sequence[dict[str, Any]]

SURPLUS = 8
"""Calls beyond `max_parallel_calls` that are answered one by one; of those behind them the last answer tells."""
GRAMMARS = {"regex", "json_schema", "ebnf", "structural_tag", "grammar", "structured_outputs"}
GUIDES = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
CONSTRAINED = GRAMMARS | GUIDES | {"stop", "stop_regex", "min_new_tokens", "min_tokens"}
"""Sampling parameters that hold for a turn as a whole: one that was interrupted begins anew."""
INTERRUPTIONS = 20
"""Times that a turn goes on after aborts of somebody else's."""
INTERRUPTED = 0.5
"""Seconds before it does: who aborts is about to do something else."""


class TokenWriter:
    """An engine, and how its model's conversations are written in tokens."""

    def __init__(self, engine: TokenEngine, rendering: Rendering, tools: Schemas, pause: Pause) -> None:
        self._engine = engine
        self._rendering = rendering
        self._tools = list(tools)
        self._pause = pause
        self._context_length: Callable[[], Awaitable[int | None]] | None = getattr(engine, "context_length", None)
        self.logprobs_of: Literal["scaled", "raw"] | None = engine.logprobs_of

    async def begin(self, request: AsyncRolloutRequest) -> None:
        """Make the prompt."""
        if self._context_length is not None:
            request.context_len = await self._context_length()
        request.begin(self._rendering.prompt(request.messages, self._tools))

    async def write(self, request: AsyncRolloutRequest, clock: Clock) -> Written | None:
        """Have the model write its turn."""
        await self._pause.over()
        if len(request.tokens) == request.turn_start:
            clock.begin_turn()
        pauses = self._pause.count
        generation, in_time = await self._generate(request, clock)
        finish = generation.finish
        interrupted = finish is Finish.ABORT and in_time
        if interrupted and CONSTRAINED & request.sampling_params.keys():
            request.go(State.GENERATING)  # a grammar begins anew with each call: what is half can't be gone on with
            return None
        self._append(request, generation)
        if interrupted and request.room() <= 0:
            finish = Finish.LENGTH
        elif interrupted and await self._goes_on(request, pauses):
            return None
        tokens = request.tokens
        sampled = tokens.ids[request.turn_start :].tolist()
        parsed = self._rendering.parse(sampled, tools=self._tools, prompt_ids=tokens.ids[: request.turn_start])
        parsed = parsed.within(request.limits.max_parallel_calls + SURPLUS)
        return Written(message_of(parsed, request.turn), parsed, finish, in_time)

    def _append(self, request: AsyncRolloutRequest, generation: Generation) -> None:
        for ids, logprobs, version in generation.by_weights():
            request.tokens.sampled(ids, logprobs, turn=request.turn, weight_version=version)
        request.turns.append(
            TurnRecord(
                turn=request.turn,
                tokens=len(generation.ids),
                finish=str(generation.finish),
                weight_version=generation.weight_version,
                timings=generation.timings,
            )
        )

    async def _goes_on(self, request: AsyncRolloutRequest, pauses: int) -> bool:
        """Whether a turn that was aborted goes on from where it was: by a pause of ours, or by somebody else's doing.

        Trainers abort all that an engine does before they change its weights. One who does nothing but that is heeded.
        """
        if self._pause.count == pauses:
            request.interruptions += 1
            if request.interruptions > INTERRUPTIONS:
                return False
            await asyncio.sleep(INTERRUPTED)
        request.go(State.GENERATING)
        return True

    def go_on(self, request: AsyncRolloutRequest, new: Sequence[Message]) -> None:
        """Go on behind the tools' answers."""
        ids, start = request.tokens.ids, request.turn_start
        try:
            on = self._rendering.go_on(ids[:start], ids[start:], new, messages=request.messages, tools=self._tools)
        except ConfigError as error:  # the prompt could be written, so it is something that the model did
            request.finish(FinishReason.STOP, str(error))
        else:
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
        number, left = f"{request.request_id}-{len(request.turns)}-{request.interruptions}", clock.left()
        given = request.sampling_params
        stops = dict.fromkeys([*self._rendering.stop_ids, *(given.get("stop_token_ids") or ())])
        aborting: list[asyncio.Task[None]] = []

        def time_is_up() -> None:
            if not self._pause.is_on:  # else it is being stopped already, and the time doesn't count
                aborting.append(asyncio.create_task(self._abort(number)))

        timer = asyncio.get_running_loop().call_later(left, time_is_up)
        try:
            with self._pause.generating(number):
                async with asyncio.timeout(left + 2 * GRACE):  # an engine of somebody's own may not heed deadlines
                    generation = await self._engine.generate(
                        number,
                        request.tokens.ids,
                        {**given, "max_new_tokens": request.room(), "stop_token_ids": list(stops)},
                        deadline=time.monotonic() + left + GRACE,
                        affinity=request.request_id,
                    )
        except TimeoutError:
            raise EngineUnavailable(f"The engine gave no answer {2 * GRACE:g} s after the deadline.") from None
        finally:
            timer.cancel()
        if aborting and generation.problem is not None:
            raise EngineUnavailable(generation.problem)
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
