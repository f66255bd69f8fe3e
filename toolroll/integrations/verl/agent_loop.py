"""ToolrollAgentLoop: toolroll's rollout loop as an agent loop of verl.

verl creates one agent loop per sample, runs it in an AgentLoopWorker, and reads tokens, mask and log-probabilities from
its output. Tools, chat format and record files are created once per process and shared by its samples.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.rollout_trace import rollout_trace_op

from toolroll.errors import ConfigError, validate
from toolroll.images import has_images, replace_images, with_images
from toolroll.integrations.summary import lost_fraction
from toolroll.integrations.verl import sample
from toolroll.integrations.verl.advantage import check_estimator, counts_samples_once
from toolroll.integrations.verl.recording import RecordSink
from toolroll.integrations.verl.reward import reward_rule
from toolroll.integrations.verl.server_engine import VerlServerEngine
from toolroll.integrations.verl.settings import AgentSettings, resolve_limits
from toolroll.integrations.verl.toolbox import add_tools, convert_tools, select_tools
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.base import LogprobsMode
from toolroll.rollout.generation import TokenGenerator
from toolroll.rollout.limits import Limits
from toolroll.rollout.loop import RolloutLoop
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.trajectory import Trajectory
from toolroll.schemas import Message
from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

VERL_ARGUMENTS = {*inspect.signature(AgentLoopBase.__init__).parameters, "tools", "name"}
"""Arguments that verl passes to every agent loop. All others are settings."""
CONSUMED_COLUMNS = {"raw_prompt", "tools_kwargs", "agent_name", "multi_modal_data", "session_id"}
"""Columns of a row that are not copied to the trajectory's `extra`."""


@dataclass(frozen=True)
class SharedResources:
    """Objects that the samples of one worker share."""

    rendering: Rendering
    tools: list[BaseTool[Any]]
    limits: Limits
    rewards: RewardRule | None
    records: RecordSink
    logprobs_mode: LogprobsMode
    key_objects: tuple[Any, ...]
    """Objects whose ids are part of the cache key. Referenced here so that the ids are not reused."""
    warnings: set[str] = field(default_factory=set)
    """Warnings that were logged, each once."""


_shared: dict[tuple[Any, ...], SharedResources] = {}
_shared_lock = threading.Lock()


