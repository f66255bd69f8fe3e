"""Answer tool calls from a recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolroll.errors import Fault, ReplayMiss
from toolroll.rollout.chat.parsed_turn import ParsedCall
from toolroll.rollout.instances import ToolInstances
from toolroll.rollout.pause import Deadlines
from toolroll.rollout.replay.recording import RecordedTrajectory, Replay
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.rollout.tool_execution import ToolExecutor
from toolroll.rollout.trajectory import CallRecord, FinishReason
from toolroll.tools.base_tool import BaseTool


class ReplayExecutor(ToolExecutor):
    """Executes tool calls by their records.

    Args:
        replay: The recording.
        tools: The tools, by name.
        *args: Further arguments of `ToolExecutor`.
    """

    def __init__(self, replay: Replay, tools: dict[str, BaseTool[Any]], *args: Any) -> None:
        super().__init__(tools, *args)
        self._replay = replay
        self._tools = tools

    async def execute_all(
        self, request: AsyncRolloutRequest, calls: list[ParsedCall], instances: ToolInstances, deadlines: Deadlines
    ) -> list[CallRecord]:
        """Answer the calls of a turn. If the deadline passed during the recorded calls, it has passed again."""
        records = await super().execute_all(request, calls, instances, deadlines)
        recorded = self._replay.recorded(request.request_id)
        if recorded is not None and self._replay.engine and _deadline_passed(recorded, request.turn):
            deadlines.expire()
        return records

    async def tool_rewards(self, request: AsyncRolloutRequest, instances: ToolInstances) -> dict[str, float]:
        """Return the recorded rewards of the tools, if the calls and the tools are those that were recorded.

        Raises:
            ReplayMiss: If the trajectory ended before the recorded one, which has no rewards, or if other calls were
                made or a tool has changed, so that its reward is unknown.
        """
        recorded = self._replay.recorded(request.request_id)
        generations = () if recorded is None else recorded.generations or ()
        if recorded is not None and self._replay.engine and len(request.turns) != len(generations):
            raise ReplayMiss(
                f"The replay ended after {len(request.turns)} of {len(generations)} recorded generations "
                f"({request.finish_reason}): the limits or the parsing of tool calls have changed."
            )
        known: dict[str, float] = {}
        if recorded is not None and list(map(_identity, request.calls)) == list(map(_identity, recorded.calls)):
            if not recorded.is_scored:
                raise ReplayMiss(recorded.error or "The recorded trajectory has no rewards.")
            known = {
                name: recorded.tool_rewards[name]
                for name, tool in self._tools.items()
                if name in recorded.tool_rewards and recorded.has_tool(name, tool.fingerprint)
            }
        unknown = [name for name in self._tools if name not in known]
        if unknown and self._replay.on_miss == "call":
            return await super().tool_rewards(request, instances)
        if rewarding := [name for name in unknown if _has_reward(self._tools[name])]:
            names = ", ".join(map(repr, rewarding))
            raise ReplayMiss(f"No recorded reward of {names}: the tool, or a call, differs from the recorded one.")
        return {name: known.get(name, 0.0) for name in self._tools}

    async def _execute(
        self, request: AsyncRolloutRequest, index: int, call: ParsedCall, instances: ToolInstances, deadlines: Deadlines
    ) -> CallRecord:
        recorded = self._replay.recorded(request.request_id)
        try:
            if recorded is None:
                raise ReplayMiss("The sample was not recorded.")
            tool = self._tools.get(call.name or "")
            version = None if tool is None else tool.fingerprint
            found = recorded.find_call(request.turn, index, call.name, call.arguments, version)
            return replace(found, metrics={**found.metrics, "replayed": True})
        except ReplayMiss as miss:
            if call.problem is not None or self._replay.on_miss == "call":
                return await super()._execute(request, index, call, instances, deadlines)
            fields: dict[str, Any] = {"turn": request.turn, "tool": call.name, "arguments": call.arguments}
            return CallRecord(**fields, answer="", fault=Fault.INFRA, error=str(miss))


def _deadline_passed(recorded: RecordedTrajectory, turn: int) -> bool:
    """Return True if the recorded trajectory ended during the calls of a turn."""
    is_last = all(one.turn <= turn for one in recorded.generations or ())
    return recorded.finish_reason is FinishReason.DEADLINE and is_last and not recorded.ends_with_responses


def _has_reward(tool: BaseTool[Any]) -> bool:
    return type(tool).calc_reward is not BaseTool.calc_reward


def _identity(call: CallRecord) -> tuple[Any, ...]:
    return call.turn, call.tool, call.arguments, call.answer, call.reward
