"""Produce and record the samples of a run in a worker process.

A sample that fails because of the infrastructure is retried after a delay; only the last attempt is recorded. A sample
that fails because a budget is spent is neither retried nor recorded, so that a resumed run attempts it again. A sample
of a row that only a worker can reject, e.g. because an image file is missing, fails without affecting other rows.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from toolroll._internal.dotted_path import import_dotted_path
from toolroll._internal.text import hide_credentials
from toolroll.errors import ConfigError, RecordsNotWritten
from toolroll.limiter.limited import limited
from toolroll.limiter.settings import ResourceLimits
from toolroll.records.recording import RecordDirectory
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.base import ChatEngine, TokenEngine
from toolroll.rollout.prompt import Prompt
from toolroll.rollout.replay.recording import Replay
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Fidelity, FinishReason, Rewards, Trajectory
from toolroll.run.aggregates import BudgetRefusal, SampleOutcome
from toolroll.run.config import ENGINE_CLASSES, EngineConfig, FunctionConfig, RewardsConfig, RunConfig
from toolroll.run.resume import SampleItem
from toolroll.run.run_coordinator import check_mcp_identity
from toolroll.run.write_fence import WritePermission
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.cache.tool_calls import close_result_caches, configure_caches
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool
from toolroll.tracing.exporter import Tracing

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
        data_hash: Fingerprint of the data, to which cached results with the scope `dataset` belong.
        mcp_identity: Names and hashes of the MCP tools with which the run was started. Default: those that are found.

    Raises:
        ConfigError: If the config is invalid, or an MCP server has changed its tools.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        separate_directories: bool,
        import_paths: Sequence[str] = (),
        data_hash: str = "",
        mcp_identity: Mapping[str, str | None] | None = None,
    ) -> None:
        sys.path += [path for path in import_paths if path not in sys.path]
        self._tracing = _make_tracing(config)
        self.rollout = make_rollout(config, data_hash, mcp_identity)
        self._config = config
        self._separate_directories = separate_directories
        self._writers: dict[str, RecordWriter] = {}
        """The current writer, by the worker's name. A worker whose lease has expired registers under another name."""
        self._resources = ExitStack()

    async def execute(self, payload: SampleItem) -> Trajectory:
        """Produce the trajectory of a sample, retrying infra faults."""
        if self._tracing is not None:
            self._tracing.start()
        for delay in (*SAMPLE_RETRY_DELAYS_S, None):
            try:
                trajectory = await self.rollout.sample(payload.prompt, group=str(payload.row), sample=payload.sample)
            except ConfigError as error:
                return _failed_trajectory(payload, f"Row {payload.row} of the data is invalid: {error}")
            if trajectory.outcome == "ok" or delay is None or not trajectory.retryable:
                break
            logger.info(
                "Row %d, sample %d failed: %s. Retrying in %g s.", payload.row, payload.sample, trajectory.error, delay
            )
            await asyncio.sleep(delay)
        return trajectory

    async def commit(self, worker: str, payload: SampleItem, trajectory: Trajectory) -> SampleOutcome | BudgetRefusal:
        """Write the record of a trajectory, and return its outcome. A trajectory without budget is not recorded.

        Raises:
            LeaseExpired: If the worker is lost, so that its samples belong to others.
            RecordsNotWritten: If the record cannot be written, e.g. because the disk is full.
        """
        if trajectory.exhausted_budget is not None:
            return BudgetRefusal(*trajectory.exhausted_budget)
        try:
            await self._writer(worker).write(trajectory, payload.row // self._config.prompts_per_step)
        except OSError as error:
            raise RecordsNotWritten.because(error, self._config.rollout_data_dir) from error
        return SampleOutcome.from_trajectory(trajectory, payload.row)

    async def close(self) -> None:
        """Close the record files and the rollout."""
        await asyncio.to_thread(self._close_writers)
        await self.rollout.aclose()
        await asyncio.to_thread(close_result_caches)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

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


def _failed_trajectory(payload: SampleItem, error: str) -> Trajectory:
    """Return the trajectory of a sample that cannot be started."""
    prompt = Prompt.read(payload.prompt, str(payload.row))
    return Trajectory(
        request_id=uuid4().hex,
        group=str(payload.row),
        sample=payload.sample,
        messages=prompt.messages,
        tokens=TokenStream([]),
        finish_reason=FinishReason.INFRA,
        outcome="infra",
        error=error,
        retryable=False,
        fidelity=Fidelity.EXACT,
        logprobs_mode=None,
        rewards=Rewards(total=None),
        turns=[],
        calls=[],
        started_at=time.time(),
        seconds=0.0,
        extra=prompt.extra,
    )


def _make_tracing(config: RunConfig) -> Tracing | None:
    if config.tracing is None:
        return None
    return Tracing(config.tracing, model=config.model_name, engine=config.engine.kind)


def make_rollout(
    config: RunConfig, data_hash: str = "", mcp_identity: Mapping[str, str | None] | None = None
) -> Rollout:
    """Create the rollout that a config describes. See `SampleWorker` for the arguments."""
    tools, replay = load_tools(config), config.replay
    if mcp_identity is not None:
        check_mcp_identity(tools, mcp_identity)
    configure_caches(tools, run_directory=Path(config.rollout_data_dir), data=data_hash)
    return Rollout(
        engine=_make_engine(config.engine, config.model) if replay is None or not replay.engine else None,
        tools=tools,
        tokenizer=config.model,
        model_format=config.model_format,
        chat_template_kwargs=config.chat_template_kwargs,
        tool_prompt=config.tool_prompt,
        thinking=config.thinking,
        limits=config.limits,
        sampling_params=config.sampling_params,
        rewards=make_reward_rule(config.rewards),
        max_in_flight=config.max_in_flight,
        replay=None if replay is None else Replay(RecordDirectory(replay.directory), replay.on_miss, replay.engine),
    )


def sandbox_tools(config: RunConfig) -> list[SandboxFusionTool]:
    """Return the tools of a run that use a sandbox."""
    return [tool for tool in load_tools(config) if isinstance(tool, SandboxFusionTool)]


def load_tools(config: RunConfig) -> list[BaseTool[Any]]:
    """Return the tools of a run."""
    return initialize_tools_from_config(config.tools) if config.tools else []


def engine_limits(config: EngineConfig) -> ResourceLimits | None:
    """Return the limits of an engine, with the name of the resource: its URLs by default."""
    if config.limits is None or config.limits.resource is not None:
        return config.limits
    urls = [config.urls] if isinstance(config.urls, str) else config.urls
    resource = ", ".join(sorted(hide_credentials(url, shown="") for url in urls)) or config.kind
    return config.limits.model_copy(update={"resource": resource})


def _make_engine(config: EngineConfig, model: str | None) -> TokenEngine | ChatEngine:
    engine_class = import_dotted_path(ENGINE_CLASSES.get(config.kind, config.kind), setting="engine.kind")
    options, first = {**config.options, **({} if config.model is None else {"model": config.model})}, config.urls
    if (limits := engine_limits(config)) is not None:
        options["limits"] = limits
    if config.kind == "transformers":
        first = options.pop("model", model)
    try:
        engine: TokenEngine | ChatEngine = engine_class(first, **options)
    except TypeError as error:
        problem = f"engine: Cannot create {config.kind!r}: {error}. Check engine.model and engine.options."
        raise ConfigError(problem) from error
    return engine


def make_reward_rule(config: RewardsConfig) -> RewardRule:
    """Import the reward functions of a config.

    Raises:
        ConfigError: If a function cannot be imported.
    """
    functions = {name: load_reward_function(name, function) for name, function in config.functions.items()}
    return RewardRule(steps=config.steps, tools=config.tools, functions=functions, weights=config.weights)


def load_reward_function(name: str, config: str | FunctionConfig) -> Any:
    """Import a reward function, and apply its settings and limits.

    Raises:
        ConfigError: If it cannot be imported, or is not a function.
    """
    setting = f"rewards.functions.{name}"
    path = config if isinstance(config, str) else config.path
    imported = import_dotted_path(path, setting=setting)
    if not callable(imported):
        raise ConfigError(f"{setting}: {path} is a {type(imported).__name__}. Name a function.")
    if isinstance(config, str):
        return imported
    function = partial(imported, **(config.model_extra or {}))
    return function if config.limits is None else limited({"resource": name, **_set_fields(config.limits)})(function)


def _set_fields(limits: ResourceLimits) -> dict[str, Any]:
    return limits.model_dump(exclude_unset=True, exclude_none=True)