@register("toolroll")
class ToolrollAgentLoop(AgentLoopBase):  # type: ignore[misc,unused-ignore]
    """Agent loop of one sample, registered with verl as `toolroll`.

    Enable it with `actor_rollout_ref.rollout.agent.default_agent_loop=toolroll`, or name it in the file of
    `agent_loop_config_path` to configure it:

        - name: toolroll
          _target_: toolroll.integrations.verl.ToolrollAgentLoop
          limits: {call_timeout: 60}

    Args:
        *args: Arguments for AgentLoopBase.
        tools: Tools that verl loaded.
        **kwargs: Arguments for AgentLoopBase, and the settings of `AgentSettings`.

    Raises:
        ConfigError: If a setting, a tool or the chat format is invalid.
    """

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        settings = {key: kwargs.pop(key) for key in kwargs.keys() - VERL_ARGUMENTS}
        kwargs.pop("name", None)
        super().__init__(*args, **kwargs)
        container = OmegaConf.to_container(OmegaConf.create(settings), resolve=True)
        self.settings = validate(AgentSettings, container, "Agent loop toolroll")
        self.shared = self._get_shared(tools.tools if tools is not None else [])

    @rollout_trace_op  # type: ignore[untyped-decorator,unused-ignore]
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Run one sample.

        Args:
            sampling_params: verl's sampling parameters.
            **row: Columns of the dataset row, and keys of the trainer.

        Returns:
            For trainers on TransferQueue, a list of AgentLoopOutput, which is empty if the sample is excluded. For
            other trainers, one AgentLoopOutput, which is masked if the sample is excluded.

        Raises:
            ConfigError: If the prompt has a video, audio, or an image that the model cannot see, or the trainer's
                advantage estimator cannot exclude samples.
        """
        accepts_lists = "session_id" in row and "global_steps" in row  # keys of the workers on TransferQueue
        if not accepts_lists:
            check_estimator(self.config.algorithm)
        request = await self._make_request(sampling_params, row)
        # verl's servers receive the session id. It is reproducible if verl's `full_determinism` is set.
        is_deterministic = self.rollout_config.get("full_determinism", False)
        session_id = f"det-{row.get('priority', 0)}" if is_deterministic else request.request_id
        engine = VerlServerEngine(self.server_manager, session_id, self.shared.logprobs_mode)
        tools = select_tools(self.shared.tools, row.get("extra_info"))
        schemas = [tool.tool_schema.model_dump() for tool in tools]
        pause = Pause()  # never used: verl's clients handle weight updates
        generator = TokenGenerator(engine, self.shared.rendering, schemas, pause)
        trajectory = await RolloutLoop(generator, tools, pause, self.shared.rewards).run(request)
        left_out = sample.left_out_reason(trajectory, needs_reward=self.shared.rewards is not None)
        if left_out is not None and trajectory.outcome == "ok":  # the loop has logged other outcomes
            logger.warning("Sample %s of %s is excluded: %s", request.sample, request.group, left_out)
        await self.shared.records.write(trajectory, _training_step(row, engine))
        turns = sample.count_turns(trajectory, len(row["raw_prompt"]))
        response_length, logprobs = self.rollout_config.response_length, bool(sampling_params.get("logprobs"))
        rows = sample.token_rows(trajectory, response_length=response_length, logprobs=logprobs)
        if not accepts_lists or not counts_samples_once(self.config.algorithm):
            rows = rows[-1:]
        if left_out is not None:
            options = {"prompt_length": self.rollout_config.prompt_length, "filler": self.tokenizer.eos_token_id or 0}
            rows = [] if accepts_lists else [sample.masked_row(rows[-1], **options)]
        lost = lost_fraction(trajectory, sum(sum(one.response_mask) for one in rows)) if left_out is None else 0.0
        if trajectory.earlier and lost:
            self._warn_about_lost_tokens(lost)
        outputs = [self._output(one, trajectory, engine, left_out, turns, lost) for one in rows]
        return outputs if accepts_lists else outputs[-1]

    async def _read_messages(self, raw_prompt: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages of a prompt, with its images as verl resizes them."""
        messages = [Message.model_validate(dict(message)) for message in raw_prompt]
        if not has_images(messages):
            return with_images(messages)
        self.shared.rendering.check_images("user")
        data = await self.process_multi_modal_info(list(raw_prompt))
        if not data.get("images"):
            raise ConfigError("Agent loop toolroll: the prompt has an image, but verl loaded no processor for it.")
        return await asyncio.to_thread(replace_images, messages, data["images"])

    async def _make_request(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> AsyncRolloutRequest:
        return AsyncRolloutRequest(
            messages=await self._read_messages(row["raw_prompt"]),
            limits=self.shared.limits,
            group=str(row.get("uid", "")),
            sample=int(row.get("session_id", 0)),
            tools_kwargs=sample.without_null_kwargs(row.get("tools_kwargs")),
            sampling_params=dict(sampling_params),
            extra={key: value for key, value in row.items() if key not in CONSUMED_COLUMNS},
        )

    def _warn_about_lost_tokens(self, lost: float) -> None:
        if "lost tokens" not in self.shared.warnings:
            self.shared.warnings.add("lost tokens")
            logger.warning(
                "The chat template renders the conversation again after a turn, and this trainer learns only from the "
                "last part: %.0f %% of the tokens of a sample are not trained on. Set thinking: keep, or use verl's "
                "newer trainer with grpo.",
                100 * lost,
            )

    def _output(
        self,
        row: sample.TokenRow,
        trajectory: Trajectory,
        engine: VerlServerEngine,
        left_out: str | None,
        turns: int,
        lost: float,
    ) -> AgentLoopOutput:
        generation_s, tools_s = sample.generation_and_tool_seconds(trajectory)
        preempted = -1 if engine.preempted is None else engine.preempted
        fields = sample.sample_fields(trajectory, left_out, lost) | engine.counters
        experts = engine.routed_experts[row.part] if row.part < len(engine.routed_experts) else None
        tokens = {name: value for name, value in vars(row).items() if name not in ("part", "images")}
        if row.images:
            tokens["multi_modal_data"] = {"images": [image.to_pil() for image in row.images]}
        fields["min_global_steps"], fields["max_global_steps"] = engine.steps
        score = None
        if self.shared.rewards is not None:
            score = trajectory.rewards.total if left_out is None else 0.0  # not used if the row is excluded
            fields["reward_extra_info"] = {}
        return AgentLoopOutput(
            **tokens,
            routed_experts=experts,
            reward_score=score,
            num_turns=turns,
            metrics=AgentLoopMetrics(generate_sequences=generation_s, tool_calls=tools_s, num_preempted=preempted),
            extra_fields=fields,
        )

    def _get_shared(self, loaded_tools: list[Any]) -> SharedResources:
        key_objects = (self.tokenizer, loaded_tools, self.config)
        key = (*map(id, key_objects), self.settings.model_dump_json())
        with _shared_lock:
            if key not in _shared:
                _shared[key] = self._create_shared(loaded_tools, key_objects)
            return _shared[key]

    def _create_shared(self, loaded_tools: list[Any], key_objects: tuple[Any, ...]) -> SharedResources:
        from verl.experimental.agent_loop.utils import resolve_config_path

        rollout = self.rollout_config
        path = rollout.multi_turn.get("tool_config_path")
        template = OmegaConf.to_container(OmegaConf.create(dict(self.apply_chat_template_kwargs or {})))
        tools = convert_tools(loaded_tools, resolve_config_path(path) if path else None)
        tools = add_tools(tools, resolve_config_path(self.settings.tools) if self.settings.tools else None)
        rendering = load_rendering(
            self.tokenizer,
            self.settings.model_format,
            chat_template_kwargs=template,  # type: ignore[arg-type]
            tool_prompt=self.settings.tool_prompt,
            thinking=self.settings.thinking,
            needs_tools=bool(tools),
        )
        if any(tool.returns_images for tool in tools):
            rendering.check_images("tool")
        is_raw = rollout.name == "vllm" and str(rollout.get("logprobs_mode", "")).startswith("raw")
        return SharedResources(
            rendering=rendering,
            tools=tools,
            limits=resolve_limits(rollout, self.settings.limits),
            rewards=reward_rule(self.settings.rewards, self.config, self.tokenizer),
            records=RecordSink(self.config.trainer.get("rollout_data_dir"), rendering.decode),
            logprobs_mode="raw_logprobs" if is_raw else "processed_logprobs",
            key_objects=key_objects,
        )


def _training_step(row: Mapping[str, Any], engine: VerlServerEngine) -> int:
    """Return the trainer's step. If verl does not pass it, it is the step after that of the sampling weights."""
    if "global_steps" in row:
        return int(row["global_steps"])
    return 0 if engine.steps[0] is None else int(engine.steps[0]) + 1
