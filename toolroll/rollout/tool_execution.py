"""Execute the tool calls of a turn and collect the tools' rewards, within the trajectory's deadlines.

Invariants:

- Every call is answered, including calls that cannot be parsed, calls to unknown tools and surplus calls.
- Policy faults become an answer that the model reads. Infra faults are recorded and never shown to the model.
- A tool that ignores its timeout and its cancellation delays the trajectory by at most three `CALL_GRACE_PERIOD_S`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from traceback import extract_tb
from typing import Any, TypeVar

from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import (
    BudgetExhausted,
    ConfigError,
    Fault,
    InfraFault,
    InvalidArguments,
    PolicyFault,
    ToolContractError,
    ToolrollError,
    UserCodeError,
    unknown_name,
)
from toolroll.images import Image
from toolroll.limiter.limited import within_deadline
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn
from toolroll.rollout.instances import ToolInstances
from toolroll.rollout.limits import Limits
from toolroll.rollout.pause import Deadlines
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.trajectory import CallRecord
from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import BaseTool
from toolroll.tracing.context import enter_call

logger = logging.getLogger(__name__)

T = TypeVar("T")
Truncate = Callable[[str, AsyncRolloutRequest], str]

MAX_LOGGED_PLACES = 20
"""Maximum number of lines of tools whose exceptions are logged."""
CALL_GRACE_PERIOD_S = 1.0
"""Time after its deadline in which a tool may still return a result, and in which a cancelled one must end."""


def plan_tool_calls(parsed: ParsedTurn, tools: Mapping[str, Any], limits: Limits, calls_made: int) -> list[ParsedCall]:
    """Return the calls of a turn. Those that are not executed have a `problem`, the answer to the model. Pure function.

    Args:
        parsed: The turn.
        tools: The available tools, by name.
        limits: Limits of the trajectory.
        calls_made: Number of calls that were executed in earlier turns.
    """
    calls: list[ParsedCall] = []
    accepted = 0
    for call in parsed.calls:
        problem = _find_problem(call, tools)
        refusal = None if problem else _exceeded_limit(limits, accepted, calls_made)
        calls.append(replace(call, problem=problem or refusal, over_limit=refusal is not None))
        accepted += calls[-1].problem is None
    if parsed.dropped_calls:
        note = f"The {parsed.dropped_calls} calls after this one were not executed."
        problem = calls[-1].problem
        calls[-1] = replace(calls[-1], problem=f"{problem} {note}" if problem else note)
    return calls


def _find_problem(call: ParsedCall, tools: Mapping[str, Any]) -> str | None:
    if call.problem is not None:
        return call.problem
    if call.name is None or call.name not in tools:
        return unknown_name("tool", call.name or "", tools)
    return None


def _exceeded_limit(limits: Limits, accepted: int, calls_made: int) -> str | None:
    if limits.max_tool_calls is not None and calls_made + accepted >= limits.max_tool_calls:
        return f"This call was not executed. At most {limits.max_tool_calls} tool calls are allowed per conversation."
    if accepted >= limits.max_parallel_calls:
        return (
            f"This call was not executed. At most {limits.max_parallel_calls} tool calls are allowed per turn. "
            "Repeat it in your next turn."
        )
    return None


class ToolExecutor:
    """Executes tool calls for all trajectories of a rollout.

    Args:
        tools: The tools, by name.
        truncate: Function that shortens the text of a tool response to the limits of a request.
        read_image: Function that reads an image of a response.
    """

    def __init__(
        self, tools: Mapping[str, BaseTool[Any]], truncate: Truncate, read_image: Callable[[Any], Image]
    ) -> None:
        self._truncate = truncate
        self._read_image = read_image
        self._logged_places: set[tuple[object, ...]] = set()
        self._accepting_deadline = {name for name, tool in tools.items() if _accepts_deadline(tool)}

    async def execute_all(
        self, request: AsyncRolloutRequest, calls: list[ParsedCall], instances: ToolInstances, deadlines: Deadlines
    ) -> list[CallRecord]:
        """Execute the calls of a turn concurrently, until all have ended, time is up or one has an infra fault.

        Returns:
            The record of each call.
        """
        started = time.monotonic()
        timeout_s = min(deadlines.remaining_s(), request.limits.call_timeout) + 2 * CALL_GRACE_PERIOD_S
        tasks = [
            asyncio.ensure_future(self._execute(request, index, call, instances, deadlines))
            for index, call in enumerate(calls)
        ]
        await _wait_or_cancel(tasks, timeout_s, stop_when=lambda task: task.result().fault is Fault.INFRA)
        seconds = time.monotonic() - started
        text = f"The tool call was cancelled after {seconds:.1f} s."
        return [
            task.result() if task.done() and not task.cancelled() else _policy_fault(request, call, text, seconds)
            for task, call in zip(tasks, calls, strict=True)
        ]

    async def tool_rewards(self, request: AsyncRolloutRequest, instances: ToolInstances) -> dict[str, float]:
        """Return the result of each tool's `calc_reward`. See the function `tool_rewards`."""
        return await tool_rewards(request, instances)

    async def _execute(
        self, request: AsyncRolloutRequest, index: int, call: ParsedCall, instances: ToolInstances, deadlines: Deadlines
    ) -> CallRecord:
        if call.problem is not None:
            return _policy_fault(request, call, call.problem, malformed=not call.over_limit)
        assert call.name is not None
        enter_call(request.request_id, request.turn, index)
        started = time.monotonic()
        timeout_s = min(request.limits.call_timeout, deadlines.remaining_s())
        try:
            async with asyncio.timeout(timeout_s + CALL_GRACE_PERIOD_S) as limit:
                kwargs = dict(request.tool_kwargs(call.name, "execute"))
                if call.name in self._accepting_deadline:
                    kwargs["deadline"] = started + timeout_s
                with within_deadline(started + timeout_s):
                    result = await instances[call.name].execute(call.arguments, **kwargs)
                images = await self._read_images(call.name, result.response)
        except InfraFault as error:
            seconds = time.monotonic() - started
            if isinstance(error, BudgetExhausted):
                request.exhausted_budget = error.resource, error.unit
            return _record(request, call, "", seconds, fault=Fault.INFRA, error=str(error), metrics=error.metrics)
        except Exception as error:
            text = str(error) if isinstance(error, PolicyFault) else f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and limit.expired():
                text = f"The tool call timed out after {timeout_s:g} s."
            elif not isinstance(error, ToolrollError):
                self._log_once(call.name, error)
            answer = self._truncate(replace_lone_surrogates(text), request)
            metrics = dict(error.metrics) if isinstance(error, ToolrollError) else {}
            if isinstance(error, InvalidArguments):
                metrics["malformed"] = True
            seconds = time.monotonic() - started
            return _record(request, call, answer, seconds, fault=Fault.POLICY, error=answer, metrics=metrics)
        answer = self._truncate(replace_lone_surrogates(result.response.text or ""), request)
        seconds = time.monotonic() - started
        return _record(request, call, answer, seconds, reward=result.reward, metrics=result.metrics, images=images)

    def _log_once(self, tool: str, error: Exception) -> None:
        """Log an exception of a tool with its traceback, unless one from the same line was logged."""
        frames = extract_tb(error.__traceback__)
        place = tool, type(error).__name__, frames[-1].filename, frames[-1].lineno
        if place not in self._logged_places and len(self._logged_places) < MAX_LOGGED_PLACES:
            self._logged_places.add(place)
            logger.warning("tool %r raised an exception, which the model reads: %s", tool, error, exc_info=error)

    async def _read_images(self, tool: str, response: ToolResponse) -> tuple[Image, ...]:
        """Return the images of a response.

        Raises:
            ToolContractError: If the response has a video or an invalid image, or the model cannot see images.
            PolicyFault: If the model's image processor rejects the size of an image.
        """
        if response.video:
            raise ToolContractError(f"Tool {tool!r} returned a video. Only text and images are supported.")
        if not response.image:
            return ()
        try:
            # In a thread, because encoding a large image takes a second.
            return tuple([await asyncio.to_thread(self._read_image, image) for image in response.image])
        except ConfigError as error:
            raise ToolContractError(f"Tool {tool!r} returned an image. {error}") from error


