"""HTTP client that retries a request until it succeeds, is rejected, or its deadline passes.

Invariants:

- Every request ends by its deadline, even if the server never responds. The wait for a connection counts.
- Only failures that the request did not cause are retried: failed or lost connections, statuses 429, 502, 503 and 504,
  and responses whose parser raises a retryable `AttemptFailed`.
- An attempt that ends without a response (cancelled, timed out, connection lost) is aborted at its server.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeVar
from uuid import uuid4

import aiohttp
import orjson
from yarl import URL

from toolroll._internal.text import hide_credentials
from toolroll.errors import ConfigError, InfraFault
from toolroll.http.endpoints import Endpoint, affinity_endpoint
from toolroll.http.failures import PARSE_ERRORS, AttemptFailed, failure_from_exception, failure_from_status
from toolroll.http.pool import EndpointPool, HttpResponse
from toolroll.http.request import HttpRequest, RequestAborted

T = TypeVar("T")

logger = logging.getLogger(__name__)

MIN_CONNECT_TIMEOUT_S = 0.01


@dataclass(frozen=True, kw_only=True)
class HttpService:
    """The kind of server behind a client, with the errors that the client raises."""

    name: str
    """Name in messages, e.g. "sandbox"."""
    example_url: str
    """Example in messages about invalid URLs."""
    unavailable: Callable[[str], InfraFault]
    """Creates the error for a request that got no response, from the message."""
    rejected: Callable[[str, int], InfraFault]
    """Creates the error for a request that the server rejected, from the message and the HTTP status."""
    hint: str = "Check that the server is running and not overloaded."
    """Last sentence of the message about an unavailable service. `{url}` is replaced."""
    remedies: Mapping[int, str] = field(default_factory=lambda: dict.fromkeys((401, 403), "Check the token."))
    """Last sentence of the message about a rejected request, by HTTP status."""
    connect_timeout_s: float = 10.0
    """Timeout for one connection attempt. Linux repeats a lost SYN after 1, 3 and 7 s."""
    resend_after_close: bool = False
    """If True, requests in flight when the client is closed are sent again over new connections. If False, they
    fail."""


class HttpClient:
    """Client for one or several endpoints of a service.

    Any event loop can use the client. Each loop has separate connections, which are opened when needed and closed by
    `close`, with the client, or with the loop. The client can be pickled; the copy has no connections.

    Args:
        urls: Base URLs. A user name and password in a URL are sent as `Authorization: Basic`, and never appear in
            messages, because `self.urls` does not contain them.
        service: Kind of server.
        token: Sent as `Authorization: Bearer`.
        max_connections: Maximum number of connections to each endpoint, for each event loop. Reduced if the process
            cannot open that many files.

    Raises:
        ConfigError: If a URL or `max_connections` is invalid, or no URL is given.
    """

    def __init__(
        self, urls: str | Sequence[str], service: HttpService, *, token: str | None = None, max_connections: int = 512
    ) -> None:
        self.service = service
        bases = _parse_base_urls(urls, service)
        self.urls = tuple(dict.fromkeys(hide_credentials(base, shown="") for base in bases))
        with_user = [] if token else [url for url in map(URL, bases) if url.user or url.password]
        self._credentials = {str(url.origin()): _basic_auth(url) for url in with_user}
        """Values of the header `Authorization`, by origin."""
        if max_connections < 1:
            raise ConfigError(f"Invalid max_connections: {max_connections}. Expected at least 1.")
        self._max_connections = max_connections
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._pools: dict[asyncio.AbstractEventLoop, EndpointPool] = {}

    async def send(self, request: HttpRequest[T]) -> T:
        """Send a request, with retries, and return the parsed response.

        Args:
            request: Request that has not been sent before.

        Returns:
            The result of `request.parse`.

        Raises:
            RequestAborted: If `request.abort` was called and no response arrived.
            InfraFault: The service's `rejected` error after a 4xx status other than 429, or its `unavailable` error if
                a retry cannot help or the deadline passed.
        """
        pool = await self.pool()
        try:
            now = time.monotonic()
            if not request.policy.last_start > now:  # also if it is NaN
                subject = f"request {request.name}" if request.name else "the request"
                error = self.service.unavailable(f"The deadline passed before {subject} was sent. Allow more time.")
                error.depends_on_deadline = True
                raise error
            if request.aborted:
                raise RequestAborted("aborted before it was sent")
            async with asyncio.timeout(request.policy.deadline - now) as request.timeout_scope:
                if request.prepare is not None:
                    await request.prepare()
                return await self._send_with_retries(pool, request)
        except (TimeoutError, AttemptFailed) as failure:
            unavailable = self._unavailable(pool, request, timed_out=isinstance(failure, TimeoutError))
            raise RequestAborted(str(unavailable)) if request.aborted else unavailable from None
        finally:
            request.done = True

    async def send_once(self, url: str, path: str, body: Any = None, *, timeout_s: float) -> HttpResponse:
        """Send one request to one endpoint, without retries and outside the connection limit.

        Args:
            url: Base URL of the endpoint.
            path: Path below the base URL.
            body: JSON body of a POST request. None for a GET request.
            timeout_s: Timeout for the complete response.

        Returns:
            The response, with any status.

        Raises:
            AttemptFailed: If no complete response arrived.
        """
        pool = await self.pool()
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        try:
            async with asyncio.timeout(timeout_s):
                return await pool.exchange(method, url + path, data)
        except TimeoutError:
            raise AttemptFailed(f"no response within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise failure_from_exception(error) from None

    def is_cooling(self, affinity: str) -> bool:
        """Return True if the endpoint of an affinity is known to be down or busy.

        Args:
            affinity: Affinity of a sticky request from this event loop.
        """
        pool = self._pools.get(asyncio.get_running_loop())
        return pool is not None and affinity_endpoint(pool.endpoints, affinity).is_cooling(time.monotonic())

    def unreachable_s(self) -> float | None:
        """Return for how long no endpoint has answered, in seconds, or None if one answered or was not tried."""
        endpoints = [endpoint for pool in self._pools.values() for endpoint in pool.endpoints]
        since = [endpoint.down_since for endpoint in endpoints if endpoint.down_since is not None]
        return time.monotonic() - max(since) if endpoints and len(since) == len(endpoints) else None

    async def pool(self) -> EndpointPool:
        """Return the connections of this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            for other in list(self._pools):
                if other.is_closed():
                    self._pools.pop(other, None)
            self._pools[loop] = pool = EndpointPool(self.urls, self._max_connections, self._headers, self._credentials)
            await anext(pool.finalizer)
        return self._pools[loop]

    async def close(self) -> None:
        """Close the connections of this event loop. The client can be used again."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.finalizer.aclose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}}

    async def _send_with_retries(self, pool: EndpointPool, request: HttpRequest[T]) -> T:
        while True:
            attempt = partial(self._attempt, pool, request)
            try:
                return await (attempt() if request.around_attempt is None else request.around_attempt(attempt))
            except AttemptFailed as failure:
                self._record(pool, request, failure)
                delay_s = request.policy.next_delay(request.history, time.monotonic(), jitter=random.random())  # noqa: S311
                if delay_s is None or request.aborted:
                    raise
            await asyncio.sleep(delay_s)
            if pool.session.closed and self.service.resend_after_close:
                pool = await self.pool()

    async def _attempt(self, pool: EndpointPool, request: HttpRequest[T]) -> T:
        """Choose an endpoint, wait for one of its connections, and send the request there."""
        while True:
            endpoint = request.endpoint = pool.choose(request)
            endpoint.outstanding += 1
            try:
                async with endpoint.slots:
                    if pool.session.closed:
                        raise AttemptFailed("the client was closed", retryable=self.service.resend_after_close)
                    now = time.monotonic()
                    # The endpoint may have gone down while the request waited for a slot.
                    if not (endpoint.is_cooling(now) and pool.can_move(request, now)):
                        return await self._send_to(endpoint, pool, request)
            finally:
                endpoint.outstanding -= 1

    async def _send_to(self, endpoint: Endpoint, pool: EndpointPool, request: HttpRequest[T]) -> T:
        request.history.by_url[endpoint.url] += 1
        request.attempt_id = f"{request.name}/{uuid4().hex}"
        body = None if request.body is None else orjson.dumps(request.body(request.attempt_id))
        headers = None if request.headers is None else await request.headers(endpoint.url)
        # Half of the time at most, so that another endpoint can be tried.
        available_s = (request.policy.last_start - time.monotonic()) / 2
        connect_timeout_s = min(self.service.connect_timeout_s, max(MIN_CONNECT_TIMEOUT_S, available_s))
        running_at_server = True
        try:
            url = endpoint.url + request.path
            response = await pool.exchange(request.method, url, body, connect_timeout_s, headers)
            running_at_server = False
            if response.status != 200:
                raise self._status_error(url, response)
            result = request.parse(response.content, request)
        except (aiohttp.ClientError, OSError, AttemptFailed, *PARSE_ERRORS) as error:
            failure = failure_from_exception(error)
            running_at_server = running_at_server and not failure.endpoint_down
            raise failure from None
        finally:
            if running_at_server and (notice := request.pending_notice):
                pool.notify(endpoint.url, notice)
            request.attempt_id = None
        endpoint.record_success()
        return result

    def _status_error(self, url: str, response: HttpResponse) -> Exception:
        failure = failure_from_status(*response)
        if failure.retryable or not 400 <= response.status < 500:
            return failure
        remedy = self.service.remedies.get(response.status, "Change the request; retrying will not help.")
        return self.service.rejected(f"{url}: {failure.reason}. {remedy}", response.status)

    def _record(self, pool: EndpointPool, request: HttpRequest[Any], failure: AttemptFailed) -> None:
        assert request.endpoint is not None
        now, is_new_outage = time.monotonic(), failure.endpoint_down and not request.endpoint.outages
        level = logging.WARNING if is_new_outage else logging.DEBUG
        logger.log(level, "%s: %s (attempt %d)", request.url, failure.reason, request.history.attempts)
        request.endpoint.record_failure(failure, now)
        request.history.record(failure, now, can_move=pool.can_move(request, now))

    def _unavailable(self, pool: EndpointPool, request: HttpRequest[Any], *, timed_out: bool) -> InfraFault:
        now, history = time.monotonic(), request.history
        reason = history.last_failure.reason if history.last_failure else ""
        if timed_out and not history.attempts:
            limit = "max_connections" if request.around_attempt is None else "the limits or max_connections"
            reason = f"the request was not sent by the deadline: allow more time, or raise {limit}"
            if down := ", ".join(pool.urls_down):
                reason = f"{down} can't be reached"
        elif timed_out:
            reason = "no complete response by the deadline" + (f"; previous attempt: {reason}" if reason else "")
        elif history.retry_after_s is not None and now + history.retry_after_s >= request.policy.last_start:
            reason += f"; its Retry-After of {history.retry_after_s:.0f} s is beyond the deadline"
        effort = f"attempts: {history.attempts}, in {max(0.0, now - request.created_at):.1f} s"
        effort += f"; request {request.name}" if request.name else ""
        url = request.url or self.urls[0]
        error = self.service.unavailable(f"{url}: {reason} ({effort}). {self.service.hint.format(url=url)}")
        error.metrics = {"attempts": history.attempts}
        error.depends_on_deadline = timed_out or _is_retried_later(request, now)
        return error


def _is_retried_later(request: HttpRequest[Any], now: float) -> bool:
    """Return True if a failed request would be sent again with a later deadline."""
    policy = replace(request.policy, deadline=inf, start_by=None)
    return policy.next_delay(request.history, now, jitter=0.0) is not None


def _basic_auth(url: URL) -> str:
    user_and_password = f"{url.user or ''}:{url.password or ''}"
    return f"Basic {base64.b64encode(user_and_password.encode()).decode()}"


def _parse_base_urls(urls: str | Sequence[str], service: HttpService) -> tuple[str, ...]:
    """Return the distinct base URLs without trailing slashes, or raise ConfigError."""
    bases = tuple(dict.fromkeys(url.strip().rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)))
    if not bases:
        raise ConfigError(f"Missing {service.name} URL. Expected a URL such as {service.example_url!r}.")
    for base in bases:
        try:
            is_valid = URL(base).scheme in ("http", "https") and bool(URL(base).host)
        except ValueError:
            is_valid = False
        if not is_valid:
            shown = hide_credentials(base)
            raise ConfigError(f"Invalid {service.name} URL: {shown!r}. Expected a URL such as {service.example_url!r}.")
    return bases
