"""Conversion of a trajectory to the token rows and fields that verl expects.

A row is split at the end of the dataset's prompt. If the conversation was re-rendered, there are several rows, each
exact; the re-rendered turns are part of the response and masked. A part without sampled tokens is not a row: verl reads
the advantage of a sample off the last row's sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from toolroll.images import Image
from toolroll.integrations.summary import exclusion_reason, parts_with_samples, summary_fields
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class TokenRow:
    """One token sequence in verl's form. Response, mask and log-probabilities have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    part: int = 0
    """Index of the part of the trajectory, from 0."""
    images: tuple[Image, ...] = ()
    """Images whose tokens the row contains."""


def left_out_reason(trajectory: Trajectory, *, needs_reward: bool = False) -> str | None:
    """Return the reason why a trajectory is excluded from the loss, or None if it is not.

    Args:
        trajectory: The trajectory.
        needs_reward: Whether the agent loop computes the score.
    """
    return exclusion_reason(trajectory, parts_with_samples(trajectory), needs_reward=needs_reward)


def token_rows(trajectory: Trajectory, *, response_length: int, logprobs: bool) -> list[TokenRow]:
    """Return the rows with sampled tokens in order, or the last row if there are none.

    Tool responses that exceed `response_length` are truncated. An image that would be cut is left out.

    Args:
        trajectory: The trajectory.
        response_length: Maximum length of a response.
        logprobs: Whether to include log-probabilities.
    """
    streams = [*trajectory.earlier, trajectory.tokens]
    prompt_end = streams[0].prompt_length
    rows = [
        _row(stream, min(prompt_end, stream.prompt_length), response_length, logprobs, part)
        for part, stream in enumerate(streams)
    ]
    return [row for row in rows if any(row.response_mask)] or rows[-1:]


def masked_row(row: TokenRow, *, prompt_length: int, filler: int) -> TokenRow:
    """Return a row with all tokens masked. No part of it is empty, because verl cannot pad empty sequences.

    A row with images is replaced by fillers: the tokens of an image make no sense without it.

    Args:
        row: The row.
        prompt_length: Maximum length of a prompt.
        filler: Token id that replaces an empty prompt or response.
    """
    if row.images:
        row = TokenRow([], [], [], None if row.response_logprobs is None else [], row.part)
    response = row.response_ids or [filler]
    logprobs = None if row.response_logprobs is None else row.response_logprobs or [0.0]
    prompt = row.prompt_ids[-prompt_length:] or [filler]
    return TokenRow(prompt, response, [0] * len(response), logprobs, row.part)


def sample_fields(trajectory: Trajectory, left_out: str | None, lost_tokens: float = 0.0) -> dict[str, Any]:
    """Return the fields that reward functions receive in `extra_info` and trainers in the batch.

    Args:
        trajectory: The trajectory.
        left_out: Reason why the trajectory is excluded, or None.
        lost_tokens: Fraction of the sampled tokens that the trainer does not receive.
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
            "lost_tokens": lost_tokens,
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


def _row(stream: TokenStream, prompt_end: int, response_length: int, logprobs: bool, part: int) -> TokenRow:
    end = min(len(stream), prompt_end + response_length)
    for span in stream.images:
        if span.start <= end < span.end:
            end = span.start - 1  # the token before marks the start of an image
    return TokenRow(
        prompt_ids=stream.ids[:prompt_end].tolist(),
        response_ids=stream.ids[prompt_end:end].tolist(),
        response_mask=list(stream.mask[prompt_end:end]),
        response_logprobs=stream.logprobs[prompt_end:end].tolist() if logprobs else None,
        part=part,
        images=tuple(span.image for span in stream.images if span.end <= end),
    )
