"""Call: one call to an engine, over all its attempts: where each goes, what came of it, whether there is a next.

- It ends by its deadline, whatever the server does, and waiting for a connection counts.
- Tried again is what may go well then: a connection that failed or broke, 429, 502, 503, 504. Where sampling may have
  begun, a few times only: it could be a prompt that kills every server it meets.
- Each attempt has an id of its own at the server. One that ends without an answer is aborted there, so that nothing is
  sampled for nobody: after a cancellation, at the deadline, before the next attempt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from math import isnan
from typing import Any, Generic, TypeVar
from uuid import uuid4

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.rollout.engines.pool import Failure, Pool, Server

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0
"""Linux sends a lost SYN again after 1, 3 and 7 s; who hasn't answered then is not there."""
ATTEMPTS = 100
"""To get through: some four minutes of them. Where the deadline is nearer, it decides."""
BEGUN_ATTEMPTS = 3
"""Of those that may have begun to sample."""
ANSWER_LIMIT = 256 * 2**20
"""Bytes; a million tokens with log-probabilities are 40 MB."""

Notice = tuple[str, dict[str, Any]]
"""A path, and what is posted there."""

_backoff = wait_random_exponential(multiplier=0.1, max=5.0)  # from zero: full jitter


class Aborted(Exception):
    """The call was aborted, and nothing came of it. It says what was known of it by then."""


