"""A reward function that can't always say."""

from typing import Any

from toolroll.integrations.verl.reward import ScoreUnavailable
from toolroll.rewards.gsm8k import compute_score

UNKNOWN = 7
"""Of this question, no answer can be scored."""


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any) -> float:
    if extra_info["index"] == UNKNOWN:
        raise ScoreUnavailable("the judge is asleep")
    return compute_score(solution_str, ground_truth)
