"""Servers: the servers behind an engine, from any event loop.

It keeps a pool of connections per loop, which closes with the engine or the loop, and knows the calls that are on their
way, so that they can be aborted wherever they are: waiting for a connection, between two attempts, or at a server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import aiohttp
import orjson
from yarl import URL

from toolroll.errors import ConfigError, EngineUnavailable
from toolroll.rollout.engines.call import Aborted, Call, Notice
from toolroll.rollout.engines.engine import Finish, Generation, Timings
from toolroll.rollout.engines.pool import Pool

logger = logging.getLogger(__name__)

T = TypeVar("T")
Together = Callable[..., Notice]
"""What stops several attempts of one server at once, by their ids."""

MAX_CONNECTIONS = 1024
"""Per server and event loop: more than engines run at a time, so that the queue is theirs."""
WITHOUT_DEADLINE = 3600.0
"""Seconds for a call that has none."""
PROBE_TIME = 10.0
"""Seconds for a question that samples nothing."""
ABORT_GRACE = 30.0
"""Seconds in which a server gives back what an aborted call has, of ten thousand at once too. Then it ends without."""
BUSY_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds before a server that was busy is told again."""
CONTEXT_MARGIN = 8
"""Ids of the context that are left alone: servers need some for themselves, and not all say how many."""


