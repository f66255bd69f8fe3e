"""HTTP transports of servers behind a URL: streamable HTTP, and HTTP+SSE of older servers.

Unlike those of the SDK, they

- record the status of each response, or why there is none (`http_exchange.py`),
- end a connection with HTTP+SSE whose requests fail, and no connection with streamable HTTP,
- bound what they read: a response or an event of more than `MAX_MESSAGE_BYTES` fails. The limit applies to the
  decompressed text. For an event of HTTP+SSE it is 1 MiB.
- end the requests of a call soon after its deadline: servers of older protocols keep them open after a cancellation,
- accept JSON with lone surrogates, which are replaced.

The number of concurrent requests is not limited here: a call that waits for a connection would time out without having
been sent. It is limited by the `limits` of the tools.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from toolroll._internal.retry_after import parse_retry_after
from toolroll.tools.mcp.http_exchange import current_exchange
from toolroll.tools.mcp.settings import McpServerSettings, hide_url_secrets
from toolroll.tools.mcp.stdio import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
JSON_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(?P<lone>u[dD][89a-fA-F]\w\w)|.?)", re.DOTALL)
"""An escape in JSON. A pair of surrogates is one escape."""
SURROGATE_PAIR_BYTES = 12


class HttpTransport:
    """The transport of one connection.

    Args:
        settings: The server, which has a URL.
        on_failure: Called with the reason if the connection cannot be used any more.
    """

    def __init__(self, settings: McpServerSettings, on_failure: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_failure = on_failure

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TransportStreams]:
        """Yield the streams of messages."""
        url = str(self._settings.url)
        if self._settings.transport == "sse":
            async with sse_client(url, httpx_client_factory=self._http_client) as streams:
                yield streams
        else:
            async with (
                self._http_client() as client,
                streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
            ):
                yield streams

    def _http_client(self, *_: Any, **__: Any) -> httpx2.AsyncClient:
        options: dict[str, Any] = {
            "headers": self._settings.headers,
            # Calls have their own timeout.
            "timeout": httpx2.Timeout(self._settings.start_timeout, read=None, pool=None),
            "limits": httpx2.Limits(max_connections=None),
        }
        if self._settings.transport == "sse":
            return SseHttpClient(self._on_failure, **options)
        return StreamableHttpClient(**options)


class StreamableHttpClient(httpx2.AsyncClient):
    """A client whose requests always get a response. An error would end the SDK's connection, with all of its calls."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, and read the response unless it is a stream of events. If this fails, respond with 502."""
        exchange = current_exchange()
        deadline = exchange.deadline if exchange is not None else None
        failure, content_type, is_too_long = None, "", False
        try:
            async with _read_deadline(deadline):
                response = await super().send(request, **options)
            content_type = _wrap_body(response, deadline)
            if content_type != EVENT_STREAM:
                async with aclosing(response):
                    await response.aread()
        except (httpx2.RequestError, httpx2.StreamError) as error:
            if request.method != "POST":
                raise
            failure, is_too_long = f"{type(error).__name__}: {error}", isinstance(error, ResponseTooLong)
            logger.info("a request to %s failed: %s", hide_url_secrets(str(request.url)), failure)
            response = httpx2.Response(502, request=request)
        if exchange is not None and _is_request(request):
            exchange.status, exchange.content_type = response.status_code, content_type
            exchange.retry_after_s = parse_retry_after(response.headers.get("retry-after"), time.time()) or 0.0
            exchange.failure, exchange.is_too_long = failure, is_too_long
        return response


class SseHttpClient(httpx2.AsyncClient):
    """A client that reports requests that fail. The SDK would stop sending, and leave the calls waiting.

    Args:
        on_failure: Called with the reason.
        **options: Options of `httpx2.AsyncClient`.
    """

    def __init__(self, on_failure: Callable[[str], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_failure = on_failure

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, and read the response unless it is the stream of events."""
        try:
            response = await super().send(request, **options)
            _wrap_body(response)
            if request.method == "POST":
                await response.aread()
        except Exception as error:
            self._on_failure(f"{type(error).__name__}: {error}")
            raise
        if response.status_code >= 400:
            self._on_failure(f"responded with HTTP status {response.status_code}")
        return response


class ResponseTooLong(httpx2.StreamError):
    """Raised when a response has more than `MAX_MESSAGE_BYTES`."""


@asynccontextmanager
async def _read_deadline(deadline: float | None) -> AsyncIterator[None]:
    """Raise httpx2.ReadTimeout at a deadline, on the clock of the event loop."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise httpx2.ReadTimeout("no response before the deadline of the call") from error


def _is_request(request: httpx2.Request) -> bool:
    """Return True if an HTTP request has a JSON-RPC request, and not a notification or a reply to the server."""
    if request.method != "POST":
        return False
    message = json.loads(request.content)
    return "id" in message and "method" in message


def _wrap_body(response: httpx2.Response, deadline: float | None = None) -> str:
    """Make the body of a response a `MessageStream`. Return the type of its content."""
    content_type: str = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    max_bytes = None if content_type == EVENT_STREAM else MAX_MESSAGE_BYTES
    response.stream = MessageStream(response, max_bytes, deadline)
    response.headers.pop("content-encoding", None)
    return content_type


class MessageStream(httpx2.AsyncByteStream):
    """The decompressed body of a response, with lone surrogates replaced by U+FFFD.

    Args:
        response: The response, whose body has not been read.
        max_bytes: Maximum size. None for events, which the SDK bounds.
        deadline: Time by which the body must end, on the clock of the event loop.
    """

    def __init__(self, response: httpx2.Response, max_bytes: int | None, deadline: float | None = None) -> None:
        self._body = httpx2.Response(response.status_code, headers=response.headers, stream=response.stream)
        self._max_bytes = max_bytes
        self._deadline = deadline

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the body.

        Raises:
            ResponseTooLong: If it is too long.
            httpx2.ReadTimeout: If it does not end before the deadline.
        """
        read_bytes, held = 0, b""
        chunks = self._body.aiter_bytes()
        while True:
            async with _read_deadline(self._deadline):
                if (chunk := await anext(chunks, None)) is None:
                    break
            read_bytes += len(chunk)
            if self._max_bytes is not None and read_bytes > self._max_bytes:
                raise ResponseTooLong(f"the response has more than {self._max_bytes} bytes")
            text = held + chunk
            end = _end_of_escapes(text)
            held = text[end:]
            yield _replace_lone_surrogates(text[:end])
        yield _replace_lone_surrogates(held)

    async def aclose(self) -> None:
        """Close the body."""
        await self._body.aclose()


def _end_of_escapes(text: bytes) -> int:
    """Return the end of the part of a text whose escapes are complete. An event ends with a line, so it is complete."""
    if text.endswith(b"\n"):
        return len(text)
    last = (match.start() for match in JSON_ESCAPE.finditer(text) if match.start() > len(text) - SURROGATE_PAIR_BYTES)
    return next(last, len(text))


def _replace_lone_surrogates(text: bytes) -> bytes:
    return JSON_ESCAPE.sub(lambda match: rb"\ufffd" if match["lone"] else match[0], text)
