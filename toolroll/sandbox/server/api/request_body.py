"""Receiving of request bodies in bounded memory and time.

Invariants:

- The bodies of all requests of a front occupy at most its part of `MAX_HELD_BYTES`, or the maximum of one body if that
  is more, in addition to the first `SMALL_BODY_BYTES` of each. Bytes count when they arrive: a client that holds back
  its body costs a connection and nothing else.
- A body of at most `SMALL_BODY_BYTES` is never rejected because of the memory of other requests.
- A body with more than `MAX_JSON_VALUES` values is rejected before it is parsed. An invalid value takes a hundred times
  the memory of its text and ten microseconds to report.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from toolroll.sandbox.server.execution.job import InvalidProgram
from toolroll.sandbox.server.hub.rejections import Rejected

MAX_HELD_BYTES = 1 << 30
SMALL_BODY_BYTES = 64 << 10
BODY_READ_TIMEOUT_S = 120.0
MAX_JSON_VALUES = 50_000
"""Many more than a request has files, cells and fields. A text is one value, whatever it contains."""


class BodyMemoryExhausted(Rejected):
    """Raised when a body does not fit into the memory that the bodies of other requests leave."""

    status, label = 429, "full"


class BodyReceiver:
    """Receives the bodies of requests and accounts for their memory.

    Args:
        max_body_bytes: Maximum size of one body.
        fronts: Number of fronts, which share the memory.
    """

    def __init__(self, max_body_bytes: int, fronts: int = 1) -> None:
        self.held_bytes = 0
        """Memory of all bodies that are being received or handled, without the first `SMALL_BODY_BYTES` of each."""
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(MAX_HELD_BYTES // fronts, max_body_bytes)

    @contextlib.asynccontextmanager
    async def receive(self, request: web.Request) -> AsyncIterator[bytes]:
        """Receive the JSON body of a request and hold its memory for the duration of the context.

        Args:
            request: Request whose body has not been read.

        Yields:
            The body. It may be invalid JSON.

        Raises:
            BodyMemoryExhausted: If other bodies leave too little memory.
            InvalidProgram: If the body has too many JSON values or is not UTF-8.
            HTTPRequestEntityTooLarge: If the body is larger than the maximum.
            HTTPRequestTimeout: If the body does not arrive in time.
            HTTPBadRequest: If the body is not encoded as the headers announce.
        """
        self._raise_if_too_large(request.content_length or 0)
        received, values = bytearray(), JsonValueCounter()
        try:
            # Most bodies arrive together with the headers.
            async with asyncio.timeout(None if request.content.is_eof() else BODY_READ_TIMEOUT_S):
                while chunk := await request.content.readany():
                    self._hold(len(received), len(received) + len(chunk))
                    received += chunk
                    _raise_if_expensive(chunk, values)
        except BaseException as error:
            self.held_bytes -= _counted_bytes(len(received))
            if isinstance(error, TimeoutError):
                reason = f"The body did not arrive within {BODY_READ_TIMEOUT_S:g} s."
                raise web.HTTPRequestTimeout(reason=reason) from None
            if isinstance(error, web.RequestPayloadError):
                raise web.HTTPBadRequest(reason="The body is not encoded as the headers announce.") from None
            raise
        body = bytes(received)
        del received
        try:
            yield body
        finally:
            self.held_bytes -= _counted_bytes(len(body))

    def _hold(self, old_bytes: int, new_bytes: int) -> None:
        """Account for the growth of a body."""
        self._raise_if_too_large(new_bytes)
        more_bytes = _counted_bytes(new_bytes) - _counted_bytes(old_bytes)
        if more_bytes and self.held_bytes + more_bytes > self._max_held_bytes:
            raise BodyMemoryExhausted("The bodies of other requests use up the memory of the server. Retry later.")
        self.held_bytes += more_bytes

    def _raise_if_too_large(self, body_bytes: int) -> None:
        if body_bytes > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, body_bytes)


class JsonValueCounter:
    """Counts the values of a JSON text that arrives in chunks, without parsing it."""

    def __init__(self) -> None:
        self.count = 1
        """Upper bound of the number of values, at most twice as large. Meaningless for the rest of invalid JSON."""
        self._in_string = False
        self._start_of_escape = b""

    def feed(self, chunk: bytes) -> None:
        """Count the values in the next chunk: every value but the first follows a comma or an opening bracket."""
        text = self._start_of_escape + chunk
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._start_of_escape = b"\\" if text.endswith(b"\\") else b""
        parts = text.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self.count += len(outside) - len(outside.translate(None, b",[{"))
        self._in_string ^= len(parts) % 2 == 0


def _counted_bytes(body_bytes: int) -> int:
    return max(0, body_bytes - SMALL_BODY_BYTES)


def _raise_if_expensive(chunk: bytes, values: JsonValueCounter) -> None:
    # Python's parser accepts UTF-16, where characters are not counted correctly. NUL does not occur in UTF-8 JSON.
    if b"\0" in chunk:
        raise InvalidProgram("The body is not JSON in UTF-8: it contains a NUL byte.")
    values.feed(chunk)
    if values.count > MAX_JSON_VALUES:
        raise InvalidProgram(f"The body has more than {MAX_JSON_VALUES} JSON values. Send fewer files or cells.")
