"""Run prompts against an inference engine and yield trajectories.

    async with Rollout(engine=SGLangEngine("http://127.0.0.1:30000"), tokenizer="model", tools="tools.yaml") as rollout:
        async for trajectory in rollout.run(prompts, n=8):
            ...

Invariants:

- At most `max_in_flight` trajectories are running or waiting to be consumed, so a source of prompts of any length is
  read only as fast as its trajectories are consumed.
- Leaving the loop early cancels the remaining trajectories and releases their tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from toolroll.errors import ConfigError, did_you_mean, validate
from toolroll.rollout.chat.formats import ToolPrompt, load_rendering
from toolroll.rollout.chat.rendering import Rendering, Thinking
from toolroll.rollout.engines.base import ChatEngine, TokenEngine
from toolroll.rollout.generation import ChatGenerator, TokenGenerator, TurnGenerator
from toolroll.rollout.limits import Limits
from toolroll.rollout.loop import RolloutLoop
from toolroll.rollout.pause import Pause
from toolroll.rollout.progress import RolloutProgress
from toolroll.rollout.prompt import Prompt
from toolroll.rollout.replay.generator import ReplayEngine, ReplayGenerator
from toolroll.rollout.replay.recording import Replay
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.trajectory import Trajectory
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.registry import initialize_tools_from_config

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prompts = Iterable[Any] | AsyncIterable[Any]

_entered_rollouts: WeakKeyDictionary[Any, WeakSet[Rollout]] = WeakKeyDictionary()
"""Rollouts that are in use by `async with`, by engine."""


class Rollout:
    """Runs trajectories against an engine.

    Use it with `async with`, or call `aclose()` at the end.

    Args:
        engine: Inference engine, for example an `SGLangEngine`. Not needed if `replay` has the sampled tokens.
        tools: Path of a tool config, or tools.
        tokenizer: The model's tokenizer, or the directory that contains it. Not needed with `rendering` or a
            `ChatEngine`.
        model_format: Name of the chat format; by default found by the model's chat template.
        chat_template_kwargs: Settings of the chat template or chat format, for example `enable_thinking`.
        tool_prompt: "hermes" for a model whose chat template does not show tools.
        thinking: "keep" or "strip" the reasoning of earlier turns; by default as the chat template does it.
        rendering: Rendering to use in place of the tokenizer and the four settings above.
        limits: Limits of each trajectory.
        sampling_params: Sampling parameters under the engine's names. Those of a prompt override them.
        rewards: Composition of the reward, or a reward function whose result is added to the tools' rewards.
        max_in_flight: Maximum number of trajectories that run concurrently.
        replay: Recording that has the results of tool calls and, unless its `engine` is False, the sampled tokens.
            Trajectories are found by their group and sample.

    Raises:
        ConfigError: If an argument is invalid or the model is refused: tools do not work with its chat format, or a
            tool returns images, which the model cannot see.

    Attributes:
        limits: Limits of each trajectory.
        rendering: Conversion between messages and tokens, or None for a `ChatEngine`.

    Example:
        async with Rollout(engine=engine, tokenizer="models/Qwen3-8B", tools=[search]) as rollout:
            trajectories = [trajectory async for trajectory in rollout.run(["What is 6 times 7?"], n=8)]
    """

    def __init__(
        self,
        *,
        engine: TokenEngine | ChatEngine | None = None,
        tools: str | Path | BaseTool[Any] | Sequence[BaseTool[Any]] | None = (),
        tokenizer: Any = None,
        model_format: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_prompt: ToolPrompt | None = None,
        thinking: Thinking | None = None,
        rendering: Rendering | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        rewards: RewardRule | RewardFunction | None = None,
        max_in_flight: int = 1024,
        replay: Replay | None = None,
    ) -> None:
        loaded_tools = _load_tools(tools)
        schemas = [tool.tool_schema.model_dump() for tool in loaded_tools]
        if max_in_flight < 1:
            raise ConfigError(f"Invalid max_in_flight: {max_in_flight}. It must be at least 1.")
        self.limits = validate(Limits, limits or {}, "limits")
        self.rendering: Rendering | None = None
        self._pause = Pause()
        self._sampling_params = _read_sampling_params(sampling_params or {}, chat=isinstance(engine, ChatEngine))
        self._max_in_flight = max_in_flight
        if replay is not None and replay.engine:
            engine = ReplayEngine(replay.recording.logprobs_mode)
        generator: TurnGenerator
        if isinstance(engine, ChatEngine):
            generator = ChatGenerator(engine, schemas, self._pause)
        elif not isinstance(engine, TokenEngine):
            raise ConfigError(
                f"Expected an engine, got {engine!r:.80}. Create one, e.g. SGLangEngine('http://127.0.0.1:30000')."
            )
        elif rendering is None and tokenizer is None:
            raise ConfigError("Missing tokenizer. Pass tokenizer='path/to/the/model' or a rendering.")
        else:
            self.rendering = rendering or load_rendering(
                tokenizer,
                model_format,
                chat_template_kwargs=chat_template_kwargs,
                tool_prompt=tool_prompt,
                thinking=thinking,
                needs_tools=bool(schemas),
            )
            generator = (
                ReplayGenerator(replay, self.rendering, schemas, self._pause)
                if replay is not None and replay.engine
                else TokenGenerator(engine, self.rendering, schemas, self._pause)
            )
        self._engine = engine
        if any(tool.returns_images for tool in loaded_tools):
            generator.check_images("tool")
        self._generator = generator
        self._loop = RolloutLoop(generator, loaded_tools, self._pause, _read_rewards(rewards, loaded_tools), replay)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unknown_tools: set[str] = set()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._is_closed = False
        _entered_rollouts.setdefault(self._engine, WeakSet()).add(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the running trajectories and release their tools, then close the engine.

        The engine stays open while another rollout uses it in `async with`. May be called more than once.
        """
        await cancel_all(self._tasks)
        if self._is_closed:
            return
        self._is_closed = True
        users = _entered_rollouts.get(self._engine, WeakSet())
        users.discard(self)
        if not users:
            await self._engine.close()

    def progress(self) -> RolloutProgress:
        """Return what all trajectories have done so far, and which services do not answer."""
        services = {"engine": self._engine, **self._loop.tools}
        seconds = {name: getattr(service, "unreachable_s", lambda: None)() for name, service in services.items()}
        unreachable = {name: value for name, value in seconds.items() if value is not None}
        return replace(self._loop.progress, unreachable=unreachable)

    async def abort(self) -> None:
        """Abort all generations and wait until they have ended, for example before the weights change.

        Sampled tokens are kept. Nothing is generated until `resume()`.
        """
        await self._pause.start(self._abort_requests)

    def resume(self) -> None:
        """Resume all trajectories from where `abort()` interrupted them."""
        self._pause.stop()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause all generations while the block runs, for example to update the weights.

        Yields:
            None, when all generations have ended.

        Example:
            async with rollout.paused():
                await engine.update_weights("/models/step-7", "step-7")
        """
        await self.abort()
        try:
            yield
        finally:
            self.resume()

    async def run(self, prompts: Prompts, n: int = 1) -> AsyncIterator[Trajectory]:
        """Run `n` trajectories for each prompt and yield them as they finish.

        Args:
            prompts: Prompts, each a `Prompt`, a row, a list of messages or a text. Use an async iterable if reading a
                prompt takes long: a blocking one stops all trajectories meanwhile.
            n: Number of trajectories per prompt.

        Yields:
            Trajectories, in the order in which they finish.

        Raises:
            ConfigError: If a prompt is invalid, or has an image that the model cannot see. It is raised after the
                trajectories of earlier prompts are yielded.
        """
        if isinstance(prompts, str | Mapping):
            raise ConfigError(f"Expected several prompts, got one: {prompts!r:.60}. Put it into a list.")
        finished: asyncio.Queue[asyncio.Task[Trajectory] | None] = asyncio.Queue()
        slots = asyncio.Semaphore(self._max_in_flight)
        tasks: set[asyncio.Task[Any]] = set()

        async def start_all() -> None:
            """Start each request when a slot is free, and put None into the queue when all have finished."""
            try:
                async for request in self._requests(prompts, n):
                    await slots.acquire()
                    task = self._spawn(self._loop.run(request))
                    tasks.add(task)
                    task.add_done_callback(finished.put_nowait)
                    task.add_done_callback(tasks.discard)
                    await asyncio.sleep(0)  # keeps the event loop responsive while thousands start
            finally:
                if tasks:
                    await asyncio.wait(tasks)
                finished.put_nowait(None)

        starter = self._spawn(start_all())
        try:
            while (task := await finished.get()) is not None:
                slots.release()
                yield task.result()
            await starter  # raises the error of an invalid prompt
        finally:
            await cancel_all({starter, *tasks})

    async def sample(self, prompt: Any, *, group: str = "0", sample: int = 0) -> Trajectory:
        """Run one trajectory.

        Args:
            prompt: A `Prompt`, a row, a list of messages or a text.
            group: Group of the trajectory if the prompt names none.
            sample: Index among the samples of the prompt.

        Returns:
            The trajectory.

        Raises:
            ConfigError: If the prompt is invalid.
        """
        read = await self._with_images(self._read_prompt(prompt, group))
        return await self._loop.run(self._make_request(read, sample))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abort_requests(self, request_ids: list[str]) -> None:
        if not isinstance(self._engine, TokenEngine):
            return  # chat servers have no abort: their replies are awaited
        if abort_many := getattr(self._engine, "abort_many", None):
            await abort_many(request_ids)
        else:
            await asyncio.gather(*map(self._engine.abort, request_ids), return_exceptions=True)

    async def _requests(self, prompts: Prompts, n: int) -> AsyncIterator[AsyncRolloutRequest]:
        index = 0
        async for value in _iterate(prompts):
            prompt = await self._with_images(self._read_prompt(value, str(index)))
            for sample in range(n):
                yield self._make_request(prompt, sample)
            index += 1

    def _read_prompt(self, value: Any, group: str) -> Prompt:
        prompt = Prompt.read(value, group)
        for tool in prompt.tools_kwargs.keys() - self._loop.tools.keys() - self._unknown_tools:
            self._unknown_tools.add(tool)
            logger.warning("prompt %s: tools_kwargs for unknown tool %r ignored", group, tool)
        return prompt

    async def _with_images(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its images, which are read in a thread."""
        if all(isinstance(message.content, str | None) for message in prompt.messages):
            return prompt
        messages = await asyncio.to_thread(self._generator.read_images, prompt.messages)
        return prompt.model_copy(update={"messages": messages})

    def _make_request(self, prompt: Prompt, sample: int) -> AsyncRolloutRequest:
        prompt_params = _read_sampling_params(prompt.sampling_params, chat=self.rendering is None)
        return AsyncRolloutRequest(
            messages=[message.model_copy() for message in prompt.messages],
            limits=self.limits,
            group=prompt.group or "",
            sample=sample,
            tools_kwargs=prompt.tools_kwargs,
            sampling_params={**self._sampling_params, **prompt_params},
            extra=prompt.extra,
        )


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their exceptions are ignored."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def _load_tools(tools: Any) -> list[BaseTool[Any]]:
    if isinstance(tools, str | Path):
        return initialize_tools_from_config(tools)
    loaded = [tools] if isinstance(tools, BaseTool) else list(tools or ())
    names: set[str] = set()
    for tool in loaded:
        if not isinstance(tool, BaseTool):
            raise ConfigError(
                f"Expected a tool, got {tool!r:.80}. Pass instances of BaseTool, functions with @tool, or the path of "
                "a tool config."
            )
        if tool.name in names:
            raise ConfigError(f"Duplicate tool name {tool.name!r}. Rename one of the tools.")
        names.add(tool.name)
    return loaded


