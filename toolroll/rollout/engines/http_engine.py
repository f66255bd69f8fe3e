"""Base classes of the engines that are clients of HTTP servers.

`HttpTokenEngine` keeps a registry of its requests, so that they can be aborted anywhere: while they wait for a
connection, between two attempts, or at a server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import orjson

from toolroll.errors import EngineRefused, EngineUnavailable, validate
from toolroll.http import AbortNotice, AttemptFailed, HttpClient, HttpRequest, HttpService, RequestAborted, RetryPolicy
from toolroll.http.failures import PARSE_ERRORS, RETRYABLE_STATUSES, error_detail
from toolroll.http.pool import EndpointPool
from toolroll.images import ImageSpan
from toolroll.limiter.ledger.policy import TOKENS
from toolroll.limiter.limited import LimitedUse
from toolroll.limiter.settings import ResourceLimits
from toolroll.rollout.engines.base import FinishType, Generation, GenerationTimings, SamplingParams
from toolroll.rollout.engines.sampling import check_sampling_params, make_generation

logger = logging.getLogger(__name__)

T = TypeVar("T")
AroundAttempt = Callable[[Callable[[], Awaitable[T]]], Awaitable[T]]
"""Type of `HttpRequest.around_attempt`."""

MAX_CONNECTIONS = 1024
"""Default limit of connections, for each server and event loop. More than engines run at a time, so that requests are
queued by the engine."""
DEFAULT_REQUEST_TIMEOUT_S = 3600.0
"""Timeout of requests without a deadline."""
PROBE_TIMEOUT_S = 10.0
"""Timeout of requests that do not sample."""
ABORT_GRACE_S = 30.0
"""Time for the servers to return the tokens of aborted requests, even of ten thousand at once."""
ABORT_RESEND_INTERVAL_S = 0.2
"""Interval after which an abort notice is sent again. Doubled each time."""
ABORT_POLL_INTERVAL_S = 0.02
BUSY_RETRY_DELAYS_S = (0.1, 0.5, 2.0, 5.0)
"""Delays before a request is sent again to a server that was busy."""
DISCOVERY_RETRY_INTERVAL_S = 30.0
"""Interval at which all servers are asked for the context length again, while some do not answer."""
CONTEXT_RESERVE_TOKENS = 8
"""Tokens subtracted from the reported context length. Servers reserve some, and not all report how many."""

ENGINE = HttpService(
    name="server", example_url="http://127.0.0.1:30000", unavailable=EngineUnavailable, rejected=EngineRefused
)


class HttpEngine:
    """Engine with one or several HTTP servers.

    Args:
        urls: Base URLs.
        token: Bearer token.
        max_connections: Maximum number of connections to each server, for each event loop.
        limits: Limits of the requests. Each attempt uses a slot. The default name of the resource are the URLs.

    Raises:
        ConfigError: If a URL, `max_connections` or the limits are invalid, or no URL is given.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None,
        max_connections: int,
        limits: ResourceLimits | Mapping[str, Any] | None = None,
    ) -> None:
        self._http = HttpClient(urls, ENGINE, token=token, max_connections=max_connections)
        self.limits = None if limits is None else validate(ResourceLimits, limits, "limits")
        """Limits of the requests."""

    @property
    def resource(self) -> str:
        """Name of the limited resource if `limits` have none."""
        return ", ".join(sorted(self._http.urls))

    async def close(self) -> None:
        """Close the connections of this event loop. The engine can be used again."""
        await self._http.close()

    def unreachable_s(self) -> float | None:
        """Return for how long no server has answered, in seconds, or None if one answers."""
        return self._http.unreachable_s()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _in_slot(
        self, estimated_tokens: int, used_tokens: Callable[[T], int | None], deadline: float
    ) -> AroundAttempt[T] | None:
        """Return the `around_attempt` that makes each attempt in a slot, or None if the engine has no limits.

        Args:
            estimated_tokens: Number of tokens that an attempt is assumed to cost.
            used_tokens: Returns the number of tokens that a result has cost, or None if it is unknown.
            deadline: Deadline of the request.
        """
        if self.limits is None:
            return None
        limits, cost = self.limits, {TOKENS: float(estimated_tokens)}

        async def around_attempt(attempt: Callable[[], Awaitable[T]]) -> T:
            async with LimitedUse(limits, self.resource, cost=cost, deadline=deadline) as use:
                try:
                    result = await attempt()
                except AttemptFailed as failure:
                    if failure.endpoint_down or failure.status in RETRYABLE_STATUSES:
                        use.slot.reject(retry_after=failure.retry_after_s)
                    if failure.endpoint_down or failure.status is not None:
                        use.slot.correct(**{TOKENS: 0.0})
                    raise
                except EngineRefused:
                    use.slot.correct(**{TOKENS: 0.0})
                    raise
                if (tokens := used_tokens(result)) is not None:
                    use.slot.correct(**{TOKENS: float(tokens)})
                return result

        return around_attempt


