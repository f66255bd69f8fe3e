"""One request, its retry policy and the state of its attempts.

The policy decides whether and when a failed request is sent again. Its functions are pure: the current time and the
random number are arguments. Invariants:

- At most `max_attempts` attempts, and at most `max_processed_attempts` that a server may have started to process.
- No attempt starts at or after `start_by`, nor earlier than the server's `Retry-After` allows.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from toolroll.http.endpoints import Endpoint
from toolroll.http.failures import AttemptFailed

T = TypeVar("T")

BACKOFF_BASE_S = 0.1
BACKOFF_LIMIT_S = 5.0
RETRY_AFTER_JITTER_S = 0.1
"""Maximum random delay in addition to `Retry-After`, which spreads clients that received the same value."""


@dataclass(eq=False)
class AttemptHistory:
    """Attempts of one request so far."""

    by_url: Counter[str] = field(default_factory=Counter)
    """Number of attempts at each endpoint."""
    processed: int = 0
    """Number of attempts that a server may have started to process."""
    last_failure: AttemptFailed | None = None
    retry_after_s: float | None = None
    """`Retry-After` of the endpoint that gets the next attempt."""
    down_since: float | None = None
    """Time since which the endpoints of all attempts have been down."""

    @property
    def attempts(self) -> int:
        """Number of attempts so far."""
        return self.by_url.total()

    def record(self, failure: AttemptFailed, now: float, *, can_move: bool = False) -> None:
        """Record a failed attempt.

        Args:
            failure: Failure of the attempt.
            now: Current time.
            can_move: Whether another endpoint can take the next attempt, so that `Retry-After` does not apply to it.
        """
        self.last_failure = failure
        self.processed += failure.processed
        self.retry_after_s = None if can_move else failure.retry_after_s
        if not failure.endpoint_down:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of one request. Times are on the clock of `time.monotonic()`."""

    deadline: float
    """Time by which the request ends, with or without a response."""
    start_by: float | None = None
    """Time after which no attempt starts. Defaults to the deadline."""
    max_outage_s: float = inf
    """Duration of an outage of all its endpoints after which the request fails."""
    max_attempts: int = 100
    """Maximum number of attempts: about four minutes with backoff. Usually the deadline is nearer."""
    max_processed_attempts: int = 3
    """Maximum number of attempts that a server may have started to process. Limits the damage of a request that
    crashes servers."""

    @property
    def last_start(self) -> float:
        """Time after which no attempt starts."""
        return self.deadline if self.start_by is None else min(self.start_by, self.deadline)

    def next_delay(self, history: AttemptHistory, now: float, *, jitter: float) -> float | None:
        """Return the delay before the next attempt, in seconds, or None if the request must not be retried.

        Args:
            history: Attempts so far, including the last failure.
            now: Current time.
            jitter: Random number between 0 and 1. The backoff is exponential with full jitter.
        """
        can_retry = history.last_failure is not None and history.last_failure.retryable
        used_up = history.attempts >= self.max_attempts or history.processed >= self.max_processed_attempts
        down_too_long = history.down_since is not None and now - history.down_since > self.max_outage_s
        if not can_retry or used_up or down_too_long:
            return None
        delay_s = jitter * min(BACKOFF_LIMIT_S, BACKOFF_BASE_S * 2.0 ** max(0, history.attempts - 1))
        if history.retry_after_s is not None:
            delay_s = max(delay_s, history.retry_after_s + jitter * RETRY_AFTER_JITTER_S)
        return delay_s if now + delay_s < self.last_start else None


class RequestAborted(Exception):
    """Raised when a request was aborted before a response arrived. The message describes the last attempt."""


class AbortNotice(NamedTuple):
    """A POST request that stops an attempt at its server."""

    path: str
    body: dict[str, Any]


@dataclass(eq=False)
class HttpRequest(Generic[T]):
    """One request. Create it in the event loop that sends it, and send it once.

    Args:
        path: Path below the base URL.
        parse: Converts the content of the response. It rejects a response by raising `AttemptFailed`, or a ValueError,
            LookupError, TypeError or AttributeError, which are not retried.
        policy: Deadline and retry limits.
        body: Returns the JSON body for the id of an attempt. Called when the attempt starts, so that waiting requests
            need no memory for it. The default method is POST with a body and GET without.
        headers: Returns the headers of an attempt, given the base URL of its endpoint. Awaited when the attempt starts.
            May raise `AttemptFailed`.
        method: HTTP method, if it is neither GET nor POST.
        name: Name of the request in messages, and prefix of the ids of its attempts.
        affinity: Requests of the same affinity prefer the same endpoint.
        sticky: If True, the request is only sent to the endpoint of its affinity, even while that is down.
        abort_notice: Returns the notice that stops an attempt, by its id. If None, closing the connection stops it.
        prepare: Awaited before the first attempt, under the same deadline. Raises an exception to reject the request.
        around_attempt: Called for each attempt with a function that makes the attempt, whose result or exception it
            returns or raises. It may wait before, for example for a slot of a limiter. The wait counts towards the
            deadline and can be aborted.
    """

    path: str
    parse: Callable[[bytes, HttpRequest[Any]], T]
    policy: RetryPolicy
    body: Callable[[str], Any] | None = None
    headers: Callable[[str], Awaitable[Mapping[str, str]]] | None = None
    method: str = ""
    name: str = ""
    affinity: str | None = None
    sticky: bool = False
    abort_notice: Callable[[str], AbortNotice] | None = None
    prepare: Callable[[], Awaitable[None]] | None = None
    around_attempt: Callable[[Callable[[], Awaitable[T]]], Awaitable[T]] | None = None

    history: AttemptHistory = field(default_factory=AttemptHistory, init=False)
    created_at: float = field(default_factory=time.monotonic, init=False)
    endpoint: Endpoint | None = field(default=None, init=False)
    """Endpoint of the current or last attempt."""
    attempt_id: str | None = field(default=None, init=False)
    """Id of the attempt that a server is processing."""
    aborted: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)
    timeout_scope: asyncio.Timeout | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)

    def __post_init__(self) -> None:
        self.method = self.method or ("GET" if self.body is None else "POST")

    @property
    def url(self) -> str:
        """Base URL of the current or last attempt."""
        return self.endpoint.url if self.endpoint else ""

    @property
    def pending_notice(self) -> AbortNotice | None:
        """Notice that stops the attempt that a server is processing."""
        return self.abort_notice(self.attempt_id) if self.abort_notice and self.attempt_id else None

    def abort(self, grace_s: float) -> None:
        """Abort the request, from any thread. `send` raises `RequestAborted` unless the response still arrives.

        Args:
            grace_s: Time in which the server may still respond. A request between two attempts ends at once.
        """
        self._loop.call_soon_threadsafe(self._end_within, grace_s)

    def _end_within(self, grace_s: float) -> None:
        self.aborted = True
        scope = self.timeout_scope
        if scope is None or self.done or scope.expired():
            return
        remaining_s = self.policy.deadline - time.monotonic()
        scope.reschedule(self._loop.time() + (min(grace_s, remaining_s) if self.attempt_id else 0.0))