def _read_sampling_params(sampling_params: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    params = dict(sampling_params)
    if not chat and "max_tokens" in params:  # token engines have one name for it
        params.setdefault("max_new_tokens", params.pop("max_tokens"))
    max_new_tokens = params.get("max_new_tokens", 1)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(f"sampling_params: invalid max_new_tokens: {max_new_tokens!r}. It must be at least 1.")
    if params.get("n", 1) != 1:
        raise ConfigError("sampling_params: n is not supported. Pass the samples per prompt to run(prompts, n=…).")
    return params


def _read_rewards(rewards: RewardRule | RewardFunction | None, tools: Sequence[BaseTool[Any]]) -> RewardRule:
    if callable(rewards):
        rewards = RewardRule(functions={getattr(rewards, "__name__", "reward"): rewards})
    rule = rewards or RewardRule()
    if not isinstance(rule, RewardRule) or not isinstance(rule.functions, Mapping):
        raise ConfigError(f"rewards: Expected a RewardRule or a function of a trajectory, got {rewards!r:.80}.")
    for kind, weights, known in (
        ("tool", rule.tools, {tool.name for tool in tools}),
        ("function", rule.weights, set(rule.functions)),
    ):
        for name in sorted(weights.keys() - known):
            raise ConfigError(f"rewards: weight for unknown {kind} {name!r}{did_you_mean(name, known)}.")
    return rule


async def _iterate(prompts: Prompts) -> AsyncIterator[Any]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
