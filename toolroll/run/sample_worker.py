"""Produce and record the samples of a run in a worker process.

A sample that fails because of the infrastructure is retried after a delay; only the last attempt is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from toolroll._internal.dotted_path import import_dotted_path
from toolroll.errors import ConfigError, RecordsNotWritten
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.base import ChatEngine, TokenEngine
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.config import ENGINE_CLASSES, EngineConfig, FunctionConfig, RunConfig
from toolroll.run.resume import SampleItem
from toolroll.run.write_fence import WritePermission
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

logger = logging.getLogger(__name__)

SAMPLE_RETRY_DELAYS_S = (5.0, 30.0)
"""Delays before the second and the third attempt of a sample that failed because of the infrastructure."""


class SampleWorker:
    """Produces and records samples in one process. Implements the `SampleRunner` protocol.

    Args:
        config: Configuration of the run.
        separate_directories: Write the records of each worker to its own subdirectory. Required if several workers
            write at the same time.
        import_paths: Directories to add to `sys.path`, for modules that the config names.
    """

    def __init__(self, config: RunConfig, *, separate_directories: bool, import_paths: Sequence[str] = ()) -> None:
        sys.path += [path for path in import_paths if path not in sys.path]
        self.rollout = make_rollout(config)
        self._config = config
        self._separate_directories = separate_directories
        self._writers: dict[str, RecordWriter] = {}
        """The current writer, by the worker's name. A worker whose lease has expired registers under another name."""
        self._resources = ExitStack()

    async def execute(self, payload: SampleItem) -> Trajectory:
        """Produce the trajectory of a sample, retrying infra faults."""
        for delay in (*SAMPLE_RETRY_DELAYS_S, None):
            trajectory = await self.rollout.sample(payload.prompt, group=str(payload.row), sample=payload.sample)
            if trajectory.outcome == "ok" or delay is None or not trajectory.retryable:
                break
            logger.info(
                "Row %d, sample %d failed: %s. Retrying in %g s.", payload.row, payload.sample, trajectory.error, delay
            )
            await asyncio.sleep(delay)
        return trajectory

    async def commit(self, worker: str, payload: SampleItem, trajectory: Trajectory) -> SampleOutcome:
        """Write the record of a trajectory, and return its outcome.

        Raises:
            LeaseExpired: If the worker is lost, so that its samples belong to others.
            RecordsNotWritten: If the record cannot be written, e.g. because the disk is full.
        """
        try:
            await self._writer(worker).write(trajectory, payload.row // self._config.prompts_per_step)
        except OSError as error:
            raise RecordsNotWritten.because(error, self._config.rollout_data_dir) from error
        return SampleOutcome.from_trajectory(trajectory, payload.row)

    async def close(self) -> None:
        """Close the record files and the rollout."""
        await asyncio.to_thread(self._close_writers)
        await self.rollout.aclose()

    def _writer(self, worker: str) -> RecordWriter:
        if worker not in self._writers:
            self._close_writers()  # nothing is written under an earlier name any more
            guard: Callable[[], AbstractContextManager[None]] = nullcontext
            if self._separate_directories:
                permission = WritePermission(Path(self._config.rollout_data_dir) / worker)
                self._resources.callback(permission.close)
                guard = permission.hold
            rendering = self.rollout.rendering
            self._writers[worker] = RecordWriter(
                self._config.rollout_data_dir,
                writer=worker if self._separate_directories else None,
                decode=None if rendering is None else rendering.decode,
                tokens=self._config.record_tokens,
                guard=guard,
            )
            self._resources.callback(self._writers[worker].close)
        return self._writers[worker]

    def _close_writers(self) -> None:
        self._writers.clear()
        self._resources.close()


def make_rollout(config: RunConfig) -> Rollout:
    """Create the rollout that a config describes."""
    rewards = config.rewards
    functions = {name: _load_reward_function(name, function) for name, function in rewards.functions.items()}
    return Rollout(
        engine=_make_engine(config.engine, config.model),
        tools=() if config.tools is None else Path(config.tools),
        tokenizer=config.model,
        model_format=config.model_format,
        chat_template_kwargs=config.chat_template_kwargs,
        tool_prompt=config.tool_prompt,
        thinking=config.thinking,
        limits=config.limits,
        sampling_params=config.sampling_params,
        rewards=RewardRule(steps=rewards.steps, tools=rewards.tools, functions=functions, weights=rewards.weights),
        max_in_flight=config.max_in_flight,
    )


def sandbox_tools(config: RunConfig) -> list[SandboxFusionTool]:
    """Return the tools of a run that use a sandbox."""
    tools = initialize_tools_from_config(config.tools) if config.tools else []
    return [tool for tool in tools if isinstance(tool, SandboxFusionTool)]


def _make_engine(config: EngineConfig, model: str | None) -> TokenEngine | ChatEngine:
    engine_class = import_dotted_path(ENGINE_CLASSES.get(config.kind, config.kind), setting="engine.kind")
    options, first = {**config.options, **({} if config.model is None else {"model": config.model})}, config.urls
    if config.kind == "transformers":
        first = options.pop("model", model)
    try:
        engine: TokenEngine | ChatEngine = engine_class(first, **options)
    except TypeError as error:
        problem = f"engine: Cannot create {config.kind!r}: {error}. Check engine.model and engine.options."
        raise ConfigError(problem) from error
    return engine


def _load_reward_function(name: str, config: str | FunctionConfig) -> Any:
    setting = f"rewards.functions.{name}"
    if isinstance(config, str):
        return import_dotted_path(config, setting=setting)
    return partial(import_dotted_path(config.path, setting=setting), **(config.model_extra or {}))
