"""VerlServerEngine: verl's inference servers as a TokenEngine, for one trajectory.

Requests are sent by verl's client (`LLMServerClient`, or that of its asynchronous trainers, which resumes generations
after a weight update), so load balancing and server affinity are verl's. verl cannot abort a single request: an aborted
call returns immediately, without ids and with a `problem`, and the server's further output is discarded.

The engine also collects the statistics that verl expects for a trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.images import Image, ImageSpan
from toolroll.rollout.engines.base import FinishType, Generation, GenerationTimings, LogprobsMode, SamplingParams
from toolroll.rollout.engines.sampling import align_logprobs

DEFAULT_GENERATION_TIMEOUT_S = 3600.0
"""Timeout of a call without a deadline."""
ABORT_PROBLEM = "verl's server cannot abort a request, so the tokens that it sampled until the deadline are unknown."
SPECULATION_COUNTERS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Counters of speculative decoding, which are summed over the turns."""


class VerlServerEngine:
    """Engine of one trajectory.

    Args:
        client: verl's client, with `generate(request_id, *, prompt_ids, sampling_params)`.
        session_id: Id that the client receives as request id. All calls with one id are sent to the same server.
        logprobs_mode: Kind of log-probabilities that the server returns.

    Attributes:
        steps: First and last weight version that sampled, as verl counts them, or None if unknown.
        preempted: Number of preemptions by the server, or None if it does not report them.
        routed_experts: Experts of the tokens of each part of the trajectory, if the server reports them. A part begins
            where the prompt does not continue the tokens of the call before.
        counters: Sums of `SPECULATION_COUNTERS`.
    """

    def __init__(self, client: Any, session_id: str, logprobs_mode: LogprobsMode = "processed_logprobs") -> None:
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.steps: tuple[int | None, int | None] = (None, None)
        self.preempted: int | None = None
        self.routed_experts: list[Any] = []
        self.counters: dict[str, int] = {}
        self._client = client
        self._session_id = session_id
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._last_ids: list[int] | None = None
        """Prompt and sampled ids of the last call."""
        self._decoded: dict[str, Any] = {}
        """Images by their hash."""

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
        """Sample from the model.

        Args:
            request_id: Id for `abort`.
            prompt_ids: Token ids of the prompt.
            sampling_params: Parameters as in verl's agent loops. `logprobs` is a boolean.
            deadline: Deadline on the clock of `time.monotonic()`.
            affinity: Ignored, because the engine serves one trajectory.
            images: Ranges of images in the prompt.

        Returns:
            The sampled tokens.

        Raises:
            EngineUnavailable: If the server failed or did not respond by the deadline.
            EngineRefused: If the server rejected the request.
        """
        start = time.monotonic()
        stop_ids = list(sampling_params.get("stop_token_ids") or ())
        params = {**sampling_params, "stop_token_ids": stop_ids}
        if bias := params.get("logit_bias"):
            params["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}  # as vLLM's class expects
        timeout_s = DEFAULT_GENERATION_TIMEOUT_S if deadline is None else deadline - start
        output = await self._request(request_id, list(prompt_ids), params, timeout_s, images)
        duration = time.monotonic() - start
        if output is None:
            timings = GenerationTimings(total=duration)
            return Generation(ids=[], logprobs=[], finish=FinishType.ABORT, problem=ABORT_PROBLEM, timings=timings)
        extra = output.extra_fields or {}
        version = self._collect_statistics(output, extra)
        ids = [int(number) for number in output.token_ids]
        if self._last_ids is None or list(prompt_ids[: len(self._last_ids)]) != self._last_ids:
            self.routed_experts.append(None)
        self._last_ids = [*prompt_ids, *ids]
        if output.routed_experts is not None:
            self.routed_experts[-1] = output.routed_experts
        finish = finish_type(output.stop_reason, ids, stop_ids)
        logprobs = _logprobs(output.log_probs, ids, finish) if sampling_params.get("logprobs") else None
        timings = GenerationTimings(total=duration, cached_tokens=extra.get("num_cached_tokens"))
        return Generation(ids=ids, logprobs=logprobs, finish=finish, weight_version=version, timings=timings)

    async def abort(self, request_id: str) -> None:
        """End a call with `FinishType.ABORT` and without ids. Does nothing if the call does not exist."""
        if call := self._calls.get(request_id):
            call.cancel()

    async def close(self) -> None:
        """Do nothing: the client belongs to verl."""

    async def _request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
        timeout_s: float,
        images: Sequence[ImageSpan],
    ) -> Any:
        """Return the server's output, or None if the call was aborted."""
        image_data = {"image_data": [await self._decode(span.image) for span in images]} if images else {}
        call = self._calls[request_id] = asyncio.ensure_future(
            self._client.generate(
                request_id=self._session_id, prompt_ids=prompt_ids, sampling_params=params, **image_data
            )
        )
        try:
            await asyncio.wait({call}, timeout=max(0.0, timeout_s))
            if call.done():
                return None if call.cancelled() else call.result()
        except Exception as error:  # an error of verl, Ray or the server is never caused by the model
            raise _to_infra_fault(error) from error
        finally:
            call.cancel()
            del self._calls[request_id]
        raise EngineUnavailable(f"verl's server did not respond to {request_id} within {timeout_s:.0f} s.")

    async def _decode(self, image: Image) -> Any:
        """Return an image as a PIL image. Each is decoded once, in a thread."""
        if image.hash not in self._decoded:
            self._decoded[image.hash] = await asyncio.to_thread(image.to_pil)
        return self._decoded[image.hash]

    def _collect_statistics(self, output: Any, extra: Mapping[str, Any]) -> str | None:
        """Update the statistics of the trajectory, and return the first weight version that sampled."""
        first, last = _weight_versions(extra)
        self.steps = first if self.steps[0] is None else self.steps[0], self.steps[1] if last is None else last
        if output.num_preempted is not None:
            self.preempted = (self.preempted or 0) + output.num_preempted
        for name in SPECULATION_COUNTERS:
            if name in extra:
                self.counters[name] = self.counters.get(name, 0) + int(extra[name])
        return None if first is None else str(first)


