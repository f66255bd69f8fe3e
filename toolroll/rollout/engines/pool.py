"""Pool: one event loop's connections to the servers of an engine, and how those do, as seen from there.

- Calls of one affinity go to one server, by rendezvous hashing: every process finds the same one, and another server
  moves no calls but those that it gets.
- One that is down is left alone for a while, longer each time. Its calls go to their next by the same hash meanwhile,
  and come back.
- A server has so many connections at the most. Further calls wait for one, first come, first served.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import aiohttp
import orjson

from toolroll.keeper import keep

logger = logging.getLogger(__name__)

KEEP_ALIVE = 4.0
"""Seconds idle: less than uvicorn's 5, so as not to use a connection just as the server closes it."""
COOL_DOWN = 2.0
"""Seconds for which a server that is down gets nothing new while there is another. Doubled each time."""
LONGEST_REST = 30.0
"""Seconds, at the most; for one that asked to be left alone by Retry-After too."""
NOTICE_TIME = 30.0
"""Seconds in which a server must have been told of an abort. Later it is of little use."""
NOTICES = 64
"""Aborts on their way at a time: ten thousand calls that are cancelled at once don't bring ten thousand connections."""
LAST_NOTICES = 2.0
"""Seconds that closing waits for the aborts on their way."""
OTHER_FILES = 256
"""Open files that are left to the rest of the process."""


@dataclass(eq=False)
class Failure(Exception):
    """One attempt came to nothing. `down`: the server is. `begun`: it may have begun to sample."""

    what: str
    again: bool = False
    down: bool = False
    begun: bool = False
    retry_after: float | None = None


@dataclass(eq=False)
class Server:
    """A server, as this event loop sees it."""

    url: str
    slots: asyncio.Semaphore
    outstanding: int = 0
    rests_until: float = 0.0
    strikes: int = 0
    """How often it was found down since it last answered."""

    @property
    def rests(self) -> bool:
        """Whether it is left alone for now."""
        return self.rests_until > time.monotonic()


@dataclass(eq=False)
class Pool:
    """One event loop's connections."""

    urls: Sequence[str]
    max_connections: int
    headers: Mapping[str, str]
    servers: list[Server] = field(init=False)

    def __post_init__(self) -> None:
        share = _share_of_files(len(self.urls), self.max_connections)
        self.servers = [Server(url, asyncio.Semaphore(share)) for url in self.urls]
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),  # the slots are the limit
            headers=self.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # ours are deadlines
        )
        self.once = asyncio.Lock()
        """For what is asked once, however many calls want to know."""
        self._notices = asyncio.Semaphore(NOTICES)
        self._sending: set[asyncio.Task[None]] = set()
        self.keeper = keep(self.session, partial(_send_the_last, self._sending))

    def pick(self, affinity: str | None, tried: Counter[str]) -> Server:
        """Where the next attempt of a call goes: where it hasn't failed, and its affinity is.

        Without one, where the fewest are outstanding.
        """
        if len(self.servers) == 1:
            return self.servers[0]
        now = time.monotonic()

        def worth(one: Server) -> tuple[float, int, bytes | float]:
            liking = -one.outstanding - random.random() if affinity is None else _weight(affinity, one.url)  # noqa: S311
            return -max(one.rests_until, now), -tried[one.url], liking

        return max(self.servers, key=worth)

    def elsewhere(self, server: Server) -> bool:
        """Whether there is another server that would take a call now."""
        return any(one is not server and not one.rests for one in self.servers)

    @property
    def down(self) -> list[str]:
        """The servers that were down when they were last asked."""
        return [one.url for one in self.servers if one.strikes]

    def note(self, server: Server, failure: Failure) -> None:
        """Remember, for all calls, what came of an attempt."""
        now, rest = time.monotonic(), 0.0
        if failure.down:
            news = not server.rests
            server.strikes += news
            logger.log(logging.WARNING if news else logging.DEBUG, "%s: %s", server.url, failure.what)
            rest = COOL_DOWN * 2 ** min(server.strikes - 1, 10)
        rest = min(max(rest, failure.retry_after or 0.0), LONGEST_REST)
        server.rests_until = max(server.rests_until, now + rest)

    def notify(self, url: str, path: str, body: dict[str, Any]) -> asyncio.Task[None]:
        """Tell a server something in the background, once, if it can be done soon."""
        task = asyncio.get_running_loop().create_task(self._notify(url, path, body))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    async def _notify(self, url: str, path: str, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(NOTICE_TIME), self._notices:
                if not self.session.closed:  # which aborts what there is by itself
                    await self.tell(url, path, body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("%s%s: %s: %s", url, path, type(error).__name__, error)

    async def tell(self, url: str, path: str, body: dict[str, Any] | None = None) -> int:
        """Ask one server, once, beside the calls, whose turn need not come for it. The status of its answer."""
        data = None if body is None else orjson.dumps(body)
        async with self.session.request("GET" if data is None else "POST", url + path, data=data) as response:
            await response.read()
            return response.status


async def _send_the_last(notices: set[asyncio.Task[None]]) -> None:
    if notices:
        _, late = await asyncio.wait(list(notices), timeout=LAST_NOTICES)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _weight(affinity: str, url: str) -> bytes:
    return blake2b(f"{affinity} {url}".encode(), digest_size=8).digest()


def _share_of_files(servers: int, wanted: int) -> int:
    """Connections for each server: those wanted, or as many as the process may open files for."""
    may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if may_open == resource.RLIM_INFINITY:
        return wanted
    share = max(1, (may_open - OTHER_FILES) // servers)
    if share < wanted:
        logger.info("%d connections per server, for want of open files. More: ulimit -n", share)
    return min(share, wanted)
