"""ScriptedEngine: a TokenEngine that says what it is told to, for tests and benchmarks of whatever drives one.

engine = ScriptedEngine([[5, 6, 2], [7, 2]])   # the first turn of every trajectory, the second
engine = ScriptedEngine(lambda request_id, prompt_ids, turn: [turn, 2], delay=0.1)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.rollout.engines.engine import Finish, Generation, SamplingParams, Timings

Script = Callable[[str, Sequence[int], int], Sequence[int]]
"""From the request's id, the prompt and the turn to the ids. What it raises, the caller gets."""


class ScriptedEngine:
    """Says what the script says, up to a stop token or `max_new_tokens`.

    Args:
        script: A function, or the ids of each turn. Turns are counted per affinity, or per request's id without one.
        delay: Seconds that a call takes.
        seconds_per_token: And how long each id takes. An aborted call has those whose time had come.
        logprob: Of each id; None for an engine that gives none.
        abort_after: How many ids an aborted call has, where ids take no time. The next call goes on behind them.
        weight_version: May be set anew at any time.

    Attributes:
        calls: How many were made.
        in_flight: How many there are now.
        running: Their ids.
        most_in_flight: How many there were at the most.
    """

    logprobs_of: Literal["scaled", "raw"] = "scaled"

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
        self._script = script if callable(script) else _told(script)
        self.delay, self.logprob, self.abort_after, self.weight_version = delay, logprob, abort_after, weight_version
        self.calls = self.in_flight = self.most_in_flight = 0
        self._seconds_per_token = seconds_per_token
        self._turns: Counter[str] = Counter()
        self._unsaid: dict[str, list[int]] = {}
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Say what comes next. Of the parameters it heeds `max_new_tokens` and `stop_token_ids`."""
        began, trajectory = time.monotonic(), affinity or request_id
        script = self._unsaid.pop(trajectory, None)
        if script is None:
            script = list(self._script(request_id, prompt_ids, self._turns[trajectory]))
            self._turns[trajectory] += 1
        ids, finish = _cut(script, sampling_params)
        self.calls += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            aborted = await self._wait(request_id, self.delay + self._seconds_per_token * len(ids), deadline)
        finally:
            self.in_flight -= 1
        if aborted:
            ids, finish = ids[: self._said_in(time.monotonic() - began)], Finish.ABORT
            self._unsaid[trajectory] = script[len(ids) :]
        return Generation(
            ids=ids,
            logprobs=None if self.logprob is None else [self.logprob] * len(ids),
            finish=finish,
            weight_version=self.weight_version,
            timings=Timings(total=time.monotonic() - began),
        )

    async def abort(self, request_id: str) -> None:
        """Stop a call. It ends with what it has, as ABORT. One that isn't there is no error."""
        if event := self._aborts.get(request_id):
            event.set()

    async def close(self) -> None:
        """There is nothing to close."""

    @property
    def running(self) -> list[str]:
        """The ids of the calls that there are now."""
        return list(self._aborts)

    def _said_in(self, seconds: float) -> int:
        if not self._seconds_per_token:
            return self.abort_after
        return max(0, int((seconds - self.delay) / self._seconds_per_token))

    async def _wait(self, request_id: str, seconds: float, deadline: float | None) -> bool:
        """Take the time that a call takes. Whether it was aborted."""
        left = float("inf") if deadline is None else deadline - time.monotonic()
        aborted = self._aborts[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(min(seconds, left)):
                await aborted.wait()
        except TimeoutError:
            if seconds >= left:
                raise EngineUnavailable(f"{request_id}: the script takes {seconds} s, beyond the deadline.") from None
        finally:
            self._aborts.pop(request_id, None)
        return aborted.is_set()


def _told(turns: Sequence[Sequence[int]]) -> Script:
    def script(request_id: str, prompt_ids: Sequence[int], turn: int) -> Sequence[int]:
        if turn >= len(turns):
            raise EngineRefused(f"{request_id} is turn {turn}, and the script ends after {len(turns)}.")
        return turns[turn]

    return script


def _cut(ids: list[int], sampling_params: SamplingParams) -> tuple[list[int], Finish]:
    stops = set(sampling_params.get("stop_token_ids") or ())
    most = sampling_params.get("max_new_tokens", len(ids))
    stop = next((place for place, number in enumerate(ids, 1) if number in stops), None)
    if stop is not None and stop <= most:
        return ids[:stop], Finish.STOP
    return ids[:most], Finish.LENGTH if len(ids) > most else Finish.STOP
