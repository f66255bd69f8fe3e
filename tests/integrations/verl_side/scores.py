"""A reward function that fails for one question."""

from typing import Any

from toolroll.integrations.verl.reward import ScoreUnavailable
from toolroll.rewards.gsm8k import compute_score

UNSCORABLE_INDEX = 7
"""Index of the question whose answers have no score."""


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any) -> float:
    if extra_info["index"] == UNSCORABLE_INDEX:
        raise ScoreUnavailable("the judge is unavailable")
    return compute_score(solution_str, ground_truth)
