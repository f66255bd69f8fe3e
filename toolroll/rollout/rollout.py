"""Rollout: prompts in, trajectories out.

    async with Rollout(engine=SGLangEngine("http://127.0.0.1:30000"), tokenizer="model", tools="tools.yaml") as rollout:
        async for trajectory in rollout.run(prompts, n=8):
            ...

Trajectories come as they end. No more than `max_in_flight` are under way or waiting to be taken, so a source of any
length is read no faster than it is worked off. Leaving the loop early cancels the rest, and releases their tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from toolroll.errors import ConfigError, did_you_mean, explain
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.engines.engine import ChatEngine, TokenEngine
from toolroll.rollout.limits import Limits
from toolroll.rollout.loop import RolloutLoop
from toolroll.rollout.pause import Pause
from toolroll.rollout.prompt import Prompt
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.token_writer import TokenWriter
from toolroll.rollout.trajectory import Trajectory
from toolroll.rollout.writer import Writer
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.registry import initialize_tools_from_config

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Rendering


logger = logging.getLogger(__name__)

Prompts = Iterable[Any] | AsyncIterable[Any]
_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many rollouts use an engine."""


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
        rewards: How rewards are composed; or a function of the trajectory, which is added to what the tools give.
        max_in_flight: Trajectories at once.
    """

    def __init__(
        self,
        *,
        engine: TokenEngine | ChatEngine,
        tools: str | Path | BaseTool[Any] | Sequence[BaseTool[Any]] | None = (),
        tokenizer: Any = None,
        model_format: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rendering: Rendering | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        rewards: RewardRule | RewardFunction | None = None,
        max_in_flight: int = 1024,
    ) -> None:
        found = _tools(tools)
        schemas = [tool.tool_schema.model_dump() for tool in found]
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight is {max_in_flight}; a rollout needs one trajectory at least.")
        self.limits = _limits(limits)
        self._pause = Pause()
        self._sampling_params = _sampling_params(sampling_params or {}, chat=isinstance(engine, ChatEngine))
        self._most = max_in_flight
        self._engine = engine
        self.rendering: Rendering | None = None
        """How conversations are written in tokens; None where the engine takes text."""
        writer: Writer
        if isinstance(engine, ChatEngine):
            from toolroll.rollout.chat_writer import ChatWriter

            writer = ChatWriter(engine, schemas, self._pause)
        elif not isinstance(engine, TokenEngine):
            raise ConfigError(f"{engine!r:.80} is no engine. Make one, e.g. SGLangEngine('http://127.0.0.1:30000').")
        else:
            self.rendering = rendering or _rendering(tokenizer, model_format, chat_template_kwargs)
            writer = TokenWriter(engine, self.rendering, schemas, self._pause)
        self._loop = RolloutLoop(writer, found, self._pause, _rule(rewards, found))
        self._running: set[asyncio.Task[Any]] = set()
        self._unknown: set[str] = set()

    async def __aenter__(self) -> Self:
        _users[self._engine] = _users.get(self._engine, 0) + 1
        return self

    async def __aexit__(self, *why: object) -> None:
        """End what still runs. The engine is closed with the last rollout that uses it."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        _users[self._engine] = _users.get(self._engine, 1) - 1
        if _users[self._engine] <= 0:
            del _users[self._engine]
            await self._engine.close()

    async def abort(self) -> None:
        """Stop all generations at once, e.g. as the weights are about to change, and wait until they have stopped.

        What was sampled is kept. Nothing new is generated before `resume`.
        """
        await self._pause.begin(self._abort)

    def resume(self) -> None:
        """Let all go on from where they were."""
        self._pause.end()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """`async with` around a change of weights: it goes on however the change ends."""
        await self.abort()
        try:
            yield
        finally:
            self.resume()

    async def _abort(self, request_ids: list[str]) -> None:
        if not isinstance(self._engine, TokenEngine):
            return  # a chat server can't be told: its answers are waited for
        if abort_many := getattr(self._engine, "abort_many", None):
            await abort_many(request_ids)
        else:
            await asyncio.gather(*map(self._engine.abort, request_ids), return_exceptions=True)

    async def run(self, prompts: Prompts, n: int = 1) -> AsyncIterator[Trajectory]:
        """`n` trajectories for each prompt (a Prompt, a row, messages or a text), as they end.

        An iterable that takes long over a prompt keeps all from going on: give an async one then.
        """
        if isinstance(prompts, str | Mapping):
            raise ConfigError(f"run() takes several prompts, and {prompts!r:.60} is one: put it into a list.")
        finished: asyncio.Queue[asyncio.Task[Trajectory] | None] = asyncio.Queue()
        places = asyncio.Semaphore(self._most)
        running: set[asyncio.Task[Trajectory]] = set()

        async def feed() -> None:
            try:
                async for request in self._requests(prompts, n):
                    await places.acquire()
                    task = asyncio.create_task(self._loop.run(request))
                    running.add(task)
                    self._running.add(task)
                    task.add_done_callback(finished.put_nowait)
                    task.add_done_callback(self._running.discard)
                    await asyncio.sleep(0)  # thousands that begin at once would keep the event loop from all else
            finally:
                finished.put_nowait(None)

        feeding = asyncio.create_task(feed())
        self._running.add(feeding)
        feeding.add_done_callback(self._running.discard)
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
        return await self._loop.run(self._request(self._read(prompt, group), sample))

    async def _requests(
        self, prompts: Iterable[Any] | AsyncIterable[Any], n: int
    ) -> AsyncIterator[AsyncRolloutRequest]:
        number = 0
        async for given in _each(prompts):
            prompt = self._read(given, str(number))
            for sample in range(n):
                yield self._request(prompt, sample)
            number += 1

    def _read(self, given: Any, group: str) -> Prompt:
        prompt = Prompt.read(given, group)
        for tool in prompt.tools_kwargs.keys() - self._loop.tools.keys() - self._unknown:
            self._unknown.add(tool)
            logger.warning("prompt %s has tools_kwargs for %r, and there is no such tool", group, tool)
        return prompt

    def _request(self, prompt: Prompt, sample: int) -> AsyncRolloutRequest:
        own = _sampling_params(prompt.sampling_params, chat=self.rendering is None)
        return AsyncRolloutRequest(
            messages=[message.model_copy() for message in prompt.messages],
            limits=self.limits,
            group=prompt.group or "",
            sample=sample,
            tools_kwargs=prompt.tools_kwargs,
            sampling_params={**self._sampling_params, **own},
            extra=prompt.extra,
        )


