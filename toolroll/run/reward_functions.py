"""Reward functions for a run's config: each is given a trajectory, and scores what the model said last.

    rewards:
      functions: {right: toolroll.run.reward_functions.gsm8k_flexible}

What is right is the row's `ground_truth` (`data.ground_truth` names its column). One of your own is a function like
these, in a module beside the config; it may be async, and gives None where it can't say.
"""

from __future__ import annotations

import os
from typing import Any

from toolroll.rewards import gsm8k
from toolroll.rewards.code import URL, compute_score_async
from toolroll.rollout.trajectory import Trajectory

SANDBOX = "http://127.0.0.1:8080"
"""Where `toolroll sandbox serve` is, unless the environment says otherwise."""


def gsm8k_strict(trajectory: Trajectory) -> float:
    """1 if the model's last message has the right number behind `#### `, else 0."""
    return gsm8k.compute_score(last_words(trajectory), ground_truth(trajectory), "strict")


def gsm8k_flexible(trajectory: Trajectory) -> float:
    """1 if the last number in the model's last message is the right one, else 0."""
    return gsm8k.compute_score(last_words(trajectory), ground_truth(trajectory), "flexible")


async def code_tests(trajectory: Trajectory, **settings: Any) -> float | None:
    """1 if the program in the model's last message passes all test cases, else 0; None where the sandbox failed.

    Settings are the grader's (docs/rewards.md). Where none names a sandbox, it is that of SANDBOX_FUSION_URL.
    """
    url = settings.pop("sandbox_fusion_url", None) or os.environ.get(URL) or SANDBOX
    return await compute_score_async(
        None, last_words(trajectory), ground_truth(trajectory), sandbox_fusion_url=url, **settings
    )


async def code_tests_passed(trajectory: Trajectory, **settings: Any) -> float | None:
    """The part of the test cases that the program in the model's last message passes; None where the sandbox failed."""
    return await code_tests(trajectory, continuous=True, **settings)


def last_words(trajectory: Trajectory) -> str:
    """The text of the model's last message; nothing where it said nothing."""
    for message in reversed(trajectory.messages):
        if message.role == "assistant":
            if isinstance(message.content, list):
                return "".join(str(part.get("text") or "") for part in message.content)
            return message.content or ""
    return ""


def ground_truth(trajectory: Trajectory) -> Any:
    """What the row says is right."""
    try:
        return trajectory.extra["ground_truth"]
    except KeyError:
        raise ValueError("the row has no ground_truth: name its column in data.ground_truth") from None