class HttpTokenEngine(HttpEngine):
    """Token engine with one or several HTTP servers.

    Args:
        urls: Base URLs.
        vocab_size: Size of the vocabulary, if known. Prompts with other ids are rejected.
        token: Bearer token.
        max_connections: Maximum number of connections to each server, for each event loop.
        keeps_cache: True if the servers keep their prefix cache on purpose when they get new weights.
        limits: Limits of the requests. Each attempt uses a slot. It is assumed to cost the tokens of the prompt and
            `max_new_tokens`, which is corrected by the response.

    Raises:
        ConfigError: If a URL, `max_connections` or the limits are invalid, or no URL is given.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        vocab_size: int | None = None,
        token: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        keeps_cache: bool = False,
        limits: ResourceLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(urls, token=token, max_connections=max_connections, limits=limits)
        self.keeps_cache = keeps_cache
        self._vocab_size = vocab_size
        self._requests: defaultdict[str, set[HttpRequest[Generation]]] = defaultdict(set)
        """Requests in flight, by request id."""
        self._context_length: int | None = None
        self._context_length_expires_at = 0.0

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
        """Sample a completion of a prompt.

        Args:
            request_id: Id of this call, for `abort` and for messages.
            prompt_ids: Token ids of the prompt.
            sampling_params: Sampling parameters by the server's names, but always with `max_new_tokens`.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`. One hour by default.
            affinity: Calls with the same affinity go to the same server, whose cache contains their common prefix.
            images: Ranges of images in the prompt, as many placeholders as the model sees.

        Returns:
            The sampled tokens.

        Raises:
            EngineUnavailable: If no server returned a completion before the retries or the deadline were exhausted.
            EngineRefused: If the prompt or a parameter is invalid.
            BudgetExhausted: If the budget of the engine's limits is spent.
        """
        check_sampling_params(sampling_params)
        policy, prompt_length = retry_policy(deadline), len(prompt_ids)

        def used_tokens(generation: Generation) -> int:
            return prompt_length + len(generation.ids)

        estimate = prompt_length + sampling_params["max_new_tokens"]
        around_attempt = self._in_slot(estimate, used_tokens, policy.deadline)
        options = {"policy": policy, "name": request_id, "affinity": affinity, "around_attempt": around_attempt}
        return await self._sample(prompt_ids, sampling_params, images, **options)

    async def abort(self, request_id: str) -> None:
        """Stop a call, which then returns the ids sampled so far with `FinishType.ABORT`.

        Args:
            request_id: Id of the call. Unknown ids are ignored.
        """
        await self.abort_many([request_id])

    async def abort_many(self, request_ids: Collection[str]) -> None:
        """Stop several calls, and wait until they end, for at most `ABORT_GRACE_S`.

        Args:
            request_ids: Ids of the calls. Unknown ids are ignored.
        """
        pool = await self._http.pool()
        pending = [request for request_id in request_ids for request in self._requests.get(request_id, ())]
        for request in pending:
            request.abort(ABORT_GRACE_S if request.abort_notice else 0.0)
        notices: dict[str, asyncio.Task[None]] = {}
        interval_s, end = ABORT_RESEND_INTERVAL_S, time.monotonic() + ABORT_GRACE_S
        while pending and (now := time.monotonic()) < end:
            self._send_notices(pool, pending, notices)  # repeated because a notice can overtake its request
            next_round = min(now + interval_s, end)
            while pending and time.monotonic() < next_round:
                await asyncio.sleep(ABORT_POLL_INTERVAL_S)
                pending = [request for request in pending if not request.done]
            interval_s *= 2

    async def context_length(self) -> int | None:
        """Return the maximum number of ids of a prompt and its completion.

        The servers are asked once, or again after a while if some did not answer.

        Returns:
            The minimum over all servers, or None if the servers do not report it.
        """
        pool = await self._http.pool()
        async with pool.discovery_lock:
            if time.monotonic() >= self._context_length_expires_at:
                lengths = await asyncio.gather(*map(self._fetch_context_length, self._http.urls))
                reported = [length for length in lengths if length]
                self._context_length = min(reported) - CONTEXT_RESERVE_TOKENS if reported else None
                if None not in lengths:
                    self._context_length_expires_at = math.inf
                elif reported:  # a server that does not answer must not delay every trajectory
                    self._context_length_expires_at = time.monotonic() + DISCOVERY_RETRY_INTERVAL_S
        return self._context_length

    async def health(self) -> dict[str, bool]:
        """Check all servers. With SGLang this takes seconds because each server samples a token.

        Returns:
            True for each server that is healthy, by URL.
        """
        return await self._succeeds_at_all("/health")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_requests": defaultdict(set), "_context_length_expires_at": 0.0}

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan], **options: Any
    ) -> Generation:
        """Send a request for a completion. The options are those of `HttpRequest`."""
        raise NotImplementedError

    def _abort_notices(self, attempt_ids: Sequence[str]) -> Iterable[tuple[Sequence[str], AbortNotice]]:
        """Return the notices that stop attempts at one server, each with the ids that it covers."""
        raise NotImplementedError

    async def _generate(self, request: HttpRequest[Generation]) -> Generation:
        """Send a request that can be aborted. The result of an abort without a response has no ids."""
        same_id = self._requests[request.name]
        same_id.add(request)
        try:
            return await self._http.send(request)
        except RequestAborted as aborted:
            fields: dict[str, Any] = {"endpoint": request.url, "timings": timings_of(request)}
            return make_generation([], [], FinishType.ABORT, problem=str(aborted), **fields)
        finally:
            same_id.discard(request)
            if not same_id:
                self._requests.pop(request.name, None)

    def _send_notices(
        self, pool: EndpointPool, requests: list[HttpRequest[Generation]], notices: dict[str, asyncio.Task[None]]
    ) -> None:
        """Send abort notices for the current attempts, except for those whose last one in `notices` is in transit."""
        attempts: defaultdict[str, list[str]] = defaultdict(list)
        for request in requests:
            sent = notices.get(request.attempt_id or "")
            if request.attempt_id and request.abort_notice and (sent is None or sent.done()):
                attempts[request.url].append(request.attempt_id)
        for url, attempt_ids in attempts.items():
            for batch, notice in self._abort_notices(attempt_ids):
                notices.update(dict.fromkeys(batch, pool.notify(url, notice)))

    async def _fetch_context_length(self, url: str) -> int | None:
        """Return the context length of one server, 0 if the server does not report it, or None if it is down."""
        try:
            response = await self._http.send_once(url, "/v1/models", timeout_s=PROBE_TIMEOUT_S)
            models = orjson.loads(response.content)["data"]
            return min(int(model["max_model_len"]) for model in models if model.get("max_model_len"))
        except AttemptFailed:
            return None
        except PARSE_ERRORS:
            return 0

    async def _succeeds_at_all(self, path: str, body: dict[str, Any] | None = None) -> dict[str, bool]:
        """Send a request to every server, without retries. Return by URL whether the status was 200."""

        async def succeeds(url: str) -> bool:
            try:
                return (await self._http.send_once(url, path, body, timeout_s=PROBE_TIMEOUT_S)).status == 200
            except AttemptFailed:
                return False

        urls = self._http.urls
        return dict(zip(urls, await asyncio.gather(*map(succeeds, urls)), strict=True))

    async def _post_to_all(self, path: str, body: dict[str, Any], *, timeout_s: float, busy_text: str) -> None:
        """Post to every server and wait for all of them.

        Args:
            path: Path below the base URL.
            body: JSON body.
            timeout_s: Timeout for each server.
            busy_text: Text in the response of a server that is busy, which gets the request again.

        Raises:
            EngineUnavailable: If the request failed at a server.
        """

        async def post(url: str) -> str | None:
            deadline = time.monotonic() + timeout_s
            for delay_s in (*BUSY_RETRY_DELAYS_S, None):
                remaining_s = max(0.0, deadline - time.monotonic())
                try:
                    response = await self._http.send_once(url, path, body, timeout_s=remaining_s)
                except AttemptFailed as failure:
                    return f"{url}{path}: {failure}. Check that the server is running."
                if response.status == 200:
                    return None
                error = f"{url}{path}: HTTP {response.status}: {error_detail(response.content)}"
                if delay_s is None or busy_text.encode() not in response.content:
                    break
                logger.info("%s; retrying in %g s", error, delay_s)
                await asyncio.sleep(delay_s)
            return error

        errors = [error for error in await asyncio.gather(*map(post, self._http.urls)) if error is not None]
        if errors:
            raise EngineUnavailable(f"{len(errors)} of {len(self._http.urls)} servers failed: {errors[0]}")


def retry_policy(deadline: float | None) -> RetryPolicy:
    """Return the policy of a request with the given deadline, or with the default timeout."""
    return RetryPolicy(deadline=time.monotonic() + DEFAULT_REQUEST_TIMEOUT_S if deadline is None else deadline)


def timings_of(
    request: HttpRequest[Any], *, queue: float | None = None, cached_tokens: int | None = None
) -> GenerationTimings:
    """Return the timings of a request that has just ended."""
    return GenerationTimings(
        total=time.monotonic() - request.created_at,
        queue=queue,
        cached_tokens=cached_tokens,
        attempts=max(1, request.history.attempts),
    )
