"""Call: one call of the client's, over all its attempts. Where each goes, what came of it, whether there is a next."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from io import BytesIO
from math import inf, isnan
from typing import TypeVar

import aiohttp
import orjson
from pydantic import ValidationError
from tenacity import RetryCallState, wait_random_exponential

from toolroll.errors import SandboxRefused, SandboxUnavailable, explain
from toolroll.keeper import keep

T = TypeVar("T")

logger = logging.getLogger(__name__)

PROBE_TIME = 5.0
"""Seconds for a question that runs no program."""
CONNECT_TIMEOUT = 5.0
"""Linux sends a lost SYN again after 1 s and 3 s; who hasn't answered then is not there."""
KEEP_ALIVE = 4.0
"""Seconds idle: less than uvicorn's 5, so as not to use a connection just as the server closes it."""
COOL_DOWN = 2.0
"""Seconds for which an endpoint that is down gets nothing new while there is another."""
LONGEST_REST = 30.0
"""Seconds for one that asked to be left alone by Retry-After, at the most."""
ATTEMPTS = 100
"""To get through: some four minutes of them. Where the deadline is nearer, it decides."""
RUN_ATTEMPTS = 3
"""Of those that may have begun the program: it could be one that kills every server it meets."""
REMEDIES = {
    401: "Is the token right? (TOOLROLL_SANDBOX_TOKEN)",
    403: "Is the token right? (TOOLROLL_SANDBOX_TOKEN)",
    404: "Is that the URL of a sandbox?",
}
ANSWER_LIMIT = 256 * 2**20
"""Bytes; servers cap output and files far below."""

_backoff = wait_random_exponential(multiplier=0.1, max=5.0)  # from zero: full jitter


@dataclass(eq=False)
class Failure(Exception):
    """One attempt came to nothing. `down`: the endpoint is. `begun`: the program may have been."""

    what: str
    again: bool = False
    down: bool = False
    begun: bool = False
    retry_after: float | None = None


@dataclass
class Endpoint:
    """A server, as this event loop sees it."""

    url: str
    outstanding: int = 0
    rests_until: float = 0.0
    is_down: bool = False
    """As far as is known. It is said once, and not again before it was up."""


class Pool:
    """One event loop's connections, and how the endpoints do, as seen from there."""

    def __init__(self, urls: Sequence[str], max_connections: int, headers: Mapping[str, str]) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=KEEP_ALIVE),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # so that a small answer can't unfold into a huge one
        )
        self.keeper = keep(self.session)

    def session_endpoint(self, name: str) -> Endpoint:
        """Where a session is, by rendezvous hashing.

        Who has the same endpoints finds the same one, in any process, and a further endpoint moves no sessions but
        those that it gets.
        """
        return max(self.endpoints, key=lambda one: blake2b(f"{name} {one.url}".encode()).digest())


