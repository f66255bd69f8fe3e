"""Checks of an engine's answer before its tokens become part of a trajectory.

Engines return wrong answers now and then: after a fault in a kernel, a preempted request, a stop string in the middle
of speculated tokens, or new weights with an old cache. A trainer would learn from such tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.tokens import Author, TokenStream

MAX_LOGPROB = 1e-4
"""Largest log-probability. It exceeds 0 only by rounding."""
NO_LOGPROB = -9999.0
"""What vLLM returns in place of a log-probability that it does not have."""


def find_fault(
    generation: Generation,
    tokens: TokenStream,
    sampling_params: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    *,
    may_keep_cache: bool = False,
) -> str | None:
    """Find what is wrong with an engine's answer.

    Args:
        generation: The answer.
        tokens: Tokens of the trajectory before it.
        sampling_params: Parameters with which it was sampled.
        decode: Function that returns the text of ids.
        may_keep_cache: True if the engine keeps its prefix cache on purpose when it gets new weights.

    Returns:
        A description of the fault, or None.
    """
    return (
        _logprobs_fault(generation.logprobs)
        or _stop_fault(generation, sampling_params, decode)
        or (None if may_keep_cache else _cache_fault(generation, tokens))
    )


def _logprobs_fault(logprobs: Sequence[float | None] | None) -> str | None:
    for position, logprob in enumerate(logprobs or ()):
        if not isinstance(logprob, int | float) or not math.isfinite(logprob):
            return f"log-probability {position} is {logprob}"
        if logprob > MAX_LOGPROB or logprob <= NO_LOGPROB:
            return f"log-probability {position} is {logprob:g}, which no probability has"
    return None


def _stop_fault(
    generation: Generation, sampling_params: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
) -> str | None:
    """Find ids behind the end of the turn."""
    earlier = generation.ids[:-1]
    if generation.finish is FinishType.ABORT or sampling_params.get("ignore_eos"):
        return None
    stop_ids = set(sampling_params.get("stop_token_ids") or ())
    position = next((index for index, token_id in enumerate(earlier) if token_id in stop_ids), None)
    if position is not None:
        return f"{len(earlier) - position} ids follow the stop token {earlier[position]}"
    stops = sampling_params.get("stop") or ()
    if not stops or sampling_params.get("min_new_tokens") or sampling_params.get("min_tokens"):
        return None  # an engine ignores stop texts before the minimum
    text = decode(earlier)
    stop = next((stop for stop in ([stops] if isinstance(stops, str) else stops) if stop and stop in text), None)
    return None if stop is None else f"ids follow the stop text {stop!r}"


def _cache_fault(generation: Generation, tokens: TokenStream) -> str | None:
    """Find a prompt that was continued from the cache of other weights.

    The cache may contain the first prompt, which the samples of a group share, but not yet a turn of this trajectory:
    all of its turns were sampled by other weights.
    """
    sampled = [span for span in tokens.spans if span.author is Author.MODEL]
    versions = {span.weight_version for span in sampled}
    version, cached = generation.weight_version, generation.timings.cached_tokens or 0
    if not sampled or version is None or None in versions or version in versions or cached <= sampled[0].end:
        return None
    return (
        f"{cached} tokens of the prompt came from the cache of earlier weights. Reset the prefix cache after each "
        "update of the weights"
    )
