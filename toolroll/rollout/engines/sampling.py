"""Validation of requests, and parsing of results, common to all token engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import EngineRefused
from toolroll.rollout.engines.base import FinishType, Generation, SamplingParams


def check_sampling_params(sampling_params: SamplingParams) -> None:
    """Check the parameters that all engines share. The engines have different, small defaults for `max_new_tokens`.

    Raises:
        EngineRefused: If `max_new_tokens` is missing or invalid, or several samples are requested.
    """
    max_new_tokens = sampling_params.get("max_new_tokens")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise EngineRefused(
            f"Invalid max_new_tokens: {max_new_tokens!r}. Expected at least 1. Check that the prompt does not fill the "
            "context."
        )
    if sampling_params.get("n", 1) != 1:
        raise EngineRefused(f"Invalid n: {sampling_params['n']!r}. Send one request for each sample.")


def check_prompt_ids(ids: Sequence[int], vocab_size: int | None) -> None:
    """Check a prompt before it is sent: ids outside the vocabulary crash some servers.

    Raises:
        EngineRefused: If the prompt is empty or contains an id outside the vocabulary.
    """
    if not ids:
        raise EngineRefused("The prompt is empty. An engine needs at least one token.")
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        invalid, last = lowest if lowest < 0 else highest, "…" if vocab_size is None else vocab_size - 1
        raise EngineRefused(
            f"Invalid token id in the prompt: {invalid}. The vocabulary has ids from 0 to {last}. Check that the "
            "tokenizer is that of the model."
        )


def align_logprobs(ids: list[int], logprobs: list[float], finish: FinishType) -> tuple[list[int], list[float]]:
    """Return ids and log-probabilities, truncated to the same length after an abort.

    Raises:
        ValueError: If the lengths differ without an abort.
    """
    if len(ids) != len(logprobs) and finish is not FinishType.ABORT:
        raise ValueError(f"{len(ids)} ids, but {len(logprobs)} log-probabilities")
    length = min(len(ids), len(logprobs))
    return ids[:length], logprobs[:length]


def make_generation(
    ids: list[int],
    logprobs: list[float],
    finish: FinishType,
    *,
    logprob_ids: Sequence[int] | None = None,
    **fields: Any,
) -> Generation:
    """Return the generation of a server's response.

    Args:
        ids: Sampled ids.
        logprobs: Log-probabilities, as in `align_logprobs`.
        finish: Reason why the server stopped.
        logprob_ids: Ids that the log-probabilities belong to, if the server reports them.
        **fields: Further fields of the generation.

    Raises:
        ValueError: If the numbers differ without an abort, or a log-probability belongs to another id.
    """
    ids, logprobs = align_logprobs(ids, logprobs, finish)
    for position, (sampled, beside) in enumerate(zip(ids, logprob_ids or (), strict=False)):
        if sampled != beside:
            raise ValueError(f"log-probability {position} belongs to id {beside}, but id {sampled} was sampled")
    return Generation(ids=ids, logprobs=logprobs, finish=finish, **fields)


def check_prompt_length(sent: int, received: int | None) -> None:
    """Check that a server used the whole prompt.

    Args:
        sent: Number of ids sent.
        received: Number of ids that the server reports, or None.

    Raises:
        ValueError: If the numbers differ.
    """
    if received is not None and received != sent:
        raise ValueError(f"the prompt had {sent} ids, but the server used {received}")


def check_used_prompt(sent: Sequence[int], received: Sequence[int] | None) -> None:
    """Check that a server used the prompt as it is, with as many placeholders for images.

    Args:
        sent: Ids of the prompt.
        received: Ids that the server reports, or None.

    Raises:
        ValueError: If they differ.
    """
    if received is None:
        return
    check_prompt_length(len(sent), len(received))
    pairs = enumerate(zip(sent, received, strict=True))
    position = next((index for index, (left, right) in pairs if left != right), None)
    if position is not None:
        raise ValueError(f"id {position} of the prompt was {sent[position]}, but the server used {received[position]}")


def weight_fields(spans: Sequence[Mapping[str, Any]] | None, latest: str | None = None) -> dict[str, Any]:
    """Return the fields of a `Generation` about the weights.

    Args:
        spans: Start and version of each part of the generation, if the server reports them.
        latest: Version at the end of the generation, used without spans.
    """
    if not spans:
        return {"weight_version": latest}
    changes = tuple((int(span["start"]), str(span["version"])) for span in spans[1:])
    return {"weight_version": str(spans[0]["version"]), "weight_changes": changes}
