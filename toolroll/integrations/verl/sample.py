"""What verl gets of a trajectory: token rows, fields beside them, and whether it is to learn from it at all.

A row is split where the data set's prompt ends. Where a template wrote an earlier turn anew, there are several rows,
each exact; what was written anew of earlier turns is part of the response then, and masked. Pure, and knows nothing of
verl's classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from toolroll.errors import Fault
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Row:
    """One sequence of tokens, as verl has it. Response, mask and log-probabilities are of one length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None


def why_left_out(trajectory: Trajectory, *, scored: bool = False) -> str | None:
    """Why there is nothing to learn from a trajectory; None where there is.

    `scored`: whether the trajectory's own total is to be its score.
    """
    if trajectory.outcome == "infra":
        return trajectory.error or f"it ended as {trajectory.finish_reason}"
    if not any(any(stream.mask) for stream in _streams(trajectory)):
        return trajectory.error or f"the model had written nothing when it ended ({trajectory.finish_reason})"
    if scored and trajectory.rewards.total is None:
        return "the reward function could not say what it is worth"
    return None


def rows_of(trajectory: Trajectory, *, response_length: int, logprobs: bool) -> list[Row]:
    """All rows, the last one last. A tool's answer that didn't fit any more is cut off."""
    streams = _streams(trajectory)
    begin = streams[0].prompt_length
    return [_row(stream, min(begin, stream.prompt_length), response_length, logprobs) for stream in streams]


def masked_row(trajectory: Trajectory, *, prompt_length: int, response_length: int, logprobs: bool, filler: int) -> Row:
    """The last row, with nothing to learn from in it. None of its parts is empty: verl can't pad what isn't there."""
    row = rows_of(trajectory, response_length=response_length, logprobs=logprobs)[-1]
    response = row.response_ids or [filler]
    zeros = [0.0] * len(response)
    return Row(
        prompt_ids=row.prompt_ids[-prompt_length:] or [filler],
        response_ids=response,
        response_mask=[0] * len(response),
        response_logprobs=(row.response_logprobs or zeros) if logprobs else None,
    )


def fields_of(trajectory: Trajectory, left_out: str | None) -> dict[str, Any]:
    """What a reward function finds in `extra_info`, and a trainer in the batch."""
    rewards, calls = trajectory.rewards, trajectory.calls
    return {
        "turn_scores": list(rewards.steps),
        "tool_rewards": [call.reward for call in calls if call.reward is not None],
        "toolroll": {
            "request_id": trajectory.request_id,
            "left_out": left_out,
            "finish_reason": str(trajectory.finish_reason),
            "outcome": trajectory.outcome,
            "fidelity": str(trajectory.fidelity),
            "tools": dict(rewards.tools),
            "total": rewards.total,
            "calls": len(calls),
            "policy_faults": sum(call.fault is Fault.POLICY for call in calls),
            "infra_faults": sum(call.fault is Fault.INFRA for call in calls),
            "seconds": trajectory.seconds,
        },
    }


def turns_of(trajectory: Trajectory, prompt_messages: int) -> int:
    """As verl counts them: the user's, each of the model's, and the tools' after it."""
    return 1 + len(list(groupby(message.role for message in trajectory.messages[prompt_messages:])))


def seconds_of(trajectory: Trajectory) -> tuple[float, float]:
    """Spent by the servers, and by the tools: of calls that ran at once, the longest."""
    generating = sum(turn.timings.total for turn in trajectory.turns)
    by_turn = groupby(trajectory.calls, lambda call: call.turn)
    return generating, sum(max(call.seconds for call in calls) for _, calls in by_turn)


def clean_kwargs(tools_kwargs: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """A row's `tools_kwargs` without what Parquet put in: it gives every row the keys of all rows, as None."""
    return {
        tool: {kind: dict(values) for kind, values in kinds.items() if values is not None}
        for tool, kinds in (tools_kwargs or {}).items()
        if kinds is not None
    }


def _streams(trajectory: Trajectory) -> Sequence[TokenStream]:
    return [*trajectory.earlier, trajectory.tokens]


def _row(stream: TokenStream, begin: int, longest: int, logprobs: bool) -> Row:
    end = begin + longest
    return Row(
        prompt_ids=stream.ids[:begin].tolist(),
        response_ids=stream.ids[begin:end].tolist(),
        response_mask=list(stream.mask[begin:end]),
        response_logprobs=stream.logprobs[begin:end].tolist() if logprobs else None,
    )
