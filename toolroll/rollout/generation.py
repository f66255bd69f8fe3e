"""Generate assistant turns.

`TokenGenerator` uses an engine that receives and returns token ids; sampled ids are appended unchanged. `ChatGenerator`
uses a chat server, which returns text without tokens and suits evaluation. Both have the same methods, with which the
loop drives a request. All trajectories of a rollout share one generator.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from toolroll.errors import ConfigError, EngineUnavailable, InfraFault, PolicyFault
from toolroll.images import Image, has_images, read_image, with_images
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn
from toolroll.rollout.chat.rendering import ImageRole, Rendering
from toolroll.rollout.engines.base import ChatEngine, FinishType, Generation, LogprobsMode, TokenEngine
from toolroll.rollout.generation_checks import find_fault
from toolroll.rollout.pause import Deadlines, Pause
from toolroll.rollout.request import AsyncRolloutRequest, RequestState
from toolroll.rollout.trajectory import Fidelity, FinishReason, TurnRecord
from toolroll.rollout.truncate import truncate
from toolroll.schemas import FunctionCall, Message, ToolCall

logger = logging.getLogger(__name__)

ENGINE_GRACE_PERIOD_S = 10.0
"""Time after a deadline in which an engine may still return the tokens that it has sampled."""
CHARS_PER_TOKEN = 4
"""Number of characters that count as one token if there is no tokenizer."""
NEVER_SAMPLED = -100.0
"""Logit bias of ids that the model must not sample."""
GRAMMAR_PARAMS = {"regex", "json_schema", "ebnf", "structural_tag", "grammar", "structured_outputs"}
GUIDED_PARAMS = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
WHOLE_TURN_PARAMS = GRAMMAR_PARAMS | GUIDED_PARAMS | {"stop", "stop_regex", "min_new_tokens", "min_tokens"}
"""Sampling parameters that apply to a turn as a whole. With one of them, an interrupted turn is restarted."""
MAX_EXTERNAL_ABORTS = 20
"""Maximum number of times that a turn is resumed after an abort that this rollout did not request."""
EXTERNAL_ABORT_BACKOFF_S = 0.5
"""Delay before resuming after such an abort. Trainers abort all requests before they update the weights."""


@dataclass(frozen=True)
class GeneratedTurn:
    """One assistant turn."""

    message: Message
    parsed: ParsedTurn
    finish: FinishType
    in_time: bool
    """False if the turn was aborted at its deadline."""


class TokenGenerator:
    """Generates assistant turns with an engine that receives and returns token ids.

    Args:
        engine: The engine.
        rendering: Conversion between messages and tokens of its model.
        tools: Schemas of the tools.
        pause: Pause of the rollout.
    """

    def __init__(
        self, engine: TokenEngine, rendering: Rendering, tools: Sequence[dict[str, Any]], pause: Pause
    ) -> None:
        self.logprobs_mode: LogprobsMode | None = engine.logprobs_mode
        self._engine = engine
        self._rendering = rendering
        self._tools = list(tools)
        self._pause = pause
        parameters = inspect.signature(engine.generate).parameters.values()
        self._takes_images = any(one.name == "images" or one.kind is one.VAR_KEYWORD for one in parameters)
        self._may_keep_cache: bool = getattr(engine, "keeps_cache", False)
        self._context_length: Callable[[], Awaitable[int | None]] | None = getattr(engine, "context_length", None)

    async def start(self, request: AsyncRolloutRequest) -> None:
        """Render the prompt and change the request to GENERATING, or to FINISHED if the prompt is too long."""
        if self._context_length is not None:
            request.context_len = await self._context_length()
        prompt = self._rendering.start(request.messages, self._tools)
        request.start(prompt.ids, prompt.images)

    async def generate_turn(self, request: AsyncRolloutRequest, deadlines: Deadlines) -> GeneratedTurn | None:
        """Generate a turn, or the rest of an interrupted one. None means that it was interrupted."""
        await self._pause.wait_until_resumed()
        deadlines.start_turn(request.turn)
        pause_count = self._pause.count
        start = time.monotonic() - request.started
        generation, in_time = await self._generate(request, deadlines)
        finish = generation.finish
        is_interrupted = finish is FinishType.ABORT and in_time
        restarts = is_interrupted and bool(WHOLE_TURN_PARAMS & request.sampling_params.keys())
        if restarts and await self._resume(request, pause_count):
            return None
        append_generation(request, generation, start)
        if is_interrupted and request.max_new_tokens() <= 0:
            finish = FinishType.LENGTH
        elif is_interrupted and not restarts and await self._resume(request, pause_count):
            return None
        return self._parse_turn(request, finish, in_time)

    def append_tool_responses(self, request: AsyncRolloutRequest, responses: Sequence[Message]) -> None:
        """Append the tokens of the responses and start the next turn, or finish if it would be too long."""
        ids, start = request.tokens.ids, request.turn_start
        try:
            continuation = self._rendering.bridge(
                ids[:start], ids[start:], responses, messages=request.messages, tools=self._tools
            )
        except ConfigError as error:  # the prompt could be rendered, so the model's turn caused this
            request.finish(FinishReason.STOP, str(error))
        else:
            request.append_tool_responses(
                continuation.ids, rerendered=continuation.rerendered, images=continuation.images
            )

    def check_images(self, role: ImageRole) -> None:
        """Check that the model can see images in messages of a role.

        Raises:
            ConfigError: If it cannot.
        """
        self._rendering.check_images(role)
        if not self._takes_images:
            raise ConfigError(f"{type(self._engine).__name__} takes no images. Use an engine such as VLLMEngine.")

    def read_images(self, messages: Sequence[Message]) -> list[Message]:
        """Read the images of a prompt.

        Raises:
            ConfigError: If an image cannot be read, or the model cannot see images.
        """
        if has_images(messages):
            self.check_images("user")
        return with_images(messages)

    def read_response_image(self, value: Any) -> Image:
        """Read an image of a tool response.

        Raises:
            ConfigError: If it is not an image, or the model cannot see images.
            PolicyFault: If the model's image processor rejects its size, which the model may have chosen.
        """
        self.check_images("tool")
        image = read_image(value)
        try:
            self._rendering.count_image_tokens(image)
        except ValueError as error:
            problem = f"The image of {image.width} × {image.height} pixels cannot be shown: {error}."
            raise PolicyFault(problem) from error
        return image

    def truncate(self, text: str, request: AsyncRolloutRequest) -> str:
        """Truncate a tool response."""
        max_tokens, side = request.limits.max_tool_response_tokens, request.limits.tool_response_truncate_side
        return truncate(text, max_tokens, side, self._rendering.encode, self._rendering.decode)

    def _parse_turn(self, request: AsyncRolloutRequest, finish: FinishType, in_time: bool) -> GeneratedTurn:
        ids, start = request.tokens.ids, request.turn_start
        parsed = self._rendering.parse(ids[start:].tolist(), tools=self._tools, prompt_ids=ids[:start])
        parsed = parsed.prepare_calls(request.turn, request.limits.max_parallel_calls)
        return GeneratedTurn(_to_message(parsed), parsed, finish, in_time)

    async def _generate(self, request: AsyncRolloutRequest, deadlines: Deadlines) -> tuple[Generation, bool]:
        """Call the engine. Return its result, and False if it was aborted at the deadline.

        Raises:
            EngineUnavailable: If the engine does not return even after the abort.
        """
        request_id = f"{request.request_id}-{len(request.turns)}-{request.interruptions}"
        remaining_s = deadlines.remaining_s()
        deadline = time.monotonic() + remaining_s + ENGINE_GRACE_PERIOD_S
        params = self._sampling_params(request)
        # An engine of the user's need not know about images.
        images = {"images": request.tokens.images} if request.tokens.images else {}
        try:
            with self._pause.track_generation(request_id), self._abort_after(request_id, remaining_s) as aborts:
                # A custom engine may ignore its deadline.
                async with asyncio.timeout(remaining_s + 2 * ENGINE_GRACE_PERIOD_S):
                    generation = await self._engine.generate(
                        request_id, request.tokens.ids, params, deadline=deadline, affinity=request.request_id, **images
                    )
        except TimeoutError:
            raise EngineUnavailable(
                f"The engine did not respond within {2 * ENGINE_GRACE_PERIOD_S:g} s after the deadline."
            ) from None
        if aborts and generation.problem is not None:
            raise EngineUnavailable(generation.problem)
        generation = _with_natural_end(generation, params)
        fault = find_fault(
            generation, request.tokens, params, self._rendering.decode, may_keep_cache=self._may_keep_cache
        )
        if fault is None and self._rendering.image_token_id in generation.ids:
            fault = f"id {self._rendering.image_token_id} stands for an image and cannot be sampled"
        if fault is not None:
            raise EngineUnavailable(f"{generation.endpoint or 'The engine'} returned an invalid answer: {fault}.")
        return generation, not aborts or generation.finish is not FinishType.ABORT

    @contextmanager
    def _abort_after(self, request_id: str, timeout_s: float) -> Iterator[list[asyncio.Task[None]]]:
        """Abort a request when the timeout expires in the block. The yielded list then contains the abort's task."""
        aborts: list[asyncio.Task[None]] = []

        async def abort() -> None:
            try:
                await self._engine.abort(request_id)
            except InfraFault as error:
                logger.debug("request %s: abort failed: %s", request_id, error)

        def on_timeout() -> None:
            if not self._pause.is_active:  # a pause aborts the request anyway, and its time does not count
                aborts.append(asyncio.create_task(abort()))

        timer = asyncio.get_running_loop().call_later(timeout_s, on_timeout)
        try:
            yield aborts
        finally:
            timer.cancel()

    def _sampling_params(self, request: AsyncRolloutRequest) -> dict[str, Any]:
        params = request.sampling_params
        stop_ids = dict.fromkeys([*self._rendering.stop_ids, *(params.get("stop_token_ids") or ())])
        params = {**params, "max_new_tokens": request.max_new_tokens(), "stop_token_ids": list(stop_ids)}
        if request.tokens.images:
            never = {str(self._rendering.image_token_id): NEVER_SAMPLED}
            params["logit_bias"] = {**(params.get("logit_bias") or {}), **never}
        return params

    async def _resume(self, request: AsyncRolloutRequest, pause_count: int) -> bool:
        """Prepare to resume an aborted turn. Return False after too many aborts that this rollout did not request."""
        if self._pause.count == pause_count:
            request.interruptions += 1
            if request.interruptions > MAX_EXTERNAL_ABORTS:
                return False
            await asyncio.sleep(EXTERNAL_ABORT_BACKOFF_S)
        request.transition_to(RequestState.GENERATING)
        return True


