"""Conversion of trajectories to the batch that TRL expects from a rollout function.

Invariants:

- There is one row per prompt, in the order of the prompts. The row of an excluded trajectory is masked. No part of a
  row is empty, because TRL reads the last token of each.
- `completion_ids`, `env_mask` and `logprobs` of a row have the same length.
- If the conversation was re-rendered, the row contains the last sequence that the engine received. Tokens that were
  sampled before the re-rendering are part of its prompt and are not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.integrations.summary import exclusion_reason, summary_fields
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, Trajectory


def make_batch(trajectories: Sequence[Trajectory], fields: Sequence[Mapping[str, Any]], filler: int) -> dict[str, Any]:
    """Return the keys that TRL requires, and `toolroll` and `trajectory` for the reward functions.

    Args:
        trajectories: Trajectories in the order of the prompts.
        fields: Result of `sample_fields` for each trajectory.
        filler: Token id that replaces an empty prompt or completion.
    """
    kept = [one["left_out"] is None for one in fields]
    rows = [_row(one, keep=keep, filler=filler) for one, keep in zip(trajectories, kept, strict=True)]
    has_logprobs = all(one.tokens.has_logprobs for one, keep in zip(trajectories, kept, strict=True) if keep)
    prompts, completions, masks, logprobs = ([row[part] for row in rows] for part in range(4))
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "env_mask": masks,
        "logprobs": logprobs if has_logprobs else None,
        "toolroll": list(fields),
        "trajectory": list(trajectories),
    }


def _row(trajectory: Trajectory, *, keep: bool, filler: int) -> tuple[list[int], list[int], list[int], list[float]]:
    tokens = trajectory.tokens
    ids = tokens.response_ids or [filler]
    mask = tokens.response_mask if keep else [0] * len(ids)
    logprobs = tokens.response_logprobs or [0.0] * len(ids)
    return tokens.prompt_ids or [filler], ids, mask, logprobs


def sample_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a sample that reward functions receive under `toolroll`."""
    left_out = exclusion_reason(trajectory, [trajectory.tokens], needs_reward=True)
    calls = trajectory.calls
    return {
        **summary_fields(trajectory, left_out),
        "reward": None if left_out is not None else trajectory.rewards.total,
        "turns": len({turn.turn for turn in trajectory.turns}),
        "call_seconds": [call.seconds for call in calls],
        "queue_waits": [float(wait) for call in calls if (wait := call.metrics.get("queue_wait")) is not None],
        "rerendered": trajectory.fidelity is Fidelity.RERENDERED,
        "weights": _tokens_by_weight_version(trajectory),
    }


def _tokens_by_weight_version(trajectory: Trajectory) -> dict[str | None, int]:
    counts: Counter[str | None] = Counter()
    for span in trajectory.tokens.spans:
        if span.author is Author.MODEL:
            counts[span.weight_version] += span.end - span.start
    return dict(counts)
