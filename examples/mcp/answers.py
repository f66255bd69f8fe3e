"""Reward function of the example."""

from toolroll import Trajectory


def exact(trajectory: Trajectory) -> float:
    """Return 1.0 if the last message is the answer, up to spaces and a final period."""
    text = str(trajectory.messages[-1].content or "")
    return float(text.strip().rstrip(".") == trajectory.extra["ground_truth"])
