"""Conversion of trajectories to the batch that TRL expects from a rollout function.

Invariants:

- There is one row per prompt, in the order of the prompts. The row of an excluded trajectory is masked. No part of a
  row is empty, because TRL reads the last token of each.
- `completion_ids`, `env_mask` and `logprobs` of a row have the same length.
- If the conversation was re-rendered, the row contains the last part with sampled tokens. Tokens that were sampled
  before are in its prompt and not trained on: `lost_tokens` is their fraction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import ConfigError
from toolroll.integrations.summary import exclusion_reason, lost_fraction, parts_with_samples, summary_fields
from toolroll.rollout.tokens import Author, TokenStream
from toolroll.rollout.trajectory import Fidelity, Trajectory


def make_batch(trajectories: Sequence[Trajectory], fields: Sequence[Mapping[str, Any]], filler: int) -> dict[str, Any]:
    """Return the keys that TRL requires, and `toolroll` and `trajectory` for the reward functions.

    Args:
        trajectories: Trajectories in the order of the prompts.
        fields: Result of `sample_fields` for each trajectory.
        filler: Token id that replaces an empty prompt or completion.

    Raises:
        ConfigError: If a trajectory has images, which TRL does not take from a rollout function.
    """
    if any(one.tokens.images for one in trajectories):
        raise ConfigError("A trajectory has images, which TRL does not take from a rollout function. Use verl.")
    kept = [one["left_out"] is None for one in fields]
    rows = [_row(one, keep=keep, filler=filler) for one, keep in zip(trajectories, kept, strict=True)]
    trained = [parts_with_samples(one)[-1] for one, keep in zip(trajectories, kept, strict=True) if keep]
    has_logprobs = all(tokens.has_logprobs for tokens in trained)
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
    tokens = parts_with_samples(trajectory)[-1]
    ids = tokens.response_ids or [filler]
    mask = tokens.response_mask if keep else [0] * len(ids)
    logprobs = tokens.response_logprobs or [0.0] * len(ids)
    return tokens.prompt_ids or [filler], ids, mask, logprobs


def sample_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a sample that reward functions receive under `toolroll`."""
    tokens = parts_with_samples(trajectory)[-1]
    left_out = exclusion_reason(trajectory, [tokens], needs_reward=True)
    calls = trajectory.calls
    return {
        **summary_fields(trajectory, left_out),
        "reward": None if left_out is not None else trajectory.rewards.total,
        "turns": len({turn.turn for turn in trajectory.turns}),
        "call_seconds": [call.seconds for call in calls],
        "queue_waits": [float(wait) for call in calls if (wait := call.metrics.get("queue_wait")) is not None],
        "rerendered": trajectory.fidelity is Fidelity.RERENDERED,
        "lost_tokens": lost_fraction(trajectory, sum(tokens.mask)),
        "weights": _tokens_by_weight_version(tokens),
    }


def _tokens_by_weight_version(tokens: TokenStream) -> dict[str | None, int]:
    counts: Counter[str | None] = Counter()
    for span in tokens.spans:
        if span.author is Author.MODEL:
            counts[span.weight_version] += span.end - span.start
    return dict(counts)
