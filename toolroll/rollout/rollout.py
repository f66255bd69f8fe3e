"""Rollout: prompts in, trajectories out.

    async with Rollout(engine=SGLangEngine("http://127.0.0.1:30000"), tokenizer="model", tools="tools.yaml") as rollout:
        async for trajectory in rollout.run(prompts, n=8):
            ...

Trajectories come as they end. No more than `max_in_flight` are under way or waiting to be taken, so a source of any
length is read no faster than it is worked off. Leaving the loop early cancels the rest, and releases their tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolroll.errors import ConfigError, explain
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.engines.engine import ChatEngine, TokenEngine
from toolroll.rollout.limits import Limits
from toolroll.rollout.loop import RolloutLoop
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.token_writer import TokenWriter
from toolroll.rollout.trajectory import Trajectory
from toolroll.rollout.writer import Writer
from toolroll.schemas import Message
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.registry import initialize_tools_from_config

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Rendering


Prompts = Iterable[Any] | AsyncIterable[Any]


class Prompt(BaseModel):
    """What a trajectory begins with. Other keys of a row are carried along, as `extra` of its trajectories.

    >>> Prompt.model_validate({"prompt": "What is 6 times 7?", "ground_truth": "42"}).extra
    {'ground_truth': '42'}
    """

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1)
    """Or `prompt`: the same, or a text, which is a user's message."""
    tools_kwargs: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """By tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    group: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, given: Any) -> Any:
        row = (
            {"prompt": given} if isinstance(given, str | list) else dict(given) if isinstance(given, Mapping) else given
        )
        if isinstance(row, dict) and "messages" not in row and "prompt" in row:
            prompt = row.pop("prompt")
            row["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return row

    @property
    def extra(self) -> dict[str, Any]:
        """The other keys of the row."""
        return dict(self.model_extra or {})


class Rollout:
    """Runs trajectories against an engine.

    Args:
        engine: Where the model is.
        tools: A tool config, or tools.
        tokenizer: The model's tokenizer, or where it is; not needed where `rendering` is given.
        model_format: How the model's conversations are written; by default found from the tokenizer.
        chat_template_kwargs: Settings of the template's, or of the format's: `enable_thinking`, say.
        rendering: In place of these three.
        limits: What a trajectory may use.
        sampling_params: As the engine names them; a prompt's own go before these.
        rewards: How rewards are composed.
        max_in_flight: Trajectories at once.
    """

    def __init__(
        self,
        *,
        engine: TokenEngine | ChatEngine,
        tools: str | Path | Sequence[BaseTool[Any]] = (),
        tokenizer: Any = None,
        model_format: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rendering: Rendering | None = None,
        limits: Limits | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        rewards: RewardRule | None = None,
        max_in_flight: int = 1024,
    ) -> None:
        found = initialize_tools_from_config(tools) if isinstance(tools, str | Path) else list(tools)
        schemas = [tool.tool_schema.model_dump() for tool in found]
        self.limits = limits or Limits()
        self._pause = Pause()
        self._sampling_params = dict(sampling_params or {})
        self._most = max_in_flight
        self._engine = engine
        self.rendering: Rendering | None = None
        """How conversations are written in tokens; None where the engine takes text."""
        writer: Writer
        if isinstance(engine, ChatEngine):
            from toolroll.rollout.chat_writer import ChatWriter

            writer = ChatWriter(engine, schemas, self._pause)
        else:
            self.rendering = rendering or _rendering(tokenizer, model_format, chat_template_kwargs)
            writer = TokenWriter(engine, self.rendering, schemas, self._pause)
        self._loop = RolloutLoop(writer, found, self._pause, rewards)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._engine.close()

    async def abort(self) -> None:
        """Stop all generations at once, e.g. as the weights are about to change, and wait until they have stopped.

        What was sampled is kept. Nothing new is generated before `resume`.
        """
        await self._pause.begin(self._abort)

    def resume(self) -> None:
        """Let all go on from where they were."""
        self._pause.end()

    async def _abort(self, request_id: str) -> None:
        if isinstance(self._engine, TokenEngine):  # a chat server can't be told: its answers are waited for
            await self._engine.abort(request_id)

    async def run(self, prompts: Prompts, n: int = 1) -> AsyncIterator[Trajectory]:
        """`n` trajectories for each prompt (a Prompt, a row, messages or a text), as they end."""
        finished: asyncio.Queue[asyncio.Task[Trajectory] | None] = asyncio.Queue()
        places = asyncio.Semaphore(self._most)
        running: set[asyncio.Task[Trajectory]] = set()

        async def feed() -> None:
            try:
                async for request in self._requests(prompts, n):
                    await places.acquire()
                    task = asyncio.create_task(self._loop.run(request))
                    running.add(task)
                    task.add_done_callback(finished.put_nowait)
                    await asyncio.sleep(0)  # thousands that begin at once would keep the event loop from all else
            finally:
                finished.put_nowait(None)

        feeding = asyncio.create_task(feed())
        with rare_full_collections():
            try:
                while running or not feeding.done() or not finished.empty():
                    task = await finished.get()
                    if task is None:
                        continue
                    running.discard(task)
                    places.release()
                    yield task.result()
                await feeding  # what was wrong with the prompts is raised here
            finally:
                for left in (feeding, *running):
                    left.cancel()
                await asyncio.gather(feeding, *running, return_exceptions=True)

    async def sample(self, prompt: Any, *, group: str = "0", sample: int = 0) -> Trajectory:
        """One trajectory. Raises ConfigError where the prompt can't be used."""
        return await self._loop.run(self._request(_prompt(prompt, group), sample))

    async def _requests(
        self, prompts: Iterable[Any] | AsyncIterable[Any], n: int
    ) -> AsyncIterator[AsyncRolloutRequest]:
        number = 0
        async for given in _each(prompts):
            prompt = _prompt(given, str(number))
            for sample in range(n):
                yield self._request(prompt, sample)
            number += 1

    def _request(self, prompt: Prompt, sample: int) -> AsyncRolloutRequest:
        return AsyncRolloutRequest(
            messages=[message.model_copy() for message in prompt.messages],
            limits=self.limits,
            group=prompt.group or "",
            sample=sample,
            tools_kwargs=prompt.tools_kwargs,
            sampling_params={**self._sampling_params, **prompt.sampling_params},
            extra=prompt.extra,
        )


def _prompt(given: Any, group: str) -> Prompt:
    try:
        prompt = given if isinstance(given, Prompt) else Prompt.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"Prompt {group} can't be used: {explain(error)}.") from error
    return prompt if prompt.group is not None else prompt.model_copy(update={"group": group})


def _rendering(tokenizer: Any, model_format: str | None, settings: Mapping[str, Any] | None) -> Rendering:
    if tokenizer is None:
        raise ConfigError("A Rollout needs a tokenizer, e.g. tokenizer='path/to/the/model', or a rendering.")
    from toolroll.rollout.rendering import load_rendering

    return load_rendering(tokenizer, model_format, chat_template_kwargs=settings)


async def _each(source: Prompts) -> AsyncIterator[Any]:
    if isinstance(source, AsyncIterable):
        async for one in source:
            yield one
    else:
        for one in source:
            yield one
