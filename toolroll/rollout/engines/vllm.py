"""Token engine for vLLM.

If the server has `/inference/v1/generate` (vLLM 0.30 or newer with `--enable-scale-out`), aborted calls return the ids
sampled so far, and generations have the version of the weights. Otherwise the engine uses `/v1/completions`, where
aborted calls return no ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from toolroll.errors import EngineRefused
from toolroll.http import AbortNotice, HttpRequest
from toolroll.images import ImageSpan, collapse_images
from toolroll.limiter.settings import ResourceLimits
from toolroll.rollout.engines.base import FinishType, Generation, LogprobsMode, SamplingParams
from toolroll.rollout.engines.http_engine import MAX_CONNECTIONS, HttpTokenEngine, timings_of
from toolroll.rollout.engines.sampling import (
    check_prompt_ids,
    check_prompt_length,
    check_used_prompt,
    make_generation,
    weight_fields,
)

VLLM_FINISH_TYPES = {
    "stop": FinishType.STOP,
    "length": FinishType.LENGTH,
    "abort": FinishType.ABORT,
    "repetition": FinishType.LENGTH,  # the server truncated a repetition, the model did not stop
}


class VLLMEngine(HttpTokenEngine):
    """Token engine for one or several vLLM servers. Any event loop can use it, and it can be pickled.

    The sampling parameters are vLLM's, but with `max_new_tokens` instead of `max_tokens`.

    Args:
        urls: Base URLs, such as `http://127.0.0.1:8000`.
        model: Name of the served model or adapter. The server's first model by default.
        logprobs_mode: The servers' `--logprobs-mode`: `raw_logprobs`, which is vLLM's default, for log-probabilities of
            the model at temperature 1, or `processed_logprobs` for those of the distribution that was sampled from.
        vocab_size: Size of the vocabulary. Prompts with other ids are rejected. By default the server checks them.
        token: API key of the servers (`--api-key`).
        max_connections: Maximum number of connections to each server, for each event loop. Further calls wait.
        keeps_cache: True if the servers keep their prefix cache on purpose when they get new weights.
        limits: Limits of the requests: `ResourceLimits` or its fields. Each attempt uses a slot. It is assumed to cost
            the tokens of the prompt and `max_new_tokens`, which is corrected by the response.

    Raises:
        ConfigError: If a URL, `max_connections` or the limits are invalid, or no URL is given.

    Example:
        async with VLLMEngine("http://127.0.0.1:8000", logprobs_mode="processed_logprobs") as engine:
            params = {"max_new_tokens": 512, "temperature": 1.0}
            generation = await engine.generate("t7/0", prompt_ids, params, affinity="t7")
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        vocab_size: int | None = None,
        token: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        keeps_cache: bool = False,
        limits: ResourceLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            urls,
            vocab_size=vocab_size,
            token=token,
            max_connections=max_connections,
            keeps_cache=keeps_cache,
            limits=limits,
        )
        self.logprobs_mode = logprobs_mode
        self._model = {} if model is None else {"model": model}
        self._has_tokens_api = True
        """False after a server responded that it has no `/inference/v1/generate`."""

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan], **options: Any
    ) -> Generation:
        check_prompt_ids(prompt_ids, self._vocab_size)
        params = {**params, "logprobs": 0, "skip_special_tokens": False}
        params["max_tokens"] = params.pop("max_new_tokens")

        def tokens_body(attempt_id: str) -> dict[str, Any]:
            prompt = {"token_ids": collapse_images(prompt_ids, images)} | _image_fields(images)
            return {"request_id": attempt_id, **self._model, **prompt, "sampling_params": params}

        def completions_body(attempt_id: str) -> dict[str, Any]:
            prompt = {"prompt": list(prompt_ids), "return_token_ids": True, "return_tokens_as_token_ids": True}
            return {"request_id": attempt_id, **self._model, **prompt, **params}

        parse_completion = partial(_parse_completion, prompt_length=len(prompt_ids))
        parse_tokens = partial(_parse_tokens, prompt_ids=prompt_ids)
        completions_request = HttpRequest("/v1/completions", parse_completion, body=completions_body, **options)
        if self._has_tokens_api:
            tokens_request = HttpRequest(
                "/inference/v1/generate", parse_tokens, body=tokens_body, abort_notice=_abort_notice, **options
            )
            try:
                return await self._generate(tokens_request)
            except EngineRefused as error:
                if error.status != 404:
                    raise
            self._has_tokens_api, completions_request.aborted = False, tokens_request.aborted
        if images:
            raise EngineRefused(
                f"{self._http.urls[0]} has no /inference/v1/generate, which images need. Start it with "
                "vllm serve --enable-scale-out."
            )
        return await self._generate(completions_request)

    def _abort_notices(self, attempt_ids: Sequence[str]) -> Iterable[tuple[Sequence[str], AbortNotice]]:
        return [(attempt_ids, _abort_notice(*attempt_ids))]


def _image_fields(images: Sequence[ImageSpan]) -> dict[str, Any]:
    """Return the fields of a request with images. Its answer contains the ids of the prompt."""
    if not images:
        return {}
    parts = [{"type": "image_url", "url": span.image.url, "uuid": span.image.hash} for span in images]
    return {"content_parts": parts, "return_token_ids": True}


def _parse_tokens(content: bytes, request: HttpRequest[Any], *, prompt_ids: Sequence[int]) -> Generation:
    response = orjson.loads(content)
    check_used_prompt(prompt_ids, response.get("prompt_token_ids"))
    [choice] = response["choices"]
    entries = choice["logprobs"]["content"] or ()
    logprobs, logprob_ids = [entry["logprob"] for entry in entries], [entry.get("token_id") for entry in entries]
    known_ids = None if None in logprob_ids else logprob_ids
    return _generation(response, choice, logprobs, known_ids, request, len(prompt_ids))


def _parse_completion(content: bytes, request: HttpRequest[Any], *, prompt_length: int) -> Generation:
    response = orjson.loads(content)
    [choice] = response["choices"]
    if choice.get("token_ids") is None:
        raise ValueError("no token_ids. Update vLLM to a version that supports return_token_ids")
    names = choice["logprobs"].get("tokens") or ()
    prefix = "token_id:"
    are_ids = all(name.startswith(prefix) for name in names)
    logprob_ids = [int(name.removeprefix(prefix)) for name in names] if are_ids else None
    return _generation(response, choice, choice["logprobs"]["token_logprobs"], logprob_ids, request, prompt_length)


def _generation(
    response: Any,
    choice: Any,
    logprobs: list[float],
    logprob_ids: list[int] | None,
    request: HttpRequest[Any],
    prompt_length: int,
) -> Generation:
    finish = VLLM_FINISH_TYPES[choice["finish_reason"]]
    usage = response.get("usage") or {}
    check_prompt_length(prompt_length, usage.get("prompt_tokens"))
    timings = timings_of(request, cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    weights = weight_fields(choice.get("weight_versions"))
    fields = {"logprob_ids": logprob_ids, "endpoint": request.url, "timings": timings, **weights}
    return make_generation(choice["token_ids"], logprobs, finish, **fields)


def _abort_notice(*attempt_ids: str) -> AbortNotice:
    names = [f"generate-tokens-{attempt_id}" for attempt_id in attempt_ids]
    return AbortNotice("/inference/v1/abort_requests", {"request_ids": names})
