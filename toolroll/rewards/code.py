"""The score of a program, as a trainer asks for it: one at a time or in a batch, blocking or not.

verl calls it by these names and arguments:

    reward.custom_reward_function.path=pkg://toolroll.rewards.code
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.sandbox_fusion_url=http://10.0.0.1:8080

`**settings` are those of the grader (grader.py). Where `sandbox_fusion_url` isn't among them, the environment variable
SANDBOX_FUSION_URL says it. The answer in `solution_str` may be a whole text with the program in a fence (fence.py);
`ground_truth` is what `read_cases` takes (cases.py). `data_source` and `extra_info` are not looked at.

A score is a number from 0 to 1, or None where the infrastructure failed. Data that is wrong raises ValueError, and a
setting that is wrong ConfigError: neither is the model's doing.

The blocking forms may be called in any thread, in one that runs an event loop too, and after a fork. They share one
event loop per process, in a thread of its own. Graders are made once for equal settings.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from toolroll.errors import ConfigError, explain
from toolroll.rewards.cases import Cases, read_cases
from toolroll.rewards.grader import CodeGrader, GraderSettings

T = TypeVar("T")

URL = "SANDBOX_FUSION_URL"
_VERLS_OWN = ("reward_router_address", "reward_model_tokenizer")
"""What verl passes to every reward function where there is a reward model besides."""


def compute_score(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float | None:
    """The score of one answer."""
    return _blocking(compute_score_async(data_source, solution_str, ground_truth, extra_info, **settings))


async def compute_score_async(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **settings: Any
) -> float | None:
    """The score of one answer."""
    grade = await _grader(settings).grade(solution_str, read_cases(ground_truth))
    return grade.score


def compute_scores(
    data_sources: Any,
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Any = None,
    **settings: Any,
) -> list[float | None]:
    """The scores of a batch, in order, run concurrently."""
    return _blocking(compute_scores_async(data_sources, solution_strs, ground_truths, extra_infos, **settings))


async def compute_scores_async(
    data_sources: Any,
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Any = None,
    **settings: Any,
) -> list[float | None]:
    """The scores of a batch, in order, run concurrently."""
    if len(solution_strs) != len(ground_truths):
        raise ValueError(f"There are {len(solution_strs)} solution_strs, but {len(ground_truths)} ground_truths.")
    grader = _grader(settings)
    grades = await grader.grade_all(list(zip(solution_strs, _all_cases(ground_truths), strict=True)))
    return [grade.score for grade in grades]


def _all_cases(ground_truths: Iterable[Any]) -> list[Cases]:
    found = []
    for number, truth in enumerate(ground_truths):
        try:
            found.append(read_cases(truth))
        except ValueError as error:
            raise ValueError(f"ground_truths[{number}]: {error}") from None
    return found


_graders: dict[GraderSettings, CodeGrader] = {}
_lock = threading.Lock()


def _grader(settings: dict[str, Any]) -> CodeGrader:
    """The grader with these settings."""
    given = {name: value for name, value in settings.items() if name not in _VERLS_OWN}
    if not given.get("sandbox_fusion_url"):
        given["sandbox_fusion_url"] = os.environ.get(URL)
    url = given["sandbox_fusion_url"]
    if not url:
        raise ConfigError(
            f"Which sandbox? Set reward_kwargs.sandbox_fusion_url, or {URL}, to a URL like 'http://127.0.0.1:8080'."
        )
    if not isinstance(url, str):
        given["sandbox_fusion_url"] = tuple(url)  # whatever kind of list the config has
    try:
        checked = GraderSettings(**given)
    except ValidationError as error:
        raise ConfigError(f"reward_kwargs: {explain(error, GraderSettings.model_fields)}") from None
    with _lock:
        if checked not in _graders:
            _graders[checked] = CodeGrader(checked)
        return _graders[checked]


class _Background:
    """An event loop in a thread of its own, for those who block."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="toolroll-rewards", daemon=True)
        self._thread.start()
        self._ready.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives. Who is interrupted while waiting takes it back."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Cancel what is under way, and close the connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._ready.set()
            self._loop.run_forever()


_background: _Background | None = None
_inherited: list[Any] = []
"""What a forked process has of its parent's: kept, as to destroy it would reach into the parent's event loop."""


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    global _background
    with _lock:
        if _background is None:
            _background = _Background()
            atexit.register(_background.end)
    return _background.run(work)


def _begin_anew() -> None:
    """In a forked process, where the thread isn't, and connections and slots are the parent's."""
    global _background, _lock, _graders
    if _background is not None:
        atexit.unregister(_background.end)
    _inherited.extend((_background, _graders))
    _background, _graders, _lock = None, {}, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
