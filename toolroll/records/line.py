"""The line of a trajectory: what is written of it, under which names.

verl's keys come first, so that verl's own tools read it: `input, output, gts, score, step`, and `uid` as its newer
trainer has it. docs/records.md says what the others are, docs/records.schema.json in the words of JSON Schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolroll.records.conversation import text_of
from toolroll.records.packed import pack
from toolroll.records.record import FORMAT
from toolroll.schemas import Message

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

Decode = Callable[[Sequence[int]], str]
UNKNOWN: Any = object()
"""No ground truth was given: not the same as that there is none."""


def fields_of(
    trajectory: Trajectory, step: int, *, gts: Any = UNKNOWN, decode: Decode | None = None, tokens: bool = True
) -> dict[str, Any]:
    """What is written of a trajectory."""
    messages = [_message(message) for message in trajectory.messages]
    stream = trajectory.tokens
    if decode is not None and len(stream):
        prompt, answer = decode(stream.prompt_ids), decode(stream.response_ids)
    else:
        prompt, answer = text_of(messages, len({turn.turn for turn in trajectory.turns}))
    return {
        "input": prompt,
        "output": answer,
        "gts": ground_truth(trajectory.extra) if gts is UNKNOWN else gts,
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
        "seconds": trajectory.seconds,
        "rewards": trajectory.rewards,
        "turns": trajectory.turns,
        "calls": trajectory.calls,
        "messages": messages,
        "logprobs_of": trajectory.logprobs_of,
        "tokens": pack(stream) if tokens and len(stream) else None,
        "earlier": [pack(one) for one in trajectory.earlier] if tokens else [],
        "extra": trajectory.extra,
    }


def foreign_fields(fields: Mapping[str, Any], step: int, gts: Any = UNKNOWN) -> dict[str, Any]:
    """What is written of a sample that is no trajectory of ours: it, with all of verl's keys."""
    if gts is not UNKNOWN:
        fields = {**fields, "gts": gts}
    return {"input": "", "output": "", "gts": None, "score": None, **fields, "step": step}


def ground_truth(extra: Mapping[str, Any]) -> Any:
    """Of a prompt's row: as we name it, or as verl's rows do."""
    if "ground_truth" in extra:
        return extra["ground_truth"]
    model = extra.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _message(message: Message) -> dict[str, Any]:
    """A message without what it doesn't say. `Message.model_validate` gives it back."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls is not None:
        fields["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return {**fields, **(message.model_extra or {})}
