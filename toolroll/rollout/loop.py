"""The loop: carries a request through its states, and makes a trajectory of it.

It promises, whatever the model writes and whatever fails:

- It ends: with one of the finish reasons, or with the cancellation that it was given.
- Every tool instance that was created is released once, after the rewards (ToolInstance keeps that).
- Every call of the model's has an answer that it can learn from; the infrastructure's faults end the trajectory as
  "infra" and are never shown to the model.
- Deadlines nest, and travel with what is asked of engines and tools.

What may be written and when is the request's to say (request.py), which calls are carried out calling.py's, what is
earned reward.py's; here is the I/O between them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from toolroll.errors import Fault, InfraFault, PolicyFault, ToolContractError
from toolroll.rollout.calling import Planned, plan
from toolroll.rollout.clock import Clock
from toolroll.rollout.engines.engine import Finish
from toolroll.rollout.instances import Instances
from toolroll.rollout.pause import Pause
from toolroll.rollout.request import AsyncRolloutRequest, State
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.token_writer import call_id
from toolroll.rollout.trajectory import CallRecord, FinishReason, Rewards, Trajectory
from toolroll.rollout.writer import Writer, Written
from toolroll.sandbox.protocol import scrub_text
from toolroll.schemas import Message
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.instance import ToolInstance

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Parsed

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_THE_MODELS = (FinishReason.INFRA, FinishReason.ABORTED)
"""Ends that the model had no part in."""
WARNINGS = 20
"""Different failures that are logged as warnings."""
CALL_GRACE = 1.0
"""Seconds beyond its deadline in which a tool may say itself what came of it."""


class RolloutLoop:
    """What all trajectories of a rollout share: the side that writes, the tools, the rules."""

    def __init__(
        self, writer: Writer, tools: Sequence[BaseTool[Any]], pause: Pause, rewards: RewardRule | None = None
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.rewards = rewards or RewardRule()
        self._writer = writer
        self._pause = pause
        self._warned: set[str] = set()
        self._told_deadlines = {tool.name for tool in tools if _takes_deadline(tool)}

    async def run(self, request: AsyncRolloutRequest) -> Trajectory:
        """Carry a request to its end. Only a cancellation is raised."""
        began = time.monotonic()
        shares = {name: self._instance(request, tool) for name, tool in self.tools.items()}
        instances = Instances(shares, within=request.limits.call_timeout)
        rewards = Rewards(total=None)
        try:
            async with instances:
                await self._drive(request, instances, Clock(request.limits, self._pause))
                if request.finish_reason is not FinishReason.INFRA:
                    rewards = await self._earned(request, instances)
        except InfraFault as error:
            request.finish(FinishReason.INFRA)
            request.error = str(error)
        except Exception as error:
            logger.exception("request %s: a fault of the rollout's own", request.request_id)
            request.finish(FinishReason.INFRA)
            request.error = f"{type(error).__name__}: {error}"
        trajectory = self._trajectory(request, rewards, time.monotonic() - began)
        if trajectory.outcome == "ok":
            await self._score(trajectory, request.limits.turn_timeout)
        if trajectory.outcome == "infra":
            self._warn_once(trajectory)
        return trajectory

    async def _drive(self, request: AsyncRolloutRequest, instances: Instances, clock: Clock) -> None:
        await self._writer.begin(request)
        parsed: Parsed | None = None
        while request.state is not State.FINISHED:
            if request.state is State.TOOL_CALLING:
                assert parsed is not None
                await self._call_tools(request, parsed, instances, clock)
            elif clock.is_over:
                request.finish(FinishReason.DEADLINE)
            elif written := await self._writer.write(request, clock):
                parsed = written.parsed
                request.messages.append(written.message)
                self._after_turn(request, written)

    def _after_turn(self, request: AsyncRolloutRequest, written: Written) -> None:
        """Where the request goes from here."""
        if not written.in_time:
            request.finish(FinishReason.DEADLINE)
        elif written.finish is not Finish.STOP:
            request.finish(FinishReason.LENGTH if written.finish is Finish.LENGTH else FinishReason.ABORTED)
        elif not written.parsed.calls:
            request.finish(FinishReason.STOP)
        elif request.turn + 1 >= request.limits.max_assistant_turns:
            request.finish(FinishReason.MAX_TURNS)
        else:
            request.go(State.TOOL_CALLING)

    # The tools' turn

    async def _call_tools(
        self, request: AsyncRolloutRequest, parsed: Parsed, instances: Instances, clock: Clock
    ) -> None:
        """Carry the calls out, tell the model what came of each, and go on."""
        planned = plan(parsed, self.tools, request.limits, request.calls_made)
        request.calls_made += sum(one.refusal is None for one in planned)
        calls = [self._answer(request, one, instances, clock) for one in planned]
        began, most = time.monotonic(), request.limits.call_timeout + 2 * CALL_GRACE
        answered = await _all(calls, min(clock.left(), most))
        took = time.monotonic() - began
        records = [record or _cut_off(request, one, took) for one, record in zip(planned, answered, strict=True)]
        request.calls += records
        broken = next((record for record in records if record.fault is Fault.INFRA), None)
        if broken is not None:
            request.finish(FinishReason.INFRA, broken.error)
            return
        if None in answered and clock.left() <= 0:
            request.finish(FinishReason.DEADLINE)
            return
        answers = request.calls[-len(planned) :]
        new = [
            Message(role="tool", content=answer.answer, tool_call_id=call_id(call, request.turn, place), name=call.name)
            for place, (call, answer) in enumerate(zip(parsed.calls, answers, strict=True))
        ]
        if any(answer.metrics.get("stop") is True for answer in answers):
            request.finish(FinishReason.TOOL_STOP)
        else:
            self._writer.go_on(request, new)
        request.messages += new

    async def _answer(
        self, request: AsyncRolloutRequest, planned: Planned, instances: Instances, clock: Clock
    ) -> CallRecord:
        """One call, and what came of it. An infrastructure's fault is in the record, not raised."""
        call, limits = planned.call, request.limits
        record = partial(CallRecord, turn=request.turn, tool=call.name, arguments=call.arguments)
        if planned.refusal is not None:
            return record(answer=planned.refusal, fault=Fault.POLICY, error=planned.refusal)
        assert call.name is not None
        seconds = min(limits.call_timeout, clock.left())
        kwargs = dict(request.tools_kwargs.get(call.name, {}).get("execute_kwargs", {}))
        if call.name in self._told_deadlines:
            kwargs["deadline"] = time.monotonic() + seconds
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds + CALL_GRACE) as limit:
                result = await instances[call.name].execute(call.arguments, **kwargs)
            if result.response.image or result.response.video:
                raise ToolContractError(
                    f"Tool {call.name!r} answered with an image or a video: only text can be shown."
                )
        except InfraFault as error:
            took = time.monotonic() - began
            return record(answer="", fault=Fault.INFRA, error=str(error), seconds=took, metrics=error.metrics)
        except Exception as error:
            said = str(error) if isinstance(error, PolicyFault) else f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and limit.expired():
                said = f"The call took longer than {seconds:g} s and was given up."
            answer = self._writer.cut(scrub_text(said), request)
            return record(answer=answer, fault=Fault.POLICY, error=answer, seconds=time.monotonic() - began)
        return record(
            answer=self._writer.cut(scrub_text(result.response.text or ""), request),
            reward=result.reward,
            seconds=time.monotonic() - began,
            metrics=result.metrics,
        )

    # The end

    async def _earned(self, request: AsyncRolloutRequest, instances: Instances) -> Rewards:
        """What steps and tools give. A tool that can't say is the infrastructure's fault."""
        steps = [0.0] * (request.turn + 1)
        for call in request.calls:
            steps[call.turn] += call.reward or 0.0

        async def one(name: str, instance: ToolInstance) -> float:
            kwargs = request.tools_kwargs.get(name, {}).get("calc_reward_kwargs", {})
            return await instance.calc_reward(**kwargs)

        seconds = request.limits.call_timeout
        tasks = {name: asyncio.create_task(one(name, instance)) for name, instance in instances.items()}
        late = await _wait(list(tasks.values()), seconds)
        if late:
            names = ", ".join(name for name, task in tasks.items() if task in late)
            raise InfraFault(f"calc_reward took longer than {seconds:g} s: {names}.")
        given = {name: task.result() for name, task in tasks.items()}
        return Rewards(total=None, steps=tuple(steps), tools=given)

    async def _score(self, trajectory: Trajectory, seconds: float) -> None:
        """Add what the reward functions give, and the sum."""
        try:
            functions = await self.rewards.score(trajectory, seconds) if self.rewards.functions else {}
            rewards = replace(trajectory.rewards, functions=functions)
            trajectory.rewards = replace(rewards, total=self.rewards.total(rewards))
        except InfraFault as error:
            trajectory.outcome, trajectory.error = "infra", str(error)

    def _trajectory(self, request: AsyncRolloutRequest, rewards: Rewards, seconds: float) -> Trajectory:
        assert request.finish_reason is not None
        return Trajectory(
            request_id=request.request_id,
            group=request.group,
            sample=request.sample,
            messages=request.messages,
            tokens=request.tokens,
            earlier=request.earlier,
            finish_reason=request.finish_reason,
            outcome="infra" if request.finish_reason in NOT_THE_MODELS or not rewards.steps else "ok",
            error=request.error,
            fidelity=request.fidelity,
            logprobs_of=self._writer.logprobs_of if request.tokens.has_logprobs else None,
            rewards=rewards,
            turns=request.turns,
            calls=request.calls,
            seconds=seconds,
            extra=request.extra,
        )

    def _warn_once(self, trajectory: Trajectory) -> None:
        """Say what fails, without saying it for every trajectory."""
        error = trajectory.error or str(trajectory.finish_reason)
        kind = re.sub(r"[0-9a-f]{4,}|\d+", "#", error)[:80]  # the same but for ids and numbers
        if kind not in self._warned and len(self._warned) < WARNINGS:
            self._warned.add(kind)
            logger.warning("a trajectory is kept out of the loss: %s", error)

    def _instance(self, request: AsyncRolloutRequest, tool: BaseTool[Any]) -> ToolInstance:
        kwargs: Mapping[str, Any] = request.tools_kwargs.get(tool.name, {})
        return ToolInstance(
            tool, create_kwargs=kwargs.get("create_kwargs"), release_kwargs=kwargs.get("release_kwargs")
        )


