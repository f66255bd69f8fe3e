"""Token engine for SGLang, which uses the `/generate` endpoint."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar

import orjson

from toolroll.errors import EngineRefused
from toolroll.http import AbortNotice, HttpRequest, RetryPolicy
from toolroll.images import ImageSpan, collapse_images
from toolroll.rollout.engines.base import FinishType, Generation, LogprobsMode, SamplingParams
from toolroll.rollout.engines.http_engine import HttpTokenEngine, retry_policy, timings_of
from toolroll.rollout.engines.sampling import check_prompt_ids, check_prompt_length, make_generation, weight_fields
from toolroll.schemas import JsonDict

logger = logging.getLogger(__name__)

T = TypeVar("T")

WEIGHT_UPDATE_TIMEOUT_S = 1800.0
"""Timeout for a server to load weights. Hundreds of gigabytes from a shared disk take minutes."""

NAN_MATCHED = "NaN happened"
"""What SGLang reports as the matched stop token if it sampled an id outside the vocabulary and replaced it."""


class SGLangEngine(HttpTokenEngine):
    """Token engine for one or several SGLang servers.

    The ids of a generation include the stop token, and each has its log-probability under the distribution that it was
    sampled from. Aborted calls return the ids sampled so far. Any event loop can use the engine, and it can be pickled.
    The sampling parameters are SGLang's. Unknown ones are rejected.

    Args:
        urls: Base URLs, such as `http://127.0.0.1:30000`.
        vocab_size: Size of the vocabulary. Prompts with other ids are rejected because they crash SGLang. Read from the
            server by default.
        token: API key of the servers (`--api-key`).
        max_connections: Maximum number of connections to each server, for each event loop. Further calls wait.
        keeps_cache: True if the servers keep their prefix cache on purpose when they get new weights.
        limits: Limits of the requests: `ResourceLimits` or its fields. Each attempt uses a slot. It is assumed to cost
            the tokens of the prompt and `max_new_tokens`, which is corrected by the response.

    Raises:
        ConfigError: If a URL, `max_connections` or the limits are invalid, or no URL is given.

    Example:
        async with SGLangEngine(["http://10.0.0.1:30000", "http://10.0.0.2:30000"]) as engine:
            params = {"max_new_tokens": 512, "temperature": 1.0}
            generation = await engine.generate("t7/0", prompt_ids, params, affinity="t7")
    """

    logprobs_mode: LogprobsMode = "processed_logprobs"
    _is_vocab_size_discovered = False

    async def score(self, ids: Sequence[int], *, start: int = 1, deadline: float | None = None) -> list[float]:
        """Compute the log-probabilities of given tokens at temperature 1.

        They are computed in one forward pass, as in a trainer, instead of token by token, as in sampling.

        Args:
            ids: Token ids.
            start: Index of the first token to score.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`. One hour by default.

        Returns:
            The log-probability of each token from `start` on, given all tokens before it.

        Raises:
            EngineUnavailable: If no server returned a result before the retries or the deadline were exhausted.
            EngineRefused: If the ids or `start` are invalid.
            BudgetExhausted: If the budget of the engine's limits is spent.
        """
        if not 1 <= start < len(ids):
            raise EngineRefused(f"Invalid start: {start}. {len(ids)} ids can be scored from 1 to {len(ids) - 1}.")
        params = {"max_new_tokens": 0, "temperature": 1.0}
        # SGLang returns no value for the first token of the requested range.
        body = {"sampling_params": params, "logprob_start_len": start - 1}
        policy = retry_policy(deadline)
        in_slot = self._in_slot(len(ids), lambda _: len(ids), policy.deadline)
        request = self._request(ids, body, _parse_scores, policy=policy, name="score", around_attempt=in_slot)
        return await self._http.send(request)

    async def abort_all(self) -> None:
        """Stop all requests of the servers, including those of other clients. Useful before new weights are loaded."""
        abort_at_servers = self._succeeds_at_all("/abort_request", {"abort_all": True})
        await asyncio.gather(abort_at_servers, self.abort_many(list(self._requests)))

    async def update_weights(self, model_path: str | PathLike[str], version: str) -> None:
        """Load weights from a directory into all servers.

        Each server finishes its current requests first and starts no others. Pause the rollout, otherwise the update
        waits for the longest request.

        Args:
            model_path: Directory of the weights, which must have this path on all servers.
            version: Version of the weights. Later generations have it as `weight_version`.

        Raises:
            EngineUnavailable: If a server did not load the weights. The other servers have loaded them.
        """
        body = {"model_path": fspath(model_path), "weight_version": version}
        # A request that has just ended stays in SGLang's batch for a moment, during which the prefix cache cannot be
        # flushed. The new weights would then continue from the cached states of the old ones.
        await self._post_to_all(
            "/update_weights_from_disk", body, timeout_s=WEIGHT_UPDATE_TIMEOUT_S, busy_text="cache was not flushed"
        )

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan], **options: Any
    ) -> Generation:
        params = {**params, "skip_special_tokens": False, "no_stop_trim": True}
        body = {"sampling_params": params, "logprob_start_len": -1}  # no log-probabilities of the prompt
        parse = partial(_parse_generation, prompt_length=len(prompt_ids))
        if images:
            prompt_ids = collapse_images(prompt_ids, images)
            body["image_data"] = [span.image.url for span in images]
        request = self._request(prompt_ids, body, parse, abort_notice=_abort_notice, **options)
        return await self._generate(request)

    def _abort_notices(self, attempt_ids: Sequence[str]) -> Iterable[tuple[Sequence[str], AbortNotice]]:
        return [([attempt_id], _abort_notice(attempt_id)) for attempt_id in attempt_ids]

    def _request(
        self, ids: Sequence[int], fields: JsonDict, parse: Callable[[bytes, HttpRequest[Any]], T], **options: Any
    ) -> HttpRequest[T]:
        """Return a `/generate` request, with further fields of its body and further options of `HttpRequest`."""

        async def check_vocabulary() -> None:
            check_prompt_ids(ids, await self._discover_vocab_size(options["policy"]))

        def body(attempt_id: str) -> JsonDict:
            return {"rid": attempt_id, "input_ids": list(ids), "return_logprob": True, **fields}

        return HttpRequest("/generate", parse, body=body, prepare=check_vocabulary, **options)

    async def _discover_vocab_size(self, policy: RetryPolicy) -> int | None:
        """Return the size of the vocabulary, or None if it is unknown. The server is asked once."""
        if self._vocab_size is None and not self._is_vocab_size_discovered:
            pool = await self._http.pool()
            async with pool.discovery_lock:
                if not self._is_vocab_size_discovered:
                    self._vocab_size = await self._fetch_vocab_size(policy)
                    self._is_vocab_size_discovered = True
        return self._vocab_size

    async def _fetch_vocab_size(self, policy: RetryPolicy) -> int | None:
        """Read the size of the vocabulary from an error message, the only place where SGLang reports it.

        SGLang rejects a logit bias for an id outside the vocabulary before it samples. Old versions without
        `/model_info` do not check the id and may crash, so they are not asked.
        """
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}}
        try:
            await self._http.send(HttpRequest("/model_info", _ignore, policy, name="model"))
            await self._http.send(HttpRequest("/generate", _ignore, policy, name="vocabulary", body=lambda _: body))
        except EngineRefused as error:
            if match := re.search(r"keys in \[0, (\d+)\]", str(error)):
                return int(match[1]) + 1
            if error.status in (401, 403):
                raise
        logger.warning(
            "%s does not report the size of its vocabulary. Set vocab_size: an id outside it crashes the server.",
            self._http.urls[0],
        )
        return None


def _parse_generation(content: bytes, request: HttpRequest[Any], *, prompt_length: int) -> Generation:
    response = orjson.loads(content)
    meta = response["meta_info"]
    finish = FinishType(meta["finish_reason"]["type"])
    if meta["finish_reason"].get("matched") == NAN_MATCHED:
        raise ValueError("the model's output was NaN, and the server replaced the sampled id")
    check_prompt_length(prompt_length, meta.get("prompt_tokens"))
    entries = meta["output_token_logprobs"]
    logprobs, logprob_ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    weights = weight_fields(meta.get("weight_versions"), meta.get("weight_version"))
    timings = timings_of(request, queue=meta.get("queue_time"), cached_tokens=meta.get("cached_tokens"))
    fields = {"logprob_ids": logprob_ids, "endpoint": request.url, "timings": timings, **weights}
    return make_generation(response["output_ids"], logprobs, finish, **fields)


def _parse_scores(content: bytes, request: HttpRequest[Any]) -> list[float]:
    return [float(entry[0]) for entry in orjson.loads(content)["meta_info"]["input_token_logprobs"][1:]]


def _ignore(content: bytes, request: HttpRequest[Any]) -> None:
    pass


def _abort_notice(attempt_id: str) -> AbortNotice:
    # SGLang stops all requests whose ids start with `rid`. No attempt id is a prefix of another.
    return AbortNotice("/abort_request", {"rid": attempt_id})
