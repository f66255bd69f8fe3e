"""RunHands: what a worker of a run does with a sample: the trajectory, and its record.

A trajectory that the infrastructure failed is tried again, some seconds later: only what comes of the last attempt is
recorded.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.engine import ChatEngine, TokenEngine
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.config import EngineConfig, FunctionConfig, RewardsConfig, RunConfig
from toolroll.run.progress import Sample
from toolroll.run.tally import Outcome

logger = logging.getLogger(__name__)

ENGINES = {
    "sglang": "toolroll.rollout.engines.sglang.SGLangEngine",
    "vllm": "toolroll.rollout.engines.vllm.VLLMEngine",
    "openai": "toolroll.rollout.engines.openai.OpenAIEngine",
}
PAUSES = (5.0, 30.0)
"""Seconds before a trajectory that the infrastructure failed is tried again, for the second time and the third."""


class RunHands:
    """In one process, for all its samples.

    Args:
        config: The run.
        apart: Whether each worker writes into a directory of its own, as several at once must.
        path: Where else to look for modules that the config names.
    """

    def __init__(self, config: RunConfig, *, apart: bool, path: Sequence[str] = ()) -> None:
        sys.path += [one for one in path if one not in sys.path]
        self.rollout = make_rollout(config)
        self._config = config
        self._apart = apart
        self._writers: dict[str, RecordWriter] = {}

    async def carry_out(self, work: Sample) -> Trajectory:
        """The trajectory of a sample."""
        for pause in (*PAUSES, None):
            trajectory = await self.rollout.sample(work.prompt, group=str(work.row), sample=work.sample)
            if trajectory.outcome == "ok" or pause is None:
                break
            logger.info("row %d, sample %d: %s; again in %g s", work.row, work.sample, trajectory.error, pause)
            await asyncio.sleep(pause)
        return trajectory

    async def commit(self, worker: str, work: Sample, trajectory: Trajectory) -> Outcome:
        """Write its record."""
        await self._writer(worker).write(trajectory, work.row // self._config.prompts_per_step)
        return Outcome.of(trajectory, work.row)

    async def close(self) -> None:
        """Close the records and the engine's connections."""
        for writer in self._writers.values():
            await asyncio.to_thread(writer.close)
        await self.rollout.__aexit__()

    def _writer(self, worker: str) -> RecordWriter:
        if worker not in self._writers:
            rendering = self.rollout.rendering
            self._writers[worker] = RecordWriter(
                self._config.rollout_data_dir,
                writer=worker if self._apart else None,
                decode=None if rendering is None else rendering.decode,
                tokens=self._config.record_tokens,
            )
        return self._writers[worker]


def make_rollout(config: RunConfig) -> Rollout:
    """The rollout that a config describes."""
    return Rollout(
        engine=_engine(config.engine),
        tools=() if config.tools is None else Path(config.tools),
        tokenizer=config.model,
        model_format=config.model_format,
        chat_template_kwargs=config.chat_template_kwargs,
        limits=config.limits,
        sampling_params=config.sampling_params,
        rewards=_rule(config.rewards),
        max_in_flight=config.max_in_flight,
    )


def _engine(config: EngineConfig) -> TokenEngine | ChatEngine:
    kind = _named(ENGINES.get(config.kind, config.kind), "engine.kind")
    options = {**config.options, **({} if config.model is None else {"model": config.model})}
    try:
        engine: TokenEngine | ChatEngine = kind(config.urls, **options)
    except TypeError as error:
        raise ConfigError(
            f"engine: {config.kind} can't be made: {error}. See engine.model and engine.options."
        ) from error
    return engine


def _rule(config: RewardsConfig) -> RewardRule:
    functions = {name: _function(name, one) for name, one in config.functions.items()}
    return RewardRule(steps=config.steps, tools=config.tools, functions=functions, weights=config.weights)


def _function(name: str, config: str | FunctionConfig) -> Any:
    where = f"rewards.functions.{name}"
    if isinstance(config, str):
        return _named(config, where)
    return partial(_named(config.path, where), **(config.model_extra or {}))


def _named(path: str, where: str) -> Any:
    """What a config names by its dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: there is no {path!r}: {error}.") from error
