"""ToolrollAgentLoop: our rollout loop as an agent loop of verl's.

verl makes one for each sample, runs it in one of its AgentLoopWorkers, and takes tokens, mask and log-probabilities
from it. What the samples of a worker share (tools, rendering, records) is made once in its process.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.rollout_trace import rollout_trace_op

from toolroll.errors import ConfigError
from toolroll.integrations.verl.advantage import check_estimator
from toolroll.integrations.verl.recording import Recording
from toolroll.integrations.verl.reward import reward_rule
from toolroll.integrations.verl.sample import (
    Row,
    clean_kwargs,
    fields_of,
    masked_row,
    rows_of,
    seconds_of,
    turns_of,
    why_left_out,
)
from toolroll.integrations.verl.server_engine import ServerEngine
from toolroll.integrations.verl.settings import AgentSettings, limits_of
from toolroll.integrations.verl.toolbox import chosen, tools_of
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.formats import load_rendering
from toolroll.rollout.limits import Limits
from toolroll.rollout.loop import RolloutLoop
from toolroll.rollout.pause import Pause
from toolroll.rollout.rendering import Rendering
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.token_writer import TokenWriter
from toolroll.rollout.trajectory import Trajectory
from toolroll.schemas import Message
from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

NOT_SETTINGS = {*inspect.signature(AgentLoopBase.__init__).parameters, "tools", "name"}
"""What verl gives every agent loop; all else stands in the user's file."""
NOT_CARRIED = {"raw_prompt", "tools_kwargs", "agent_name", "multi_modal_data", "session_id"}
"""Columns of a row that a trajectory has in another place."""


@dataclass(frozen=True)
class Shared:
    """What the samples of one worker share."""

    rendering: Rendering
    tools: list[BaseTool[Any]]
    limits: Limits
    rewards: RewardRule | None
    recording: Recording
    logprobs_of: Literal["scaled", "raw"]
    made_for: tuple[Any, ...]
    """Kept, so that nothing else gets the identity by which it is found."""


_shared: dict[tuple[Any, ...], Shared] = {}
_lock = threading.Lock()


