"""Drive a request through its states and make a trajectory of it.

Invariants, for any output of the model and any failure:

- A request ends with a finish reason, or with the cancellation of its task.
- Every tool instance that was created is released exactly once, after the rewards are computed.
- Every tool call is answered. Infra faults end the trajectory with outcome "infra" and are never shown to the model.
- Deadlines nest and are passed on to engines and tools.

The rules are pure functions (`request.py`, `reward.py`, `plan_tool_calls`); this module connects them to the I/O of
engines and tools.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolroll.errors import BudgetExhausted, ConfigError, Fault, InfraFault, ReplayMiss, UserCodeError
from toolroll.images import image_content
from toolroll.rollout.chat.parsed_turn import ParsedTurn
from toolroll.rollout.engines.base import FinishType
from toolroll.rollout.generation import GeneratedTurn, TurnGenerator
from toolroll.rollout.instances import ToolInstances
from toolroll.rollout.pause import Deadlines, Pause
from toolroll.rollout.progress import RolloutProgress
from toolroll.rollout.replay.executor import ReplayExecutor
from toolroll.rollout.replay.recording import Replay
from toolroll.rollout.request import AsyncRolloutRequest, RequestState
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.tool_execution import ToolExecutor, plan_tool_calls
from toolroll.rollout.trajectory import INFRA_FINISH_REASONS, FinishReason, Rewards, Trajectory
from toolroll.schemas import Message
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.instance import ToolInstance
from toolroll.tracing.context import finish_trajectory

logger = logging.getLogger(__name__)

MAX_DISTINCT_WARNINGS = 20
"""Maximum number of different errors that are logged as warnings."""


class RolloutLoop:
    """Runs requests. All trajectories of a rollout share one loop.

    Args:
        generator: Generates the assistant turns.
        tools: Tools that the model may call.
        pause: Pause of the rollout, whose duration does not count towards deadlines.
        rewards: Composition of the reward.
        replay: Recording that has the results of tool calls.
    """

    def __init__(
        self,
        generator: TurnGenerator,
        tools: Sequence[BaseTool[Any]],
        pause: Pause,
        rewards: RewardRule | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.rewards = rewards or RewardRule()
        self._generator = generator
        self._replay = replay
        answering = generator.truncate, generator.read_response_image
        self._executor = (
            ToolExecutor(self.tools, *answering) if replay is None else ReplayExecutor(replay, self.tools, *answering)
        )
        versions = ((name, tool.fingerprint) for name, tool in self.tools.items())
        self._tool_versions = {name: version for name, version in versions if version is not None}
        self._pause = pause
        self.progress = RolloutProgress()
        """What all trajectories have done so far."""
        self._logged_errors: set[str] = set()

    async def run(self, request: AsyncRolloutRequest) -> Trajectory:
        """Run a request to its end. Raises nothing but a cancellation.

        Args:
            request: Request in state PENDING.

        Returns:
            The trajectory.
        """
        request.started = time.monotonic()
        rewards = Rewards(total=None)
        failure: Exception | None = None
        try:
            if self._replay is not None:
                await asyncio.to_thread(self._replay.begin, request.request_id, request.group, request.sample)
            async with self._tool_instances(request) as instances:
                await self._drive(request, instances, self._deadlines(request))
                if request.finish_reason is not FinishReason.INFRA:
                    steps = _step_rewards(request)
                    rewards = Rewards(
                        total=None, steps=steps, tools=await self._executor.tool_rewards(request, instances)
                    )
        except (InfraFault, ConfigError) as error:  # the format may reject a prompt
            request.finish(FinishReason.INFRA)
            request.error = str(error)
            failure = error
        except Exception as error:
            logger.exception("request %s: internal error", request.request_id)
            request.finish(FinishReason.INFRA)
            request.error = f"{type(error).__name__}: {error}"
        finally:
            if self._replay is not None:
                self._replay.end(request.request_id)
        trajectory = self._make_trajectory(request, rewards, time.monotonic() - request.started)
        is_reproduced = trajectory.outcome == "infra" and self._is_reproduced(request, failure)
        if trajectory.outcome == "ok":
            failure = await self._score(trajectory, request.limits.turn_timeout)
        if trajectory.outcome == "infra":
            if isinstance(failure, BudgetExhausted):
                trajectory.exhausted_budget = failure.resource, failure.unit
            is_bug = isinstance(failure, UserCodeError)
            trajectory.retryable = not is_bug and not is_reproduced and trajectory.exhausted_budget is None
            self._warn_once(trajectory, failure.__cause__ if is_bug and failure is not None else None)
        finish_trajectory(trajectory)
        return trajectory

    async def _drive(self, request: AsyncRolloutRequest, instances: ToolInstances, deadlines: Deadlines) -> None:
        await self._generator.start(request)
        parsed: ParsedTurn | None = None
        while request.state is not RequestState.FINISHED:
            if request.state is RequestState.TOOL_CALLING:
                assert parsed is not None
                await self._call_tools(request, parsed, instances, deadlines)
            elif deadlines.trajectory_expired:
                if not request.turns:
                    raise InfraFault("The trajectory's deadline passed before its first generation.")
                request.finish(FinishReason.DEADLINE)
            else:
                known_turns = len(request.turns)
                turn = await self._generator.generate_turn(request, deadlines)
                self.progress.add_turns(request.turns[known_turns:])
                if turn is not None:
                    parsed = turn.parsed
                    request.messages.append(turn.message)
                    self._finish_or_call_tools(request, turn)

    def _deadlines(self, request: AsyncRolloutRequest) -> Deadlines:
        limits = request.limits
        if self._replay is not None and self._replay.engine:  # the record states which deadlines passed
            limits = limits.model_copy(update={"turn_timeout": math.inf, "trajectory_timeout": math.inf})
        return Deadlines(limits, self._pause)

    def _finish_or_call_tools(self, request: AsyncRolloutRequest, turn: GeneratedTurn) -> None:
        if not turn.in_time:
            request.finish(FinishReason.DEADLINE)
        elif turn.finish is not FinishType.STOP:
            request.finish(FinishReason.LENGTH if turn.finish is FinishType.LENGTH else FinishReason.ABORTED)
        elif not turn.parsed.calls:
            request.finish(FinishReason.STOP)
        elif request.turn + 1 >= request.limits.max_assistant_turns:
            request.finish(FinishReason.MAX_TURNS)
        else:
            request.transition_to(RequestState.TOOL_CALLING)

    async def _call_tools(
        self, request: AsyncRolloutRequest, parsed: ParsedTurn, instances: ToolInstances, deadlines: Deadlines
    ) -> None:
        calls = plan_tool_calls(parsed, self.tools, request.limits, request.calls_made)
        request.calls_made += sum(call.problem is None for call in calls)
        records = await self._executor.execute_all(request, calls, instances, deadlines)
        request.calls += records
        self.progress.calls += len(records)
        infra_fault = next((record for record in records if record.fault is Fault.INFRA), None)
        if infra_fault is not None:
            request.finish(FinishReason.INFRA, infra_fault.error)
            return
        if deadlines.remaining_s() <= 0:
            request.finish(FinishReason.DEADLINE)
            return
        responses = [
            Message(
                role="tool",
                content=image_content(record.images, record.answer),
                tool_call_id=call.id,
                name=call.name,
            )
            for call, record in zip(parsed.calls, records, strict=True)
        ]
        if any(record.metrics.get("stop") is True for record in records):
            request.finish(FinishReason.TOOL_STOP)
        else:
            self._generator.append_tool_responses(request, responses)
        request.messages += responses

    def _is_reproduced(self, request: AsyncRolloutRequest, failure: Exception | None) -> bool:
        """Return True if another attempt would repeat an infra fault that occurred before scoring."""
        if self._replay is None:
            return False
        if self._replay.engine or isinstance(failure, ReplayMiss):
            return True
        return self._replay.on_miss == "error" and any(call.fault is Fault.INFRA for call in request.calls)

    async def _score(self, trajectory: Trajectory, timeout_s: float) -> InfraFault | None:
        """Add the results of the reward functions. Return the fault if they failed."""
        try:
            functions = await self.rewards.score(trajectory, timeout_s) if self.rewards.functions else {}
            rewards = replace(trajectory.rewards, functions=functions)
            trajectory.rewards = replace(rewards, total=self.rewards.total(rewards))
        except InfraFault as error:
            trajectory.outcome, trajectory.error = "infra", str(error)
            return error
        return None

    def _make_trajectory(self, request: AsyncRolloutRequest, rewards: Rewards, seconds: float) -> Trajectory:
        assert request.finish_reason is not None
        is_infra = request.finish_reason in INFRA_FINISH_REASONS or not rewards.has_tool_rewards
        return Trajectory(
            request_id=request.request_id,
            group=request.group,
            sample=request.sample,
            messages=request.messages,
            tokens=request.tokens,
            earlier=request.earlier,
            finish_reason=request.finish_reason,
            outcome="infra" if is_infra else "ok",
            error=request.error,
            exhausted_budget=request.exhausted_budget,
            fidelity=request.fidelity,
            logprobs_mode=self._generator.logprobs_mode if request.tokens.has_logprobs else None,
            rewards=rewards,
            turns=request.turns,
            calls=request.calls,
            started_at=time.time() - seconds,
            tool_versions=self._tool_versions,
            seconds=seconds,
            extra=request.extra,
        )

    def _warn_once(self, trajectory: Trajectory, cause: BaseException | None) -> None:
        """Log the error of a trajectory, with the traceback of its cause, unless a similar one was logged."""
        error = trajectory.error or str(trajectory.finish_reason)
        kind = re.sub(r"[0-9a-f]{4,}|\d+", "#", error)[:80]  # ignores ids and numbers
        if kind not in self._logged_errors and len(self._logged_errors) < MAX_DISTINCT_WARNINGS:
            self._logged_errors.add(kind)
            logger.warning("trajectory excluded from the loss: %s", error, exc_info=cause)

    def _tool_instances(self, request: AsyncRolloutRequest) -> ToolInstances:
        kwargs = request.tool_kwargs
        # A replay that calls no tool creates none, because creating it may need the network.
        tools = {} if self._replay is not None and self._replay.on_miss == "error" else self.tools
        instances = {
            name: ToolInstance(
                tool,
                request.request_id,  # the same for all tools, so that several tools can share what a trajectory owns
                create_kwargs=kwargs(name, "create"),
                release_kwargs=kwargs(name, "release"),
            )
            for name, tool in tools.items()
        }
        return ToolInstances(instances, create_timeout_s=request.limits.call_timeout)


def _step_rewards(request: AsyncRolloutRequest) -> tuple[float, ...]:
    steps = [0.0] * (request.turn + 1)
    for call in request.calls:
        steps[call.turn] += call.reward or 0.0
    return tuple(steps)