def _cut_off(request: AsyncRolloutRequest, planned: Planned, seconds: float) -> CallRecord:
    """A call of which nothing came: there was no time, or another one of its turn failed."""
    said = f"The call was given up after {seconds:.1f} s."
    call = planned.call
    return CallRecord(
        turn=request.turn,
        tool=call.name,
        arguments=call.arguments,
        answer=said,
        fault=Fault.POLICY,
        error=said,
        seconds=seconds,
    )


async def _all(calls: Sequence[Coroutine[Any, Any, CallRecord]], seconds: float) -> list[CallRecord | None]:
    """What came of each call; None of one that the time was too short for. One that is broken ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await _wait(tasks, seconds, until=lambda task: task.result().fault is Fault.INFRA)
    return [task.result() if task.done() and not task.cancelled() else None for task in tasks]


async def _wait(
    tasks: Sequence[asyncio.Task[T]], seconds: float, until: Callable[[asyncio.Task[T]], bool] | None = None
) -> set[asyncio.Task[T]]:
    """Wait for tasks. Those that aren't done in time, or when `until` says so of another, are cancelled, and given.

    One that doesn't heed that is left to itself: a trajectory doesn't wait for it.
    """
    deadline = time.monotonic() + seconds
    pending = set(tasks)
    try:
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if until is not None and any(until(task) for task in done):
                break
    finally:
        for task in pending:
            task.cancel()
        if pending:
            _, deaf = await asyncio.wait(pending, timeout=CALL_GRACE)
            if deaf:
                logger.warning("%d calls of tools heed no cancellation, and are left to themselves", len(deaf))
    return pending


def _takes_deadline(tool: BaseTool[Any]) -> bool:
    """Whether a tool's `execute` can be told when its answer is due."""
    parameters = inspect.signature(tool.execute).parameters.values()
    return any(one.name == "deadline" or one.kind is one.VAR_KEYWORD for one in parameters)