class ChatGenerator:
    """Generates assistant turns with a chat server.

    The server enforces limits in tokens, except the length of tool responses.
    """

    logprobs_mode: LogprobsMode | None = None

    def __init__(self, engine: ChatEngine, tools: Sequence[dict[str, Any]], pause: Pause) -> None:
        self._engine = engine
        self._tools = list(tools)
        self._pause = pause

    async def start(self, request: AsyncRolloutRequest) -> None:
        """Change the request to GENERATING."""
        request.fidelity = Fidelity.TEXT
        request.transition_to(RequestState.GENERATING)

    async def generate_turn(self, request: AsyncRolloutRequest, deadlines: Deadlines) -> GeneratedTurn | None:
        """Generate a turn."""
        await self._pause.wait_until_resumed()
        deadlines.start_turn(request.turn)
        request_id = f"{request.request_id}-{request.turn}"
        params = dict(request.sampling_params)
        if not params.keys() & {"max_new_tokens", "max_tokens", "max_completion_tokens"}:
            params["max_new_tokens"] = request.limits.max_response_len
        sent_at = time.monotonic()
        deadline = sent_at + deadlines.remaining_s() + ENGINE_GRACE_PERIOD_S
        with self._pause.track_generation(request_id):
            reply = await self._engine.chat(
                request_id, request.messages, self._tools, params, deadline=deadline, affinity=request.request_id
            )
        start, finish = sent_at - request.started, str(reply.finish)
        request.turns.append(TurnRecord(turn=request.turn, tokens=0, finish=finish, start=start, timings=reply.timings))
        parsed = _parse_message(reply.message, request)
        tool_calls = [
            call.model_copy(update={"id": kept.id})
            for call, kept in zip(reply.message.tool_calls or (), parsed.calls, strict=False)
        ]
        message = reply.message.model_copy(update={"tool_calls": tool_calls or None})
        return GeneratedTurn(message, parsed, reply.finish, in_time=deadlines.remaining_s() > 0)

    def append_tool_responses(self, request: AsyncRolloutRequest, responses: Sequence[Message]) -> None:
        """Start the next turn."""
        request.turn += 1
        request.transition_to(RequestState.GENERATING)

    def check_images(self, role: ImageRole) -> None:
        """Do nothing: the server decides whether its model can see images."""

    def read_images(self, messages: Sequence[Message]) -> list[Message]:
        """Read the images of a prompt. Those that the server can download, and other parts, are kept.

        Raises:
            ConfigError: If an image cannot be read.
        """
        return with_images(messages, keep_others=True)

    def read_response_image(self, value: Any) -> Image:
        """Read an image of a tool response.

        Raises:
            ConfigError: If it is not an image.
        """
        return read_image(value)

    def truncate(self, text: str, request: AsyncRolloutRequest) -> str:
        """Truncate a tool response, counting characters."""
        max_chars = CHARS_PER_TOKEN * request.limits.max_tool_response_tokens
        side = request.limits.tool_response_truncate_side
        return truncate(text, max_chars, side, lambda part: [*map(ord, part)], lambda chars: "".join(map(chr, chars)))


