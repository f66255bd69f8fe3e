"""Limits and sampling parameters from TRL's GRPOConfig, so that the trainer and the engine use the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolroll.errors import ConfigError
from toolroll.rollout.limits import Limits


def resolve_limits(limits: Limits | Mapping[str, Any] | None, args: Any) -> Limits | dict[str, Any]:
    """Return the limits, with TRL's `max_completion_length` as the default of `max_response_len`.

    Args:
        limits: The user's limits.
        args: TRL's GRPOConfig.
    """
    if args.max_completion_length is None:
        return limits if isinstance(limits, Limits) else dict(limits or {})
    defaults = {"max_response_len": args.max_completion_length}
    if isinstance(limits, Limits):
        return limits if "max_response_len" in limits.model_fields_set else limits.model_copy(update=defaults)
    return {**defaults, **(limits or {})}


def resolve_sampling_params(params: Mapping[str, Any], args: Any, logprobs_mode: str) -> dict[str, Any]:
    """Return the trainer's sampling parameters under the engines' names, together with the user's.

    Args:
        params: The user's sampling parameters.
        args: TRL's GRPOConfig.
        logprobs_mode: Kind of log-probabilities that the engine returns.

    Raises:
        ConfigError: If the engine's log-probabilities would not be comparable with TRL's.
    """
    temperature = float(args.temperature)
    if float(params.get("temperature", temperature)) != temperature:
        raise ConfigError(
            f"sampling_params has temperature={params['temperature']}, but GRPOConfig has {temperature}, at which TRL "
            "computes log-probabilities. Set the temperature only in GRPOConfig."
        )
    if logprobs_mode == "raw_logprobs" and temperature != 1.0:
        raise ConfigError(
            f"The engine returns raw_logprobs, but TRL computes log-probabilities at temperature {temperature}. Start "
            "vLLM with --logprobs-mode processed_logprobs and pass VLLMEngine(logprobs_mode='processed_logprobs'), or "
            "sample at temperature 1."
        )
    resolved: dict[str, Any] = {"temperature": temperature}
    neutral = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
    resolved |= {name: value for name, off in neutral.items() if (value := getattr(args, name)) not in off}
    return {**resolved, **params}
