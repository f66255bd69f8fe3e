"""Fields of a record line.

verl's keys come first, so that verl's own tools can read the file: `input, output, gts, score, step`, and `uid` as in
its newer trainer. docs/records.md describes the other fields, docs/records.schema.json is their JSON Schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolroll.records.conversation import format_messages
from toolroll.records.packed_tokens import pack
from toolroll.records.record import FORMAT
from toolroll.schemas import Message

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

Decode = Callable[[Sequence[int]], str]
NOT_GIVEN: Any = object()
"""Default of `gts`. Differs from None, which is a valid ground truth."""


def trajectory_fields(
    trajectory: Trajectory, step: int, *, gts: Any = NOT_GIVEN, decode: Decode | None = None, tokens: bool = True
) -> dict[str, Any]:
    """Return the fields of a trajectory's line."""
    messages = [_message_fields(message) for message in trajectory.messages]
    stream = trajectory.tokens
    if decode is not None and len(stream):
        prompt, response = decode(stream.prompt_ids), decode(stream.response_ids)
    else:
        prompt, response = format_messages(messages, len({turn.turn for turn in trajectory.turns}))
    return {
        "input": prompt,
        "output": response,
        "gts": ground_truth(trajectory.extra) if gts is NOT_GIVEN else gts,
        "score": trajectory.rewards.total,
        "step": step,
        "uid": f"{trajectory.group}_{trajectory.sample}_0",
        "format": FORMAT,
        "written_at": time.time(),
        "request_id": trajectory.request_id,
        "group": trajectory.group,
        "sample": trajectory.sample,
        "finish_reason": trajectory.finish_reason,
        "outcome": trajectory.outcome,
        "error": trajectory.error,
        "fidelity": trajectory.fidelity,
        "started_at": trajectory.started_at,
        "seconds": trajectory.seconds,
        "rewards": trajectory.rewards,
        "turns": trajectory.turns,
        "calls": trajectory.calls,
        "tool_versions": trajectory.tool_versions,
        "messages": messages,
        "logprobs_mode": trajectory.logprobs_mode,
        "tokens": pack(stream) if tokens and len(stream) else None,
        "earlier": [pack(earlier) for earlier in trajectory.earlier] if tokens else [],
        "extra": trajectory.extra,
    }


def mapping_fields(fields: Mapping[str, Any], step: int, gts: Any = NOT_GIVEN) -> dict[str, Any]:
    """Return the fields of a line for a sample that is not a Trajectory, with all keys that verl writes."""
    if gts is not NOT_GIVEN:
        fields = {**fields, "gts": gts}
    return {"input": "", "output": "", "gts": None, "score": None, **fields, "step": step}


def ground_truth(extra: Mapping[str, Any]) -> Any:
    """Return the ground truth of a prompt row: `ground_truth`, or `reward_model.ground_truth` as in verl's rows."""
    if "ground_truth" in extra:
        return extra["ground_truth"]
    model = extra.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _message_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message that are set. `Message.model_validate` restores it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning_content", "tool_calls", "tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            fields[name] = [call.model_dump() for call in value] if name == "tool_calls" else value
    return {**fields, **(message.model_extra or {})}
