"""ServerEngine: verl's inference servers as a TokenEngine, for one trajectory.

It asks verl's own client (`LLMServerClient`, or the one of its asynchronous trainers, which goes on by itself after a
change of weights), so load balancing and stickiness are verl's. verl has no way to stop one request: a call that is
aborted ends at once and without ids, with that as its problem, and what the server goes on to sample is nobody's.

What verl wants to know of a trajectory's generations beside their tokens is kept here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.rollout.engines.engine import Finish, Generation, SamplingParams, Timings
from toolroll.rollout.engines.sampling import paired

WITHOUT_DEADLINE = 3600.0
NOT_TOLD = "verl's server can't be told to stop: what it had sampled by the deadline isn't known."
COUNTED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""What a server that decodes speculatively counts, to be summed over the turns."""


class ServerEngine:
    """One trajectory's way to the servers.

    Args:
        servers: verl's client: `generate(request_id, *, prompt_ids, sampling_params)`.
        session: By which the client knows the trajectory; its calls go to one server.
        logprobs_of: What the server's log-probabilities are of.

    Attributes:
        steps: The first and the last version of the weights that sampled, as verl counts them; None where unknown.
        preempted: How often the server put a call off; None where it doesn't say.
        routed_experts: Which experts the last call's tokens went to, where the server tells.
        counted: See COUNTED.
    """

    def __init__(self, servers: Any, session: str, logprobs_of: Literal["scaled", "raw"] = "scaled") -> None:
        self.logprobs_of: Literal["scaled", "raw"] = logprobs_of
        self.steps: tuple[int | None, int | None] = (None, None)
        self.preempted: int | None = None
        self.routed_experts: Any = None
        self.counted: dict[str, int] = {}
        self._servers = servers
        self._session = session
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,  # there is one trajectory
    ) -> Generation:
        """Sample. The parameters are those of verl's agent loops: `logprobs` says whether they are wanted."""
        began = time.monotonic()
        stops = list(sampling_params.get("stop_token_ids") or ())
        params = {**sampling_params, "stop_token_ids": stops}
        left = WITHOUT_DEADLINE if deadline is None else deadline - began
        answer = await self._ask(request_id, prompt_ids, params, left)
        timings = Timings(total=time.monotonic() - began)
        if answer is None:
            return Generation(ids=[], logprobs=[], finish=Finish.ABORT, problem=NOT_TOLD, timings=timings)
        self._note(answer)
        ids = [int(number) for number in answer.token_ids]
        finish = finish_of(answer.stop_reason, ids, stops)
        told = answer.extra_fields or {}
        version, _ = _versions(told)
        return Generation(
            ids=ids,
            logprobs=_logprobs(answer.log_probs, ids, finish, wanted=bool(sampling_params.get("logprobs"))),
            finish=finish,
            weight_version=None if version is None else str(version),
            timings=Timings(total=timings.total, cached_tokens=told.get("num_cached_tokens")),
        )

    async def abort(self, request_id: str) -> None:
        """Stop a call. It ends as ABORT, without ids. One that isn't there is no error."""
        if event := self._aborts.get(request_id):
            event.set()

    async def close(self) -> None:
        """The client is verl's."""

    async def _ask(
        self, request_id: str, prompt_ids: Sequence[int], params: dict[str, Any], seconds: float
    ) -> Any | None:
        """The server's answer; None if it was aborted before there was one."""
        aborted = self._aborts[request_id] = asyncio.Event()
        call = asyncio.ensure_future(
            self._servers.generate(request_id=self._session, prompt_ids=list(prompt_ids), sampling_params=params)
        )
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({call, stop}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if stop.done():
                return None
        except Exception as error:  # of verl's, of Ray's, or of the server's own: none is the model's doing
            raise _fault(error) from error
        finally:
            for task in (call, stop):
                task.cancel()
            del self._aborts[request_id]
        raise EngineUnavailable(f"verl's server gave no answer to {request_id} in {seconds:.0f} s.")

    def _note(self, answer: Any) -> None:
        told = answer.extra_fields or {}
        first, last = _versions(told)
        self.steps = (
            first if self.steps[0] is None else self.steps[0],
            self.steps[1] if last is None else last,
        )
        if answer.num_preempted is not None:
            self.preempted = (self.preempted or 0) + answer.num_preempted
        if answer.routed_experts is not None:
            self.routed_experts = answer.routed_experts
        for name in COUNTED:
            if name in told:
                self.counted[name] = self.counted.get(name, 0) + int(told[name])


def finish_of(reason: str | None, ids: Sequence[int], stops: Sequence[int]) -> Finish:
    """Why the server stopped. SGLang says it; vLLM's "completed" may be either, and the last id tells."""
    if reason in ("abort", "aborted"):
        return Finish.ABORT
    if reason == "stop" or (reason != "length" and bool(ids) and ids[-1] in stops):
        return Finish.STOP
    return Finish.LENGTH


def _logprobs(given: Sequence[float] | None, ids: list[int], finish: Finish, *, wanted: bool) -> list[float] | None:
    if not wanted:
        return None
    if ids and not given:
        raise EngineUnavailable("verl's server was asked for log-probabilities, and gave none.")
    try:
        _, logprobs = paired(ids, [float(value) for value in given or ()], finish)
    except ValueError as error:
        raise EngineUnavailable(f"verl's server gave {error}.") from error
    del ids[len(logprobs) :]
    return logprobs


def _versions(told: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The weights that sampled first and last. verl 0.8 tells one for both."""
    one = told.get("global_steps")
    first, last = told.get("min_global_steps"), told.get("max_global_steps")
    return one if first is None else first, one if last is None else last


def _fault(error: Exception) -> EngineUnavailable | EngineRefused:
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no reason given'}"
    if isinstance(error, ValueError):  # as from a server: the prompt is longer than the model's context
        return EngineRefused(f"verl's server won't have this: {said:.300}")
    return EngineUnavailable(f"verl's server failed: {said:.300}")