def finish_type(reason: str | None, ids: Sequence[int], stop_ids: Sequence[int]) -> FinishType:
    """Return the reason why the server stopped.

    Args:
        reason: verl's `stop_reason`. SGLang states the reason; for vLLM's "completed", the last id decides.
        ids: Sampled token ids.
        stop_ids: Stop tokens of the request.
    """
    if reason in ("abort", "aborted"):
        return FinishType.ABORT
    if reason == "stop" or (reason != "length" and bool(ids) and ids[-1] in stop_ids):
        return FinishType.STOP
    return FinishType.LENGTH


def _logprobs(logprobs: Sequence[float] | None, ids: list[int], finish: FinishType) -> list[float]:
    """Return the log-probabilities, truncating `ids` in place to the same length after an abort."""
    if ids and not logprobs:
        raise EngineUnavailable("verl's server returned no log-probabilities, although they were requested.")
    try:
        _, aligned = align_logprobs(ids, [float(value) for value in logprobs or ()], finish)
    except (ValueError, TypeError) as error:  # a value may be None
        raise EngineUnavailable(f"verl's server returned {error}.") from error
    del ids[len(aligned) :]
    return aligned


def _weight_versions(extra: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the first and last weight version that sampled. verl 0.8 reports one version for both."""
    version = extra.get("global_steps")
    first, last = extra.get("min_global_steps"), extra.get("max_global_steps")
    return version if first is None else first, version if last is None else last


def _to_infra_fault(error: Exception) -> EngineUnavailable | EngineRefused:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
    if isinstance(error, ValueError):  # for example a prompt that exceeds the model's context length
        return EngineRefused(f"verl's server rejected the request: {reason:.300}")
    return EngineUnavailable(f"verl's server failed: {reason:.300}")
