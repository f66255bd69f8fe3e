"""Reward functions for the config of a run. Each scores the model's last message.

    rewards:
      functions: {correct: toolroll.run.reward_functions.gsm8k_flexible}

The setting `data.ground_truth` names the column of the expected answer. A custom reward function has the same signature
and lives in a module next to the config. It may be async, and returns None if it cannot score the trajectory.
"""

from __future__ import annotations

import os
from typing import Any

from toolroll.rewards import gsm8k
from toolroll.rewards.code import SANDBOX_URL_ENV_VAR, compute_score_async
from toolroll.rollout.trajectory import Trajectory

DEFAULT_SANDBOX_URL = "http://127.0.0.1:8080"
"""Default address of `toolroll sandbox serve`."""


def gsm8k_strict(trajectory: Trajectory) -> float:
    """Return 1 if the number after `#### ` in the last message is correct, else 0."""
    return gsm8k.compute_score(last_message_text(trajectory), ground_truth(trajectory), "strict")


def gsm8k_flexible(trajectory: Trajectory) -> float:
    """Return 1 if the last number in the last message is correct, else 0."""
    return gsm8k.compute_score(last_message_text(trajectory), ground_truth(trajectory), "flexible")


async def code_tests(trajectory: Trajectory, **settings: Any) -> float | None:
    """Return 1 if the program in the last message passes all test cases, else 0; None if the sandbox failed.

    Args:
        trajectory: Trajectory whose `ground_truth` are the test cases.
        **settings: Settings of `toolroll.rewards.code.compute_score_async`. Default sandbox: SANDBOX_FUSION_URL.
    """
    url = settings.pop("sandbox_fusion_url", None) or os.environ.get(SANDBOX_URL_ENV_VAR) or DEFAULT_SANDBOX_URL
    return await compute_score_async(
        None, last_message_text(trajectory), ground_truth(trajectory), sandbox_fusion_url=url, **settings
    )


async def code_tests_passed(trajectory: Trajectory, **settings: Any) -> float | None:
    """Return the fraction of the test cases that the program in the last message passes; None if the sandbox failed.

    Args:
        trajectory: Trajectory whose `ground_truth` are the test cases.
        **settings: Settings of `toolroll.rewards.code.compute_score_async`. Default sandbox: SANDBOX_FUSION_URL.
    """
    return await code_tests(trajectory, continuous=True, **settings)


def last_message_text(trajectory: Trajectory) -> str:
    """Return the text of the model's last message, or an empty string."""
    for message in reversed(trajectory.messages):
        if message.role == "assistant":
            if isinstance(message.content, list):
                return "".join(str(part.get("text") or "") for part in message.content)
            return message.content or ""
    return ""


def ground_truth(trajectory: Trajectory) -> Any:
    """Return the expected answer of the trajectory's row.

    Raises:
        ValueError: If the row has none.
    """
    try:
        return trajectory.extra["ground_truth"]
    except KeyError:
        raise ValueError("The row has no ground_truth. Set data.ground_truth to the column of the answer.") from None
