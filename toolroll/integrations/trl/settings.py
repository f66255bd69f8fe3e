"""What TRL's config says already: how to sample, and how long a completion may be.

Said once, in GRPOConfig, it holds for the trainer and the engine alike; where the two can't agree, it is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.errors import ConfigError
from toolroll.rollout.limits import Limits


def limits_of(given: Limits | Mapping[str, Any] | None, args: Any) -> Limits | dict[str, Any]:
    """The limits that were given, with TRL's length of a completion where they have none of their own."""
    if args.max_completion_length is None:
        return given if isinstance(given, Limits) else dict(given or {})
    by_trl = {"max_response_len": args.max_completion_length}
    if isinstance(given, Limits):
        return given if "max_response_len" in given.model_fields_set else given.model_copy(update=by_trl)
    return {**by_trl, **(given or {})}


def sampling_params_of(given: Mapping[str, Any], args: Any, logprobs_of: str) -> dict[str, Any]:
    """The trainer's sampling parameters, as engines have them, and those that were given beside them."""
    temperature = float(args.temperature)
    if float(given.get("temperature", temperature)) != temperature:
        raise ConfigError(
            f"sampling_params has temperature={given['temperature']}, and GRPOConfig {temperature}, by which TRL "
            "computes log-probabilities. Set it in GRPOConfig alone."
        )
    if logprobs_of == "raw" and temperature != 1.0:
        raise ConfigError(
            f"The engine's log-probabilities are the model's own, and TRL's are at temperature {temperature}: they "
            "can't be compared. Start vLLM with --logprobs-mode processed_logprobs and say "
            "VLLMEngine(logprobs_of='scaled'), or sample at temperature 1."
        )
    params: dict[str, Any] = {"temperature": temperature}
    for name, off in {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}.items():
        if (value := getattr(args, name)) not in off:
            params[name] = value
    if args.repetition_penalty not in (1.0, None):
        params["repetition_penalty"] = args.repetition_penalty
    return {**params, **given}
