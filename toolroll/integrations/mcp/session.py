"""One client session: tool instances, and the calls that a client makes with them.

A session is a trajectory without an engine, because an external harness runs the conversation. Calls have the same
limits, timeouts and faults as in a rollout.

Invariants:

- The first call creates the instances of all tools. They are released exactly once, when the session ends.
- A call takes at most `call_timeout`, including the creation of the instances, and the time to cancel these.
- Running calls are cancelled before the instances are released, and no call starts afterwards.
- Ending a session takes at most the timeouts of cancelled calls, of a cancelled creation, of `calc_reward` and of a
  release.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from toolroll.errors import Fault, InfraFault
from toolroll.integrations.mcp.session_record import SessionInfo, session_trajectory
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn
from toolroll.rollout.instances import CREATE_CANCEL_TIMEOUT_S, ToolInstances
from toolroll.rollout.limits import Limits
from toolroll.rollout.pause import Deadlines, Pause
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.tool_execution import CALL_GRACE_PERIOD_S, ToolExecutor, plan_tool_calls, tool_rewards
from toolroll.rollout.trajectory import CallRecord, Trajectory
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.instance import RELEASE_TIMEOUT_S, ToolInstance

SESSION_REWARD_TIMEOUT_S = 10.0
"""Timeout for `calc_reward` of all tools at the end of a session."""
MAX_CREATE_SHARE = 0.1
"""Share of its timeout that a call may have waited for the instances. If it waited longer and then timed out, it is an
infra fault."""
CANCELLED = "The call was cancelled, by the client or because the session ended."


class ToolSession:
    """The tool instances and calls of one client.

    Args:
        tools: Tools that the client may call, by name.
        executor: Executes the calls.
        limits: Limits, of which `call_timeout` also applies to creating the instances.
        create_kwargs: Arguments of `BaseTool.create`, by tool name.
        client: Name and version of the client, for the record.
        is_recorded: Whether to keep the calls, and to score them when the session ends.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool[Any]],
        executor: ToolExecutor,
        limits: Limits,
        create_kwargs: Mapping[str, Mapping[str, Any]],
        client: str | None,
        *,
        is_recorded: bool,
    ) -> None:
        self._tools = tools
        self._executor = executor
        self._limits = limits
        self._deadline_limits = limits.model_copy(update={"turn_timeout": limits.call_timeout})
        tools_kwargs = {name: {"create_kwargs": kwargs} for name, kwargs in create_kwargs.items()}
        self._request = AsyncRolloutRequest(messages=[], limits=limits, tools_kwargs=tools_kwargs)
        self._info = SessionInfo(self._request.request_id, client, create_kwargs)
        self._is_recorded = is_recorded
        self._started = time.monotonic()
        self._instances: ToolInstances | None = None
        self._exit_stack = AsyncExitStack()
        self._create_lock = asyncio.Lock()
        self._running: set[asyncio.Task[CallRecord]] = set()
        self._records: list[CallRecord] = []
        self._calls_started = 0
        self._has_ended = False

    async def call(self, name: str, arguments: Mapping[str, Any] | None) -> CallRecord:
        """Execute a call. If the caller is cancelled, the call is cancelled as well.

        Args:
            name: Name of a tool.
            arguments: Arguments of the call.

        Returns:
            The answer for the model, or the fault. A cancelled call has an error without a fault.
        """
        task = asyncio.create_task(self._call(self._calls_started, _parse(name, arguments)))
        self._calls_started += 1
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            # A task, because anyio cancels the caller repeatedly, which would interrupt the clean-up of the call.
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result()

    async def end(self) -> Trajectory | None:
        """Cancel running calls and release the instances. Called once.

        Returns:
            The session as a trajectory, or None if there were no calls or the session is not recorded.
        """
        self._has_ended = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=2 * CALL_GRACE_PERIOD_S)
        with suppress(TimeoutError):  # until a creation that was cancelled has released its instances
            async with asyncio.timeout(CREATE_CANCEL_TIMEOUT_S + RELEASE_TIMEOUT_S), self._create_lock:
                pass
        rewards: dict[str, float] = {}
        error: str | None = None
        if self._is_recorded and self._instances is not None:
            try:
                async with asyncio.timeout(SESSION_REWARD_TIMEOUT_S):
                    rewards = await tool_rewards(self._request, self._instances)
            except (InfraFault, TimeoutError) as failure:
                error = str(failure) or f"calc_reward timed out after {SESSION_REWARD_TIMEOUT_S:g} s."
        await self._exit_stack.aclose()
        if not self._records:
            return None
        return session_trajectory(self._info, self._records, rewards, error, time.monotonic() - self._started)

    async def _call(self, turn: int, call: ParsedCall) -> CallRecord:
        started = time.monotonic()
        record = CallRecord(turn=turn, tool=call.name, arguments=call.arguments, answer="", error=CANCELLED)
        [planned] = plan_tool_calls(ParsedTurn("", calls=(call,)), self._tools, self._limits, 0)
        try:
            if not self._has_ended:
                deadlines = Deadlines(self._deadline_limits, Pause())
                instances = await self._open_in_time()
                waited_s = time.monotonic() - started
                [executed] = await self._executor.execute_all(self._request, [planned], instances, deadlines)
                if executed.fault is Fault.POLICY and deadlines.remaining_s() <= 0:
                    self._check_wait(waited_s)
                record = replace(executed, turn=turn)
        except InfraFault as error:
            record = replace(record, fault=Fault.INFRA, error=str(error), seconds=time.monotonic() - started)
        except asyncio.CancelledError:
            record = replace(record, seconds=time.monotonic() - started)
        if self._is_recorded:
            self._records.append(record)
        return record

    async def _open_in_time(self) -> ToolInstances:
        timeout_s = self._limits.call_timeout
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open_instances()
        except TimeoutError:
            raise InfraFault(f"Creating the tools timed out after {timeout_s:g} s.") from None

    def _check_wait(self, waited_s: float) -> None:
        """Raise InfraFault if a call that timed out had too little time left after the creation of the instances."""
        timeout_s = self._limits.call_timeout
        if waited_s > MAX_CREATE_SHARE * timeout_s:
            wait = f"creating the tools took {waited_s:.2f} s of its {timeout_s:g} s"
            raise InfraFault(f"The call started too late: {wait}.")

    async def _open_instances(self) -> ToolInstances:
        """Return the instances, creating them if necessary. A creation that failed is tried again by the next call."""
        async with self._create_lock:
            if self._instances is None:
                instance_id = uuid4().hex  # the same for all tools, so that they can share what the session owns
                instances = {
                    name: ToolInstance(tool, instance_id, create_kwargs=self._request.tool_kwargs(name, "create"))
                    for name, tool in self._tools.items()
                }
                opening = ToolInstances(instances, create_timeout_s=self._limits.call_timeout)
                self._instances = await self._exit_stack.enter_async_context(opening)
            return self._instances


def _parse(name: str, arguments: Mapping[str, Any] | None) -> ParsedCall:
    """Check a call like one that a model wrote: JSON may be nested too deeply or contain lone surrogates."""
    given = dict(arguments or {})
    raw = ""
    with suppress(RecursionError):
        raw = json.dumps(given)
    return ParsedCall.check(name, given, raw)
