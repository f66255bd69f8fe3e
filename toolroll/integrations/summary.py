"""Summary of a trajectory for a trainer: fields that all adapters share, and whether it is excluded from the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolroll.errors import Fault
from toolroll.records.stats.alarms import is_malformed
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Trajectory


def parts_with_samples(trajectory: Trajectory) -> list[TokenStream]:
    """Return the parts of a trajectory that have sampled tokens, in order; the last part if there are none.

    A conversation that was rendered again has several parts. The last one has no sampled tokens if the trajectory ended
    before its next turn.
    """
    parts = [*trajectory.earlier, trajectory.tokens]
    return [part for part in parts if any(part.mask)] or parts[-1:]


def lost_fraction(trajectory: Trajectory, trained_tokens: int) -> float:
    """Return the fraction of the sampled tokens that a trainer does not train on.

    Args:
        trajectory: The trajectory.
        trained_tokens: Number of sampled tokens in the rows that the trainer receives.
    """
    sampled = sum(sum(part.mask) for part in parts_with_samples(trajectory))
    return 1 - trained_tokens / sampled if sampled else 0.0


def exclusion_reason(trajectory: Trajectory, streams: Iterable[TokenStream], *, needs_reward: bool) -> str | None:
    """Return the reason why a trajectory is excluded from the loss, or None if it is not.

    Args:
        trajectory: The trajectory.
        streams: Its token streams that the trainer trains on.
        needs_reward: Whether the trainer uses the trajectory's total reward.
    """
    if trajectory.outcome == "infra":
        return trajectory.error or f"infra fault (finish_reason={trajectory.finish_reason})"
    if not any(any(stream.mask) for stream in streams):
        return trajectory.error or f"no tokens were sampled (finish_reason={trajectory.finish_reason})"
    if needs_reward and trajectory.rewards.total is None:
        return "a reward function returned no reward"
    return None


def summary_fields(trajectory: Trajectory, left_out: str | None) -> dict[str, Any]:
    """Return the fields that reward functions receive from every adapter.

    Args:
        trajectory: The trajectory.
        left_out: Reason why the trajectory is excluded, or None.
    """
    calls = trajectory.calls
    return {
        "left_out": left_out,
        "finish_reason": str(trajectory.finish_reason),
        "calls": len(calls),
        "policy_faults": sum(call.fault is Fault.POLICY for call in calls),
        "infra_faults": sum(call.fault is Fault.INFRA for call in calls),
        "malformed_calls": sum(is_malformed(call.metrics, call.fault) for call in calls),
        "seconds": trajectory.seconds,
    }