class Call:
    """One call, over all its attempts."""

    def __init__(
        self,
        path: str,
        body: bytes | None,
        deadline: float | None,
        *,
        begin_by: float | None = None,
        patience: float = inf,
        session_id: str | None = None,
        method: str = "",
    ) -> None:
        self.path, self.body, self.session_id = path, body, session_id
        self.method = method or ("GET" if body is None else "POST")
        self.patience = patience
        self.down_since: float | None = None
        """Since when every attempt has met an endpoint that is down."""
        self.began = time.monotonic()
        self.deadline = self.began + PROBE_TIME if deadline is None else deadline
        self.begin_by = self.deadline if begin_by is None else min(begin_by, self.deadline)
        self.tried: Counter[str] = Counter()
        self.begun = 0
        self.endpoint = Endpoint("")
        self.failure: Failure | None = None
        self.elsewhere = False
        """Whether another endpoint would take the next attempt at once."""

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    @property
    def time_to_begin(self) -> float:
        """Seconds in which another attempt may be made."""
        return self.begin_by - time.monotonic()

    async def attempt(self, pool: Pool, parse: Callable[[bytes, Call], T]) -> T:
        """Ask once. Raises Failure, or SandboxRefused."""
        endpoint = self.endpoint = self.pick(pool)
        self.tried[endpoint.url] += 1
        endpoint.outstanding += 1
        try:
            answer = parse(await self.exchange(pool.session), self)
            endpoint.is_down = False
            return answer
        except (aiohttp.ClientError, OSError, ValueError, Failure) as error:
            raise self.note(_failure_of(error), pool) from None
        finally:
            endpoint.outstanding -= 1

    def pick(self, pool: Pool) -> Endpoint:
        """Where the next attempt goes."""
        if self.session_id is not None:
            return pool.session_endpoint(self.session_id)
        now, tie = time.monotonic(), random.random
        return min(
            pool.endpoints, key=lambda one: (max(one.rests_until, now), self.tried[one.url], one.outstanding, tie())
        )

    async def exchange(self, session: aiohttp.ClientSession) -> bytes:
        """Send it, and get the whole answer."""
        response = await session.request(
            self.method,
            self.endpoint.url + self.path,
            data=BytesIO(self.body) if self.body and len(self.body) > 2**20 else self.body,  # a long one goes in parts
            allow_redirects=False,
            # A black hole takes half of what is left at the most, so that another endpoint gets its chance.
            timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_TIMEOUT, max(0.01, self.time_to_begin / 2))),
        )
        try:
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > ANSWER_LIMIT:
                    raise Failure(f"the answer is longer than {ANSWER_LIMIT} bytes: fetch fewer or smaller files")
        finally:
            response.close()  # to no effect where all was read: the connection is back in the pool then
        if response.status != 200:
            raise self.refusal(response.status, response.headers.get("Retry-After"), b"".join(chunks))
        return b"".join(chunks)

    def refusal(self, status: int, retry_after: str | None, content: bytes) -> Exception:
        """What a status other than 200 means."""
        said = f"answered {status}: {_detail(content)}"
        if status in (429, 502, 503, 504):
            return Failure(said, again=True, down=status != 429, retry_after=_seconds(retry_after))
        if 400 <= status < 500:
            remedy = REMEDIES.get(status, "It would be refused again: change the request.")
            return SandboxRefused(f"{self.endpoint.url}{self.path} {said}. {remedy}")
        return Failure(said)

    def note(self, failure: Failure, pool: Pool) -> Failure:
        """Remember what came of an attempt, for the next one and for other calls."""
        self.failure = failure
        self.begun += failure.begun
        now, endpoint = time.monotonic(), self.endpoint
        level = logging.WARNING if failure.down and not endpoint.is_down else logging.DEBUG
        logger.log(level, "%s: %s (attempt %d)", endpoint.url, failure.what, self.tried.total())
        endpoint.is_down |= failure.down
        self.down_since = (self.down_since or now) if failure.down else None
        rest = max(COOL_DOWN if failure.down else 0.0, min(failure.retry_after or 0.0, LONGEST_REST))
        endpoint.rests_until = max(endpoint.rests_until, now + rest)
        self.elsewhere = self.session_id is None and any(one.rests_until <= now for one in pool.endpoints)
        return failure

    def wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt. Those who were told the same moment to come back don't all come at once."""
        asked = None if self.elsewhere or self.failure is None else self.failure.retry_after
        wait = _backoff(state)
        return wait if asked is None else max(wait, asked + random.uniform(0.0, 0.1))  # noqa: S311

    def stop(self, state: RetryCallState) -> bool:
        """Whether there is no next attempt."""
        if self.down_since is not None and time.monotonic() - self.down_since > self.patience:
            return True
        return (
            self.tried.total() >= ATTEMPTS or self.begun >= RUN_ATTEMPTS or state.upcoming_sleep >= self.time_to_begin
        )

    def unavailable(self, in_time: bool) -> SandboxUnavailable:
        """What the caller is told when there is no next attempt, or no time."""
        what, url = self.failure.what if self.failure else "", self.endpoint.url
        asked = None if self.elsewhere or self.failure is None else self.failure.retry_after
        if not in_time:
            what = "no complete answer by the deadline" + (f"; the attempt before: {what}" if what else "")
        elif asked is not None and asked >= self.time_to_begin:
            what += f"; it asks to be left alone for {asked:.0f} s, which is beyond the deadline"
        tries = f"attempts: {self.tried.total()}, in {time.monotonic() - self.began:.1f} s"
        error = SandboxUnavailable(f"{url}: {what} ({tries}). Is it up, and not overloaded? GET {url}/v1/ping tells.")
        error.metrics = {"attempts": self.tried.total()}
        return error


def _failure_of(error: Exception) -> Failure:
    said = short(explain(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}")
    match error:
        case Failure():
            return error
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            number = getattr(error, "errno", None)
            why = os.strerror(number) if number else said
            return Failure(f"can't be reached: {why}. Is a sandbox running there?", again=True, down=True)
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return Failure(f"the connection broke: {said}", again=True, begun=True)
    return Failure(f"that is no sandbox's answer: {said}")


def _detail(content: bytes) -> str:
    """What the server has to say: `detail`, a text or FastAPI's list of what is wrong, or else the start of it all."""
    try:
        detail = orjson.loads(content)["detail"]
        if not isinstance(detail, str):
            detail = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in detail)
    except (ValueError, LookupError, TypeError):
        detail = content[:1000].decode(errors="replace")
    return short(detail.strip().removesuffix("."))


def _seconds(retry_after: str | None) -> float | None:
    """Seconds, from a number of them or an HTTP date. None: nothing was asked for that one could understand."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after or "").timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if isnan(seconds) else max(0.0, seconds)


def short(text: str) -> str:
    """The beginning and the end of a long text, for a message."""
    return text if len(text) <= 400 else f"{text[:100]} … {text[-300:]}"