async def tool_rewards(request: AsyncRolloutRequest, instances: ToolInstances) -> dict[str, float]:
    """Return the result of each tool's `calc_reward`, by tool name.

    Raises:
        UserCodeError: If `calc_reward` of a tool raises an exception.
        InfraFault: If it reports an infra fault, or takes longer than `call_timeout`.
    """
    tasks = {
        name: asyncio.create_task(instance.calc_reward(**request.tool_kwargs(name, "calc_reward")))
        for name, instance in instances.items()
    }
    timeout_s = request.limits.call_timeout
    pending = await _wait_or_cancel(list(tasks.values()), timeout_s)
    if pending:
        names = ", ".join(name for name, task in tasks.items() if task in pending)
        raise InfraFault(f"calc_reward timed out after {timeout_s:g} s: {names}.")
    for name, task in tasks.items():
        error = task.exception()
        if error is not None and not isinstance(error, InfraFault):
            raise UserCodeError.because(f"calc_reward of tool {name!r}", error) from error
    return {name: task.result() for name, task in tasks.items()}


async def _wait_or_cancel(
    tasks: Sequence[asyncio.Task[T]], timeout_s: float, stop_when: Callable[[asyncio.Task[T]], bool] | None = None
) -> set[asyncio.Task[T]]:
    """Wait until all tasks end, the timeout expires or `stop_when` is true of a task; cancel and return the others.

    Tasks that ignore the cancellation are left running.
    """
    deadline = time.monotonic() + timeout_s
    pending = set(tasks)
    try:
        while pending and (remaining_s := deadline - time.monotonic()) > 0:
            done, pending = await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            if stop_when is not None and any(map(stop_when, done)):
                break
    finally:
        for task in pending:
            task.cancel()
        if pending:
            _, still_running = await asyncio.wait(pending, timeout=CALL_GRACE_PERIOD_S)
            if still_running:
                logger.warning("%d tool calls ignore their cancellation and are left running", len(still_running))
    return pending


def _record(request: AsyncRolloutRequest, call: ParsedCall, answer: str, seconds: float, **fields: Any) -> CallRecord:
    return CallRecord(
        turn=request.turn,
        tool=call.name,
        arguments=call.arguments,
        answer=answer,
        start=time.monotonic() - request.started - seconds,
        seconds=seconds,
        **fields,
    )


def _policy_fault(
    request: AsyncRolloutRequest, call: ParsedCall, answer: str, seconds: float = 0.0, *, malformed: bool = False
) -> CallRecord:
    metrics = {"malformed": True} if malformed else {}
    return _record(request, call, answer, seconds, fault=Fault.POLICY, error=answer, metrics=metrics)


def _accepts_deadline(tool: BaseTool[Any]) -> bool:
    parameters = inspect.signature(tool.execute).parameters.values()
    return any(parameter.name == "deadline" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