TurnGenerator = TokenGenerator | ChatGenerator


def _with_natural_end(generation: Generation, params: Mapping[str, Any]) -> Generation:
    """Return a generation with the finish of a turn that has ended, if it was aborted right behind its stop token."""
    if generation.finish is not FinishType.ABORT or params.get("ignore_eos"):
        return generation
    has_ended = generation.ids and generation.ids[-1] in params["stop_token_ids"]
    return replace(generation, finish=FinishType.STOP) if has_ended else generation


def append_generation(request: AsyncRolloutRequest, generation: Generation, start: float | None) -> None:
    """Append the tokens of a generation, which started at `start`, to the current turn of a request."""
    for ids, logprobs, weight_version in generation.by_weights():
        request.tokens.append_sampled(ids, logprobs, turn=request.turn, weight_version=weight_version)
    request.turns.append(
        TurnRecord(
            turn=request.turn,
            tokens=len(generation.ids),
            finish=str(generation.finish),
            weight_version=generation.weight_version,
            start=start,
            timings=generation.timings,
        )
    )


def _to_message(parsed: ParsedTurn) -> Message:
    """Return the assistant message of a turn. Calls without a name are kept in its text."""
    calls = [
        ToolCall(
            id=call.id,
            function=FunctionCall(name=call.name, arguments=call.raw if call.arguments is None else call.arguments),
        )
        for call in parsed.calls
        if call.name is not None
    ]
    content = parsed.content + "".join(call.raw for call in parsed.calls if call.name is None)
    return Message(role="assistant", content=content, reasoning_content=parsed.reasoning, tool_calls=calls or None)


def _parse_message(message: Message, request: AsyncRolloutRequest) -> ParsedTurn:
    calls = tuple(
        ParsedCall(name=call.function.name or None, arguments=call.function.arguments, raw="", id=call.id)
        for call in message.tool_calls or ()
    )
    content = message.content if isinstance(message.content, str) else ""
    parsed = ParsedTurn(content=content, reasoning=message.reasoning_content, calls=calls)
    return parsed.prepare_calls(request.turn, request.limits.max_parallel_calls)
