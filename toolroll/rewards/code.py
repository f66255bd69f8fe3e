"""Score programs by running them against test cases: one answer or a batch, blocking or async.

The names and arguments are those with which verl's reward managers call a function. In verl's configs, use the same
functions of `toolroll.integrations.verl.reward`, because verl does not support a score of None:

    reward.custom_reward_function.path=pkg://toolroll.integrations.verl.reward
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.sandbox_fusion_url=http://10.0.0.1:8080

Arguments of all functions:

- `solution_str`: the model's answer, which may contain the program in a code fence (`_internal/code_fences.py`).
- `ground_truth`: the test cases, in the format of `read_cases` (`cases.py`).
- `data_source`, `extra_info`: ignored.
- `**settings`: fields of `GraderSettings` (`grader.py`). `sandbox_fusion_url` defaults to the environment variable
  SANDBOX_FUSION_URL.

A score is a number from 0 to 1, or None if the infrastructure failed. Invalid data raises ValueError and an invalid
setting raises ConfigError, because neither is caused by the model.

The blocking functions can be called from any thread, including one that runs an event loop, and in forked processes.
They share one event loop thread per process. Calls with equal settings share a grader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from toolroll._internal.event_loop_thread import shared_event_loop_thread
from toolroll.errors import ConfigError, validate
from toolroll.rewards.cases import read_cases
from toolroll.rewards.grader import CodeGrader, GraderSettings

SANDBOX_URL_ENV_VAR = "SANDBOX_FUSION_URL"
_THREAD_NAME = "toolroll-rewards"
_IGNORED_KEYWORDS = ("reward_router_address", "reward_model_tokenizer")
"""Arguments that verl passes to every reward function if a reward model is configured too."""


def compute_score(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float | None:
    """Return the score of one answer. See the module for arguments and errors."""
    thread = shared_event_loop_thread(_THREAD_NAME, close_at_exit=True)
    return thread.run(compute_score_async(data_source, solution_str, ground_truth, extra_info, **settings))


async def compute_score_async(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float | None:
    """Return the score of one answer. See the module for arguments and errors."""
    grade = await _get_grader(settings).grade(solution_str, read_cases(ground_truth))
    return grade.score


def compute_scores(
    data_sources: Any,
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Any = None,
    **settings: Any,
) -> list[float | None]:
    """Return the scores of a batch in order. All cases run concurrently. See the module for arguments and errors."""
    thread = shared_event_loop_thread(_THREAD_NAME, close_at_exit=True)
    return thread.run(compute_scores_async(data_sources, solution_strs, ground_truths, extra_infos, **settings))


async def compute_scores_async(
    data_sources: Any,
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Any = None,
    **settings: Any,
) -> list[float | None]:
    """Return the scores of a batch in order. All cases run concurrently. See the module for arguments and errors."""
    if len(solution_strs) != len(ground_truths):
        raise ValueError(
            f"Expected as many solution_strs as ground_truths, got {len(solution_strs)} and {len(ground_truths)}."
        )
    grader, answers = _get_grader(settings), []
    for number, (solution, truth) in enumerate(zip(solution_strs, ground_truths, strict=True)):
        try:
            answers.append((solution, read_cases(truth)))
        except ValueError as error:
            raise ValueError(f"ground_truths[{number}]: {error}") from None
    return [grade.score for grade in await grader.grade_all(answers)]


_graders: dict[tuple[int, GraderSettings], CodeGrader] = {}
"""Graders by process id and settings. A forked process does not use the graders of its parent, but keeps them:
destroying them would affect connections of the parent's event loop."""


def _get_grader(settings: dict[str, Any]) -> CodeGrader:
    given = {name: value for name, value in settings.items() if name not in _IGNORED_KEYWORDS}
    url = given.get("sandbox_fusion_url") or os.environ.get(SANDBOX_URL_ENV_VAR)
    if not url:
        raise ConfigError(
            f"No sandbox is configured. Set reward_kwargs.sandbox_fusion_url or {SANDBOX_URL_ENV_VAR} to a URL such "
            "as 'http://127.0.0.1:8080'."
        )
    given["sandbox_fusion_url"] = url if isinstance(url, str) else tuple(url)  # a list of any type, e.g. OmegaConf's
    validated = validate(GraderSettings, given, "reward_kwargs")
    key = os.getpid(), validated
    return _graders.get(key) or _graders.setdefault(key, CodeGrader(validated))
