"""Conversion of a trajectory to the token rows and fields that verl expects.

A row is split at the end of the dataset's prompt. If the conversation was re-rendered, there are several rows, each
exact; the re-rendered turns are part of the response and masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from toolroll.integrations.summary import exclusion_reason, summary_fields
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class TokenRow:
    """One token sequence in verl's form. Response, mask and log-probabilities have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None


def left_out_reason(trajectory: Trajectory, *, needs_reward: bool = False) -> str | None:
    """Return the reason why a trajectory is excluded from the loss, or None if it is not.

    Args:
        trajectory: The trajectory.
        needs_reward: Whether the agent loop computes the score.
    """
    return exclusion_reason(trajectory, _streams(trajectory), needs_reward=needs_reward)


def token_rows(trajectory: Trajectory, *, response_length: int, logprobs: bool) -> list[TokenRow]:
    """Return all rows in order. Tool responses that exceed `response_length` are truncated.

    Args:
        trajectory: The trajectory.
        response_length: Maximum length of a response.
        logprobs: Whether to include log-probabilities.
    """
    streams = _streams(trajectory)
    prompt_end = streams[0].prompt_length
    return [_row(stream, min(prompt_end, stream.prompt_length), response_length, logprobs) for stream in streams]


def masked_row(row: TokenRow, *, prompt_length: int, filler: int) -> TokenRow:
    """Return a row with all tokens masked. No part of it is empty, because verl cannot pad empty sequences.

    Args:
        row: The row.
        prompt_length: Maximum length of a prompt.
        filler: Token id that replaces an empty prompt or response.
    """
    response = row.response_ids or [filler]
    logprobs = None if row.response_logprobs is None else row.response_logprobs or [0.0]
    return TokenRow(row.prompt_ids[-prompt_length:] or [filler], response, [0] * len(response), logprobs)


def sample_fields(trajectory: Trajectory, left_out: str | None) -> dict[str, Any]:
    """Return the fields that reward functions receive in `extra_info` and trainers in the batch.

    Args:
        trajectory: The trajectory.
        left_out: Reason why the trajectory is excluded, or None.
    """
    rewards = trajectory.rewards
    return {
        "turn_scores": list(rewards.steps),
        "tool_rewards": [call.reward for call in trajectory.calls if call.reward is not None],
        "toolroll": {
            **summary_fields(trajectory, left_out),
            "request_id": trajectory.request_id,
            "outcome": trajectory.outcome,
            "fidelity": str(trajectory.fidelity),
            "tools": dict(rewards.tools),
            "total": rewards.total,
        },
    }


def count_turns(trajectory: Trajectory, prompt_messages: int) -> int:
    """Return the number of turns as verl counts them: one for the prompt, and one for each change of role after it.

    Args:
        trajectory: The trajectory.
        prompt_messages: Number of messages in the prompt.
    """
    return 1 + len(list(groupby(message.role for message in trajectory.messages[prompt_messages:])))


def generation_and_tool_seconds(trajectory: Trajectory) -> tuple[float, float]:
    """Return the time spent by the servers and by the tools. Of concurrent calls, the longest counts."""
    generation = sum(turn.timings.total for turn in trajectory.turns)
    by_turn = groupby(trajectory.calls, lambda call: call.turn)
    return generation, sum(max(call.seconds for call in calls) for _, calls in by_turn)


def without_null_kwargs(tools_kwargs: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return a row's `tools_kwargs` without nulls, which Parquet adds to rows that lack a key."""
    return {
        tool: {kind: dict(values) for kind, values in kinds.items() if values is not None}
        for tool, kinds in (tools_kwargs or {}).items()
        if kinds is not None
    }


def _streams(trajectory: Trajectory) -> list[TokenStream]:
    return [*trajectory.earlier, trajectory.tokens]


def _row(stream: TokenStream, prompt_end: int, response_length: int, logprobs: bool) -> TokenRow:
    end = prompt_end + response_length
    return TokenRow(
        prompt_ids=stream.ids[:prompt_end].tolist(),
        response_ids=stream.ids[prompt_end:end].tolist(),
        response_mask=list(stream.mask[prompt_end:end]),
        response_logprobs=stream.logprobs[prompt_end:end].tolist() if logprobs else None,
    )
