"""What TRL gets of a batch of trajectories: token rows in the order of the prompts, and fields beside them.

- Every prompt has one row, also one that nothing is to be learnt from: it is masked, and none of its parts is empty,
  since TRL looks at the last token of each.
- `completion_ids`, `env_mask` and `logprobs` of a row are of one length.
- Where a template wrote an earlier turn anew, the row is what the engine saw last; what was sampled before is part of
  the prompt then, and not learnt from.

Pure, and knows nothing of TRL's classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import Fault
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, Trajectory


def why_left_out(trajectory: Trajectory) -> str | None:
    """Why there is nothing to learn from a trajectory; None where there is."""
    if trajectory.outcome == "infra":
        return trajectory.error or f"the infrastructure failed ({trajectory.finish_reason})"
    if not any(trajectory.tokens.mask):
        return trajectory.error or f"the model had written nothing when it ended ({trajectory.finish_reason})"
    if trajectory.rewards.total is None:
        return "the reward function could not say what it is worth"
    return None


def batch_of(trajectories: Sequence[Trajectory], fields: Sequence[Mapping[str, Any]], *, filler: int) -> dict[str, Any]:
    """The keys that TRL asks for, and `toolroll` and `trajectory` for the reward functions."""
    kept = [one["left_out"] is None for one in fields]
    rows = [_row(one, keep=keep, filler=filler) for one, keep in zip(trajectories, kept, strict=True)]
    known = all(one.tokens.has_logprobs for one, keep in zip(trajectories, kept, strict=True) if keep)
    prompts, completions, masks, logprobs = ([row[part] for row in rows] for part in range(4))
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "env_mask": masks,
        "logprobs": logprobs if known else None,
        "toolroll": list(fields),
        "trajectory": list(trajectories),
    }


def _row(trajectory: Trajectory, *, keep: bool, filler: int) -> tuple[list[int], list[int], list[int], list[float]]:
    tokens = trajectory.tokens
    ids = tokens.response_ids or [filler]
    mask = tokens.response_mask if keep else [0] * len(ids)
    logprobs = tokens.response_logprobs or [0.0] * len(ids)
    return tokens.prompt_ids or [filler], ids, mask, logprobs


def fields_of(trajectory: Trajectory, left_out: str | None) -> dict[str, Any]:
    """What a reward function finds of a sample under `toolroll`, beside the trajectory itself."""
    calls = trajectory.calls
    return {
        "reward": None if left_out is not None else trajectory.rewards.total,
        "left_out": left_out,
        "finish_reason": str(trajectory.finish_reason),
        "turns": len({turn.turn for turn in trajectory.turns}),
        "calls": len(calls),
        "policy_faults": sum(call.fault is Fault.POLICY for call in calls),
        "infra_faults": sum(call.fault is Fault.INFRA for call in calls),
        "call_seconds": [call.seconds for call in calls],
        "queue_waits": [float(wait) for call in calls if (wait := call.metrics.get("queue_wait")) is not None],
        "rerendered": trajectory.fidelity is Fidelity.RERENDERED,
        "weights": sampled_by(trajectory),
        "seconds": trajectory.seconds,
    }


def sampled_by(trajectory: Trajectory) -> dict[str | None, int]:
    """How many of its tokens each version of the weights sampled."""
    counts: Counter[str | None] = Counter()
    for span in trajectory.tokens.spans:
        if span.author is Author.MODEL:
            counts[span.weight_version] += span.end - span.start
    return dict(counts)
