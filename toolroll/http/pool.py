"""Connections of one event loop to the endpoints of a service.

The connections are closed with their owner or with the event loop, whichever ends first: a loop closes the asynchronous
generators that were started in it, both when a generator is garbage-collected and when the loop shuts down. No other
object has both guarantees, so a generator is the finalizer of each session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import aiohttp
import orjson
from yarl import URL

from toolroll.http.endpoints import Endpoint, affinity_endpoint, choose_endpoint, connections_per_endpoint
from toolroll.http.failures import AttemptFailed
from toolroll.http.request import AbortNotice, HttpRequest

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 4.0
"""Lifetime of an idle connection. Shorter than uvicorn's 5 s, so that no request meets a closing connection."""
STREAMED_BODY_BYTES = 2**20
"""Size from which request bodies are written in parts, so that cancellation does not wait for a stalled write."""
RESPONSE_LIMIT_BYTES = 256 * 2**20
"""Maximum size of a response. Sandboxes limit output and files to much less, and a million tokens with
log-probabilities take 40 MB."""
NOTICE_TIMEOUT_S = 30.0
"""Timeout for an abort notice, including its wait for other notices."""
MAX_CONCURRENT_NOTICES = 64
"""Maximum number of additional connections, which matters when thousands of requests are cancelled at once."""
NOTICE_FLUSH_TIMEOUT_S = 2.0
"""Timeout for outstanding notices when the pool is closed."""

_open_sessions: dict[aiohttp.ClientSession, asyncio.AbstractEventLoop] = {}
"""Strong references to all open sessions. Without them, the garbage collector could find a session together with its
finalizer, and the session would warn that it is unclosed before the finalizer closes it."""


class HttpResponse(NamedTuple):
    """A complete response."""

    status: int
    retry_after: str | None
    content: bytes


class EndpointPool:
    """Connections of one event loop, and the state of the endpoints as seen from there.

    Args:
        urls: Base URLs.
        max_connections: Maximum number of connections to each endpoint. `exchange` does not enforce it.
        headers: Sent with every request.
        credentials: Values of the header `Authorization`, by origin of the URL.
    """

    def __init__(
        self,
        urls: Sequence[str],
        max_connections: int,
        headers: Mapping[str, str],
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        self._credentials = credentials or {}
        limit = connections_per_endpoint(len(urls), max_connections)
        self.endpoints = [Endpoint(url, asyncio.Semaphore(limit)) for url in urls]
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),  # the slots are the limit
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small response must not expand to a huge one
        )
        self.discovery_lock = asyncio.Lock()
        """Lock for discovering a property of the servers once while all other requests wait."""
        self._notice_slots = asyncio.Semaphore(MAX_CONCURRENT_NOTICES)
        self._notices: set[asyncio.Task[None]] = set()
        self.finalizer = _session_finalizer(self.session, self._notices)
        """Closes the session when it is closed. Arm it with `anext`."""

    @property
    def urls_down(self) -> list[str]:
        """URLs of the endpoints that were down at their last attempt."""
        return [endpoint.url for endpoint in self.endpoints if endpoint.outages]

    def choose(self, request: HttpRequest[Any]) -> Endpoint:
        """Return the endpoint for the next attempt of a request."""
        if request.sticky and request.affinity is not None:
            return affinity_endpoint(self.endpoints, request.affinity)
        return choose_endpoint(self.endpoints, request.affinity, request.history.by_url, time.monotonic())

    def can_move(self, request: HttpRequest[Any], now: float) -> bool:
        """Return True if another endpoint than the request's current one can take the request."""
        others = (endpoint for endpoint in self.endpoints if endpoint is not request.endpoint)
        return not request.sticky and not all(endpoint.is_cooling(now) for endpoint in others)

    async def exchange(
        self,
        method: str,
        url: str,
        body: bytes | None,
        connect_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Send one request and read the complete response.

        Raises:
            AttemptFailed: If the response is too long.
            aiohttp.ClientError: If the connection fails.
        """
        data = BytesIO(body) if body and len(body) >= STREAMED_BODY_BYTES else body
        timeout = aiohttp.ClientTimeout(sock_connect=connect_timeout_s)
        all_headers = dict(headers or {})
        if self._credentials and (credentials := self._credentials.get(str(URL(url).origin()))):
            all_headers["Authorization"] = credentials
        response = await self.session.request(
            method, url, data=data, headers=all_headers, allow_redirects=False, timeout=timeout
        )
        try:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > RESPONSE_LIMIT_BYTES:
                    raise AttemptFailed(f"the response is longer than {RESPONSE_LIMIT_BYTES} bytes")
        finally:
            # No effect after a complete response. `async with` would wait until the server has read the body.
            response.close()
        return HttpResponse(response.status, response.headers.get("Retry-After"), bytes(content))

    def notify(self, url: str, notice: AbortNotice) -> asyncio.Task[None]:
        """Send a notice once, in the background. Failures are logged at debug level."""
        task = asyncio.get_running_loop().create_task(self._send_notice(url + notice.path, notice.body))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)
        return task

    async def _send_notice(self, url: str, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT_S), self._notice_slots:
                if not self.session.closed:  # closing the connections already aborted the attempts
                    await self.exchange("POST", url, orjson.dumps(body))
        except (aiohttp.ClientError, OSError, AttemptFailed) as error:  # TimeoutError is an OSError
            logger.debug("%s: %s: %s", url, type(error).__name__, error)


async def _session_finalizer(session: aiohttp.ClientSession, notices: set[asyncio.Task[None]]) -> AsyncGenerator[None]:
    """Finish the notices and close the session when this generator is closed. It must not refer to its owner."""
    for other, loop in list(_open_sessions.items()):
        if loop.is_closed():  # closed without a shutdown: its sessions can no longer be closed
            _open_sessions.pop(other, None)
    _open_sessions[session] = asyncio.get_running_loop()
    try:
        yield
    finally:
        try:
            if notices:
                _, late = await asyncio.wait(list(notices), timeout=NOTICE_FLUSH_TIMEOUT_S)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        finally:
            _open_sessions.pop(session, None)
            await session.close()