@dataclass(eq=False)
class Call(Generic[T]):
    """One call.

    Args:
        name: What it is called in ids and messages.
        body: What is posted, from the attempt's own id. It is made when it is sent, since ten thousand that wait with
            long prompts would fill the memory. None: nothing is, and it is a GET.
        parse: What the answer means. A ValueError, LookupError, TypeError, AttributeError says: nothing.
        abort: How the server is told to stop an attempt, by its id. None: it does when the connection closes.
        check: What comes before the first attempt, and may refuse the call.
    """

    name: str
    path: str
    body: Callable[[str], dict[str, Any]] | None
    parse: Callable[[Any, Call[Any]], T]
    deadline: float
    affinity: str | None = None
    abort: Callable[[str], Notice] | None = None
    check: Callable[[], Awaitable[None]] | None = None
    began: float = field(default_factory=time.monotonic)
    tried: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    failure: Failure | None = None
    aborted: bool = False
    over: bool = False
    attempt_id: str | None = None
    """Of the attempt that is at a server now."""
    server: Server | None = None
    """Where it is, or was at last."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _scope: asyncio.Timeout | None = None
    _moves: bool = False
    """Whether another server would take the next attempt at once."""

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    @property
    def endpoint(self) -> str:
        """The URL of the server where it is, or was at last."""
        return self.server.url if self.server else ""

    @property
    def notice(self) -> Notice | None:
        """What aborts the attempt that is at a server now."""
        return self.abort(self.attempt_id) if self.abort and self.attempt_id else None

    async def run(self, pool: Pool) -> T:
        """Ask until there is an answer, or no hope of one by the deadline. Raises Aborted, or an InfraFault."""
        if not self.left > 0:
            raise EngineUnavailable(f"The deadline of {self.name} had passed before the engine was asked.")
        if self.aborted:
            raise Aborted("it was aborted before it was sent")
        failed: list[Failure] = []

        async def attempt() -> T:
            if failed:
                raise failed.pop()
            return await self._attempt(pool)

        again = retry_if_exception(lambda error: isinstance(error, Failure) and error.again)
        try:
            async with asyncio.timeout(self.left) as self._scope:
                if self.check:
                    await self.check()
                try:
                    return await attempt()
                except Failure as failure:
                    failed.append(failure)
                # It goes on from the first failure: around every call, tenacity would cost more than all else of ours.
                return await AsyncRetrying(retry=again, wait=self._wait, stop=self._stop, reraise=True)(attempt)
        except (TimeoutError, Failure) as error:
            unavailable = self._unavailable(pool, in_time=isinstance(error, Failure))
            raise Aborted(str(unavailable)) if self.aborted else unavailable from None
        finally:
            self.over = True

    def end_in(self, seconds: float) -> None:
        """It is aborted: it ends in so many seconds, if it hasn't by then. At once, if it is at no server."""
        self.aborted = True
        if self._scope and not self.over and not self._scope.expired():
            self._scope.reschedule(self.loop.time() + (min(seconds, self.left) if self.attempt_id else 0.0))

    async def _attempt(self, pool: Pool) -> T:
        while True:
            server = self.server = pool.pick(self.affinity, self.tried)
            server.outstanding += 1
            try:
                async with server.slots:
                    if pool.session.closed:
                        raise EngineUnavailable(f"The engine was closed while {self.name} was on its way.")
                    if not (server.rests and pool.elsewhere(server)):  # it may have gone down while this one waited
                        return await self._ask(pool, server)
            finally:
                server.outstanding -= 1

    async def _ask(self, pool: Pool, server: Server) -> T:
        self.tried[server.url] += 1
        self.attempt_id = f"{self.name}/{uuid4().hex}"
        data = orjson.dumps(self.body(self.attempt_id)) if self.body else None
        unanswered = True
        try:
            content = await self._exchange(pool.session, data)
            unanswered = False
            answer = self.parse(orjson.loads(content), self)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError, Failure) as error:
            failure = self.failure = _failure_of(error)
            unanswered = unanswered and not failure.down
            self.begun += failure.begun
            pool.note(server, failure)
            self._moves = pool.elsewhere(server)
            raise failure from None
        except EngineRefused:
            unanswered = False
            raise
        finally:
            if unanswered and (notice := self.notice):
                pool.notify(server.url, *notice)
            self.attempt_id = None
        server.strikes = 0
        return answer

    async def _exchange(self, session: aiohttp.ClientSession, data: bytes | None) -> bytes:
        """Send it, and get the whole answer."""
        connect = min(CONNECT_TIMEOUT, max(0.01, self.left / 2))  # half, so that another server gets its chance
        timeout = aiohttp.ClientTimeout(sock_connect=connect)
        method, url = "POST" if data else "GET", self.endpoint + self.path
        async with session.request(method, url, data=data, allow_redirects=False, timeout=timeout) as response:
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > ANSWER_LIMIT:
                    raise Failure(f"the answer is longer than {ANSWER_LIMIT} bytes")
        if response.status != 200:
            raise self._refusal(response.status, response.headers.get("Retry-After"), b"".join(chunks))
        return b"".join(chunks)

    def _refusal(self, status: int, retry_after: str | None, content: bytes) -> Exception:
        """What a status other than 200 means."""
        said = f"answered {status}: {_detail(content)}"
        if status in (429, 502, 503, 504):
            return Failure(said, again=True, down=status != 429, retry_after=_seconds(retry_after))
        if 400 <= status < 500:
            remedy = "Is the token right?" if status in (401, 403) else "It would be refused again: change the request."
            refused = EngineRefused(f"{self.endpoint}{self.path} {said}. {remedy}")
            refused.status = status
            return refused
        return Failure(said)

    def _wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt. Those who were told the same moment to come back don't all come at once."""
        wait, asked = _backoff(state), self._asked
        return wait if asked is None else max(wait, asked + random.uniform(0.0, 0.1))  # noqa: S311

    def _stop(self, state: RetryCallState) -> bool:
        """Whether there is no next attempt."""
        spent = self.tried.total() >= ATTEMPTS or self.begun >= BEGUN_ATTEMPTS
        return spent or self.aborted or state.upcoming_sleep >= self.left

    @property
    def _asked(self) -> float | None:
        """Seconds for which the next attempt's server asked to be left alone."""
        return None if self._moves or self.failure is None else self.failure.retry_after

    def _unavailable(self, pool: Pool, *, in_time: bool) -> EngineUnavailable:
        """What the caller is told when there is no next attempt, or no time."""
        tries = f"{self.name}: attempts: {self.tried.total()}, in {time.monotonic() - self.began:.1f} s"
        what, asked = self.failure.what if self.failure else "", self._asked
        if not self.tried:
            down = ", ".join(pool.down)
            what = "its turn didn't come by the deadline: allow more time, or more connections (max_connections)"
            what = f"{down} can't be reached" if down else what
        elif not in_time:
            what = "no complete answer by the deadline" + (f"; the attempt before: {what}" if what else "")
        elif asked is not None and asked >= self.left:
            what += f"; it asks to be left alone for {asked:.0f} s, which is beyond the deadline"
        return EngineUnavailable(f"{self.endpoint or 'the engine'}: {what} ({tries}). Is it up, and not overloaded?")


def _failure_of(error: Exception) -> Failure:
    said = _short(f"{type(error).__name__}: {error}")
    match error:
        case Failure():
            return error
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return Failure(f"can't be reached: {said}", again=True, down=True)
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return Failure(f"the connection broke: {said}", again=True, begun=True)
    return Failure(f"that is no answer of this kind of server: {said}")


def _detail(content: bytes) -> str:
    """What the server has to say, by any of the ways in which these servers say it."""
    try:
        said = orjson.loads(content)
        said = said.get("error") or said.get("detail") or said["message"]
        said = said["message"] if isinstance(said, dict) else said
    except (ValueError, LookupError, TypeError, AttributeError):
        said = content[:1000].decode(errors="replace")
    return _short(str(said).strip().removesuffix("."))


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


def _short(text: str) -> str:
    """The beginning and the end of a long text, for a message."""
    return text if len(text) <= 500 else f"{text[:200]} … {text[-300:]}"