class Servers:
    """The servers behind an engine.

    Args:
        urls: Base URLs.
        token: Sent as `Authorization: Bearer …`.
        max_connections: Per server and event loop; more calls wait.
    """

    def __init__(self, urls: str | Sequence[str], *, token: str | None, max_connections: int) -> None:
        self.urls = tuple(dict.fromkeys(map(_base_url, [urls] if isinstance(urls, str) else urls)))
        if not self.urls:
            raise ConfigError("An engine needs the URL of a server, e.g. 'http://127.0.0.1:30000'.")
        if max_connections < 1:
            raise ConfigError(f"max_connections is {max_connections}; an engine needs one at least.")
        self.max_connections = max_connections
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._calls: dict[str, set[Call[Any]]] = {}
        self._context: int | None = None
        self._knows_context = False

    async def ask(self, call: Call[T]) -> T:
        """The answer to a call. Raises EngineRefused or EngineUnavailable."""
        return await call.run(await self.pool())

    async def generate(self, call: Call[Generation]) -> Generation:
        """The same for a call that may be aborted. Where that left nothing of it, there are no ids."""
        same = self._calls.setdefault(call.name, set())
        same.add(call)
        try:
            return await self.ask(call)
        except Aborted as aborted:
            what, where = str(aborted), call.endpoint
            return Generation(
                ids=[], logprobs=[], finish=Finish.ABORT, problem=what, endpoint=where, timings=timings_of(call)
            )
        finally:
            same.discard(call)
            if not same:
                self._calls.pop(call.name, None)

    async def abort(self, names: Collection[str], together: Together | None = None) -> None:
        """End the calls of these names, with what they have, in ABORT_GRACE seconds at the latest."""
        pool = await self.pool()
        calls = [call for name in names for call in self._calls.get(name, ())]
        sending: dict[str | None, asyncio.Task[None]] = {}

        def tell(left: list[Call[Any]]) -> None:
            at: dict[str, list[Call[Any]]] = {}
            for call in left:
                on_its_way = sending.get(call.attempt_id)
                if call.notice is not None and (on_its_way is None or on_its_way.done()):
                    at.setdefault(call.endpoint, []).append(call)
            for url, some in at.items():
                ids = [call.attempt_id for call in some if call.attempt_id]
                if together is not None:
                    sending.update(dict.fromkeys(ids, pool.notify(url, *together(*ids))))
                    continue
                for call in some:
                    if notice := call.notice:
                        sending[call.attempt_id] = pool.notify(url, *notice)

        await self._end(calls, tell)

    async def abort_all(self, notice: Notice) -> None:
        """End all calls, and whatever else the servers run: `notice` tells them to."""
        pool = await self.pool()

        def tell(calls: list[Call[Any]]) -> None:
            for url in {call.endpoint for call in calls}:
                pool.notify(url, *notice)

        calls = [call for calls in self._calls.values() for call in calls]
        await asyncio.gather(self.everywhere(*notice), self._end(calls, tell))

    async def _end(self, calls: list[Call[Any]], tell: Callable[[list[Call[Any]]], None]) -> None:
        left, began, pause = calls, time.monotonic(), 0.1
        for call in left:
            call.loop.call_soon_threadsafe(call.end_in, ABORT_GRACE if call.abort else 0.0)
        next_time = began
        while left and (now := time.monotonic()) < began + ABORT_GRACE:
            if now >= next_time:  # more than once: an abort may overtake its call on the way to the server
                tell(left)
                pause *= 2
                next_time = now + pause
            await asyncio.sleep(0.02)
            left = [call for call in left if not call.over]

    async def context_length(self) -> int | None:
        """How many ids a prompt and its answer may have together, as the servers say; None where they don't.

        Asked once. Of several servers the least counts.
        """
        pool = await self.pool()
        async with pool.once:
            if not self._knows_context:
                lengths = await asyncio.gather(*map(self._context_of, self.urls))
                known = [length for length in lengths if length]
                self._context = min(known) - CONTEXT_MARGIN if known else None
                self._knows_context = None not in lengths
        return self._context

    async def _context_of(self, url: str) -> int | None:
        """One server's; 0 where it doesn't say, None where it is down."""
        pool = await self.pool()
        try:
            async with asyncio.timeout(PROBE_TIME), pool.session.get(url + "/v1/models") as answer:
                models = orjson.loads(await answer.read())["data"]
            return min(int(model["max_model_len"]) for model in models if model.get("max_model_len"))
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None
        except (ValueError, LookupError, TypeError, AttributeError):
            return 0

    async def everywhere(self, path: str, body: dict[str, Any] | None = None) -> dict[str, bool]:
        """Ask every server, once. Which of them said yes."""
        pool = await self.pool()

        async def one(url: str) -> bool:
            try:
                async with asyncio.timeout(PROBE_TIME):
                    return await pool.tell(url, path, body) == 200
            except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                return False

        return dict(zip(self.urls, await asyncio.gather(*map(one, self.urls)), strict=True))

    async def tell_all(self, path: str, body: dict[str, Any], *, within: float, busy: str) -> None:
        """Have every server do something, in so many seconds. Raises for the first that didn't, after all answered.

        A server whose refusal says `busy` is told again, a few times.
        """
        pool = await self.pool()

        async def told(url: str) -> str | None:
            for pause in (*BUSY_PAUSES, None):
                async with pool.session.post(url + path, data=orjson.dumps(body)) as answer:
                    said = await answer.text(errors="replace")
                if answer.status == 200:
                    return None
                if pause is None or busy not in said:
                    break
                logger.info("%s%s answered %d: %.500s; told again in %g s", url, path, answer.status, said, pause)
                await asyncio.sleep(pause)
            return f"{url}{path} answered {answer.status}: {said:.500}"

        async def one(url: str) -> str | None:
            try:
                async with asyncio.timeout(within):
                    return await told(url)
            except TimeoutError:
                return f"{url}{path}: no answer within {within:g} s. Is it overloaded?"
            except (aiohttp.ClientError, OSError) as error:
                return f"{url}{path}: {type(error).__name__}: {error}. Is it up?"

        failed = [said for said in await asyncio.gather(*map(one, self.urls)) if said is not None]
        if failed:
            raise EngineUnavailable(f"{len(failed)} of {len(self.urls)} servers failed: {failed[0]}")

    async def pool(self) -> Pool:
        """This event loop's connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            for other in list(self._pools):
                if other.is_closed():
                    self._pools.pop(other, None)
            self._pools[loop] = pool = Pool(self.urls, self.max_connections, self._headers)
            await anext(pool.keeper)
        return self._pools[loop]

    async def close(self) -> None:
        """Close this event loop's connections; another's close with it. Used again, it opens new ones."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.keeper.aclose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}, "_calls": {}}


def by(deadline: float | None) -> float:
    """The deadline, or that of a call without one."""
    return time.monotonic() + WITHOUT_DEADLINE if deadline is None else deadline


def timings_of(call: Call[Any], *, queue: float | None = None, cached_tokens: int | None = None) -> Timings:
    """What is known of a call that is over."""
    total, attempts = time.monotonic() - call.began, max(1, call.tried.total())
    return Timings(total=total, queue=queue, cached_tokens=cached_tokens, attempts=attempts)


def _base_url(url: str) -> str:
    base = url.strip().rstrip("/")
    try:
        parsed = URL(base)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is no server's URL, which is like 'http://127.0.0.1:30000'.")
    return base
