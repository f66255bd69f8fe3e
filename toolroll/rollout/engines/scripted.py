"""Token engine that returns prepared ids, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.images import ImageSpan
from toolroll.rollout.engines.base import FinishType, Generation, GenerationTimings, LogprobsMode, SamplingParams

Script = Callable[[str, Sequence[int], int], Sequence[int]]
"""Function from request id, prompt ids and turn to the ids of the completion. Its exceptions reach the caller."""


class ScriptedEngine:
    """Token engine that returns the ids of a script, up to a stop token or `max_new_tokens`.

    Args:
        script: The ids of each turn, or a function that returns them. Turns are counted for each affinity, or for each
            request id without an affinity.
        delay: Duration of a call before its first token, in seconds.
        seconds_per_token: Duration of each token, in seconds. An aborted call returns the tokens of the elapsed time.
        logprob: Log-probability of each id, or None for an engine without log-probabilities.
        abort_after: Number of ids that an aborted call returns if `seconds_per_token` is 0. The next call continues
            after them.
        weight_version: Version of the weights. It can be changed at any time.

    Attributes:
        calls: Number of calls so far.
        in_flight: Number of current calls.
        max_in_flight: Maximum number of concurrent calls so far.

    Example:
        engine = ScriptedEngine([[5, 6, 2], [7, 2]])  # first and second turn of every trajectory
        engine = ScriptedEngine(lambda request_id, prompt_ids, turn: [turn, 2], delay=0.1)
    """

    logprobs_mode: LogprobsMode = "processed_logprobs"

    def __init__(
        self,
        script: Script | Sequence[Sequence[int]],
        *,
        delay: float = 0.0,
        seconds_per_token: float = 0.0,
        logprob: float | None = -1.0,
        abort_after: int = 0,
        weight_version: str | None = None,
    ) -> None:
        self._script = script if callable(script) else _script_of(script)
        self.delay, self.logprob, self.abort_after, self.weight_version = delay, logprob, abort_after, weight_version
        self.calls = self.in_flight = self.max_in_flight = 0
        self._seconds_per_token = seconds_per_token
        self._turns: Counter[str] = Counter()
        self._remainders: dict[str, list[int]] = {}
        """Ids that aborted calls did not return, by affinity."""
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        """Return the next ids of the script.

        Args:
            request_id: Id of this call, for `abort` and for the script.
            prompt_ids: Token ids of the prompt, for the script.
            sampling_params: Sampling parameters. Only `max_new_tokens` and `stop_token_ids` have an effect.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.
            affinity: Trajectory whose turns are counted.
            images: Ranges of images in the prompt, which have no effect.

        Returns:
            The ids of the script.

        Raises:
            EngineUnavailable: If the call takes longer than the deadline allows.
            EngineRefused: If the script has no further turns.
        """
        started, trajectory = time.monotonic(), affinity or request_id
        script = self._remainders.pop(trajectory, None)
        if script is None:
            script = list(self._script(request_id, prompt_ids, self._turns[trajectory]))
            self._turns[trajectory] += 1
        ids, finish = _truncate(script, sampling_params)
        self.calls += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            aborted = await self._wait(request_id, self.delay + self._seconds_per_token * len(ids), deadline)
        finally:
            self.in_flight -= 1
        if aborted:
            ids, finish = ids[: self._tokens_within(time.monotonic() - started)], FinishType.ABORT
            self._remainders[trajectory] = script[len(ids) :]
        return Generation(
            ids=ids,
            logprobs=None if self.logprob is None else [self.logprob] * len(ids),
            finish=finish,
            weight_version=self.weight_version,
            timings=GenerationTimings(total=time.monotonic() - started),
        )

    async def abort(self, request_id: str) -> None:
        """Stop a call, which then returns the ids so far with `FinishType.ABORT`.

        Args:
            request_id: Id of the call. Unknown ids are ignored.
        """
        if event := self._aborts.get(request_id):
            event.set()

    async def close(self) -> None:
        """Do nothing: the engine has no connections."""

    @property
    def running(self) -> list[str]:
        """Request ids of the current calls."""
        return list(self._aborts)

    def _tokens_within(self, seconds: float) -> int:
        if not self._seconds_per_token:
            return self.abort_after
        return max(0, int((seconds - self.delay) / self._seconds_per_token))

    async def _wait(self, request_id: str, seconds: float, deadline: float | None) -> bool:
        """Wait for the duration of a call. Return True if it was aborted."""
        remaining_s = float("inf") if deadline is None else deadline - time.monotonic()
        aborted = self._aborts[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(min(seconds, remaining_s)):
                await aborted.wait()
        except TimeoutError:
            if seconds >= remaining_s:
                raise EngineUnavailable(f"{request_id}: the deadline passed after {remaining_s:.1f} s.") from None
        finally:
            self._aborts.pop(request_id, None)
        return aborted.is_set()


def _script_of(turns: Sequence[Sequence[int]]) -> Script:
    def script(request_id: str, prompt_ids: Sequence[int], turn: int) -> Sequence[int]:
        if turn >= len(turns):
            raise EngineRefused(f"{request_id}: the script ends after {len(turns)} turns. Add a turn to the script.")
        return turns[turn]

    return script


def _truncate(ids: list[int], sampling_params: SamplingParams) -> tuple[list[int], FinishType]:
    stop_ids = set(sampling_params.get("stop_token_ids") or ())
    max_new_tokens = sampling_params.get("max_new_tokens", len(ids))
    stop = next((position for position, token_id in enumerate(ids, 1) if token_id in stop_ids), None)
    if stop is not None and stop <= max_new_tokens:
        return ids[:stop], FinishType.STOP
    return ids[:max_new_tokens], FinishType.LENGTH if len(ids) > max_new_tokens else FinishType.STOP