def _tools(given: Any) -> list[BaseTool[Any]]:
    """The tools that were given, in any of the ways."""
    if isinstance(given, str | Path):
        return initialize_tools_from_config(given)
    found = [given] if isinstance(given, BaseTool) else list(given or ())
    names: set[str] = set()
    for one in found:
        if not isinstance(one, BaseTool):
            raise ConfigError(
                f"{one!r:.80} is no tool. Give instances of BaseTool, functions with @tool, or the path of a config."
            )
        if one.name in names:
            raise ConfigError(f"Two tools are called {one.name!r}. The model knows a tool by its name: rename one.")
        names.add(one.name)
    return found


def _limits(given: Limits | Mapping[str, Any] | None) -> Limits:
    try:
        return given if isinstance(given, Limits) else Limits.model_validate(given or {})
    except ValidationError as error:
        raise ConfigError(f"limits: {explain(error, Limits.model_fields)}") from error


def _sampling_params(given: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """As engines that take ids have them: the most that may be sampled has one name."""
    params = dict(given)
    if not chat and "max_tokens" in params:
        params.setdefault("max_new_tokens", params.pop("max_tokens"))
    most = params.get("max_new_tokens", 1)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"sampling_params: max_new_tokens is {most!r}, where a number from 1 on is wanted.")
    if params.get("n", 1) != 1:
        raise ConfigError("sampling_params: n is for the engine. Samples per prompt are run(prompts, n=…).")
    return params


def _rule(given: RewardRule | RewardFunction | None, tools: Sequence[BaseTool[Any]]) -> RewardRule:
    if callable(given):
        given = RewardRule(functions={getattr(given, "__name__", "reward"): given})
    rule = given or RewardRule()
    if not isinstance(rule, RewardRule) or not isinstance(rule.functions, Mapping):
        raise ConfigError(f"rewards: {given!r:.80} is neither a RewardRule nor a function of a trajectory.")
    for what, named, known in (
        ("tool", rule.tools, {tool.name for tool in tools}),
        ("function", rule.weights, set(rule.functions)),
    ):
        for name in named:
            if name not in known:
                raise ConfigError(f"rewards: a weight for {name!r}, and no such {what}{did_you_mean(name, known)}.")
    return rule


def _rendering(tokenizer: Any, model_format: str | None, settings: Mapping[str, Any] | None) -> Rendering:
    if tokenizer is None:
        raise ConfigError("A Rollout needs a tokenizer, e.g. tokenizer='path/to/the/model', or a rendering.")
    from toolroll.rollout.formats import load_rendering

    return load_rendering(tokenizer, model_format, chat_template_kwargs=settings)


async def _each(source: Prompts) -> AsyncIterator[Any]:
    if isinstance(source, AsyncIterable):
        async for one in source:
            yield one
    else:
        for one in source:
            yield one
