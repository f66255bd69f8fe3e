"""A session as a trajectory, which `RecordWriter` writes and the viewer shows.

Every call is a turn: the server does not see which calls the model made together, nor the rest of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolroll.errors import Fault
from toolroll.images import image_content
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import FunctionCall, Message, ToolCall


@dataclass(frozen=True)
class SessionInfo:
    """Facts about a session that its record contains."""

    request_id: str
    client: str | None
    """Name and version of the client."""
    create_kwargs: Mapping[str, Mapping[str, Any]]
    """Arguments of each tool's `create`."""


def session_trajectory(
    info: SessionInfo, records: Sequence[CallRecord], rewards: Mapping[str, float], error: str | None, seconds: float
) -> Trajectory:
    """Return the trajectory of a session.

    Args:
        info: Facts about the session.
        records: Its calls, each in a turn of its own.
        rewards: Result of each tool's `calc_reward`.
        error: Error of `calc_reward`, if it failed.
        seconds: Duration of the session.

    Returns:
        A trajectory without tokens. Its outcome is "infra" if a call had an infra fault, or `calc_reward` failed.
    """
    calls = sorted(records, key=lambda record: record.turn)
    error = error or next((call.error for call in calls if call.fault is Fault.INFRA), None)
    composed = Rewards(total=None, steps=tuple(call.reward or 0.0 for call in calls), tools=rewards)
    if error is None:
        composed = replace(composed, total=RewardRule().total(composed))
    timings = GenerationTimings(total=0.0)
    return Trajectory(
        request_id=info.request_id,
        group=info.request_id,
        sample=0,
        messages=[message for call in calls for message in _messages(call)],
        tokens=TokenStream([]),
        finish_reason=FinishReason.STOP if error is None else FinishReason.INFRA,
        outcome="ok" if error is None else "infra",
        error=error,
        fidelity=Fidelity.TEXT,
        logprobs_mode=None,
        rewards=composed,
        turns=[TurnRecord(turn=call.turn, tokens=0, finish="tool_calls", timings=timings) for call in calls],
        calls=calls,
        seconds=seconds,
        extra={"client": info.client, "create_kwargs": info.create_kwargs, **_ground_truth(info)},
    )


def _ground_truth(info: SessionInfo) -> dict[str, Any]:
    """Return the first ground truth that a tool got, which becomes `gts` of the record."""
    found = [kwargs["ground_truth"] for kwargs in info.create_kwargs.values() if "ground_truth" in kwargs]
    return {"ground_truth": found[0]} if found else {}


def _messages(call: CallRecord) -> list[Message]:
    """Return the messages of a call as the client may have shown them to its model."""
    call_id = f"call{call.turn}"
    function = FunctionCall(name=call.tool or "", arguments=call.arguments or {})
    answer = image_content(call.images, call.answer) if call.fault is Fault.POLICY or not call.error else call.error
    return [
        Message(role="assistant", content="", tool_calls=[ToolCall(id=call_id, function=function)]),
        Message(role="tool", content=answer, tool_call_id=call_id, name=call.tool),
    ]