@register("toolroll")
class ToolrollAgentLoop(AgentLoopBase):  # type: ignore[misc,unused-ignore]
    """One sample."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        given = {key: kwargs.pop(key) for key in kwargs.keys() - NOT_SETTINGS}
        kwargs.pop("name", None)
        super().__init__(*args, **kwargs)
        plain = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
        self.settings = AgentSettings.read(plain if isinstance(plain, dict) else {})  # type: ignore[arg-type]
        self.shared = self._share(tools.tools if tools is not None else [])

    @rollout_trace_op  # type: ignore[untyped-decorator,unused-ignore]
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Carry a sample to its end. A list of outputs where verl's trainer takes one, which may be empty."""
        takes_lists = "session_id" in row and "global_steps" in row  # as the workers on TransferQueue have it
        if not takes_lists:
            check_estimator(self.config.algorithm)
        request = self._request(sampling_params, row)
        engine = ServerEngine(self.server_manager, self._session(request, row), self.shared.logprobs_of)
        trajectory = await self._carry(request, engine, row)
        left_out = why_left_out(trajectory, scored=self.shared.rewards is not None)
        if left_out is not None and trajectory.outcome == "ok":  # else the loop has said it
            logger.warning("sample %s of %s is left out: %s", request.sample, request.group, left_out)
        await self.shared.recording.write(trajectory, _step(row, engine))
        logprobs = bool(sampling_params.get("logprobs"))
        turns = turns_of(trajectory, len(row["raw_prompt"]))
        if takes_lists:
            lengths = {"response_length": self.rollout_config.response_length, "logprobs": logprobs}
            rows = [] if left_out is not None else rows_of(trajectory, **lengths)
            return [self._output(one, trajectory, engine, left_out, turns) for one in rows]
        return self._output(self._single_row(trajectory, left_out, logprobs), trajectory, engine, left_out, turns)

    async def _carry(self, request: AsyncRolloutRequest, engine: ServerEngine, row: Mapping[str, Any]) -> Trajectory:
        pause = Pause()  # verl's own clients see to changes of weights
        tools = chosen(self.shared.tools, row.get("extra_info"))
        schemas = [tool.tool_schema.model_dump() for tool in tools]
        writer = TokenWriter(engine, self.shared.rendering, schemas, pause)
        with rare_full_collections():
            return await RolloutLoop(writer, tools, pause, self.shared.rewards).run(request)

    def _request(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> AsyncRolloutRequest:
        return AsyncRolloutRequest(
            messages=[_message(message) for message in row["raw_prompt"]],
            limits=self.shared.limits,
            group=str(row.get("uid", "")),
            sample=int(row.get("session_id", 0)),
            tools_kwargs=clean_kwargs(row.get("tools_kwargs")),
            sampling_params=dict(sampling_params),
            extra={key: value for key, value in row.items() if key not in NOT_CARRIED},
        )

    def _session(self, request: AsyncRolloutRequest, row: Mapping[str, Any]) -> str:
        """By which verl's servers know the trajectory: the same in every run, if verl is to be that."""
        if self.rollout_config.get("full_determinism", False):
            return f"det-{row.get('priority', 0)}"
        return request.request_id

    def _single_row(self, trajectory: Trajectory, left_out: str | None, logprobs: bool) -> Row:
        """Where each sample is one row, whatever became of it."""
        lengths = {"response_length": self.rollout_config.response_length, "logprobs": logprobs}
        if left_out is None:
            return rows_of(trajectory, **lengths)[-1]
        filler = self.tokenizer.eos_token_id or 0
        return masked_row(trajectory, prompt_length=self.rollout_config.prompt_length, filler=filler, **lengths)

    def _output(
        self, row: Row, trajectory: Trajectory, engine: ServerEngine, left_out: str | None, turns: int
    ) -> AgentLoopOutput:
        generating, calling = seconds_of(trajectory)
        first, last = engine.steps
        score = None
        if self.shared.rewards is not None:  # of a row that is left out, nobody reads it
            score = trajectory.rewards.total if left_out is None else 0.0
        fields = {
            **fields_of(trajectory, left_out),
            **engine.counted,
            "min_global_steps": first,
            "max_global_steps": last,
        }
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            routed_experts=engine.routed_experts,
            reward_score=score,
            num_turns=turns,
            metrics=AgentLoopMetrics(
                generate_sequences=generating,
                tool_calls=calling,
                num_preempted=-1 if engine.preempted is None else engine.preempted,
            ),
            extra_fields={**fields, **({"reward_extra_info": {}} if score is not None else {})},
        )

    def _share(self, loaded: list[Any]) -> Shared:
        made_for = (self.tokenizer, loaded, self.config)
        key = (*map(id, made_for), self.settings.model_dump_json())
        with _lock:
            if key not in _shared:
                _shared[key] = self._make_shared(loaded, made_for)
            return _shared[key]

    def _make_shared(self, loaded: list[Any], made_for: tuple[Any, ...]) -> Shared:
        from verl.experimental.agent_loop.utils import resolve_config_path

        rollout = self.rollout_config
        path = rollout.multi_turn.get("tool_config_path")
        template = OmegaConf.to_container(OmegaConf.create(dict(self.apply_chat_template_kwargs or {})))
        rendering = load_rendering(self.tokenizer, self.settings.model_format, chat_template_kwargs=template)  # type: ignore[arg-type]
        raw = rollout.name == "vllm" and str(rollout.get("logprobs_mode", "")).startswith("raw")
        return Shared(
            rendering=rendering,
            tools=tools_of(loaded, resolve_config_path(path) if path else None),
            limits=limits_of(rollout, self.settings.limits),
            rewards=reward_rule(self.settings.rewards, self.config, self.tokenizer),
            recording=Recording(self.config.trainer.get("rollout_data_dir"), rendering.decode),
            logprobs_of="raw" if raw else "scaled",
            made_for=made_for,
        )


def _message(given: Mapping[str, Any]) -> Message:
    message = Message.model_validate(dict(given))
    if isinstance(message.content, list) and any(part.get("type") != "text" for part in message.content):
        raise ConfigError("The agent loop toolroll writes text only, and this prompt has an image, a video or a sound.")
    return message


def _step(row: Mapping[str, Any], engine: ServerEngine) -> int:
    """The trainer's step. Those that don't tell it sample each step by the weights of the one before it."""
    if "global_steps" in row:
        return int(row["global_steps"])
    return 0 if engine.steps[0] is None else int(engine.steps[0]) + 1
