"""Sampling: what engines that take ids check before they ask, and how they read what they get, alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import EngineRefused
from toolroll.rollout.engines.engine import Finish, SamplingParams


def most_tokens(sampling_params: SamplingParams) -> int:
    """How many tokens may be sampled. It must be said: each engine has a small default of its own."""
    most = sampling_params.get("max_new_tokens")
    if not isinstance(most, int) or most < 1:
        raise EngineRefused(
            f"max_new_tokens is {most!r}, where 1 is the least. Is the prompt as long as the context already?"
        )
    if sampling_params.get("n", 1) != 1:
        raise EngineRefused(f"n is {sampling_params['n']!r}: ask once for each sample.")
    return most


def check_ids(ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse a prompt that isn't one. An id outside the vocabulary ends here: some servers die of it."""
    if not ids:
        raise EngineRefused("The prompt is empty; an engine needs a token to go on from.")
    least, most = min(ids), max(ids)
    if least < 0 or (vocab_size is not None and most >= vocab_size):
        wrong, last = least if least < 0 else most, "…" if vocab_size is None else vocab_size - 1
        raise EngineRefused(
            f"The prompt has the id {wrong}; the engine's go from 0 to {last}. Is the tokenizer the model's own?"
        )


def paired(ids: list[int], logprobs: list[float], finish: Finish) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of one length. Only an abort may come between the two."""
    if len(ids) != len(logprobs) and finish is not Finish.ABORT:
        raise ValueError(f"{len(ids)} ids, but {len(logprobs)} log-probabilities")
    whole = min(len(ids), len(logprobs))
    return ids[:whole], logprobs[:whole]


def weights_of(spans: Sequence[Mapping[str, Any]] | None, latest: str | None = None) -> dict[str, Any]:
    """The weights that sampled a generation, as it has them: those of its first token, and where others took over."""
    if not spans:
        return {"weight_version": latest}
    changes = tuple((int(span["start"]), str(span["version"])) for span in spans[1:])
    return {"weight_version": str(spans[0]["version"]), "weight_changes": changes}
