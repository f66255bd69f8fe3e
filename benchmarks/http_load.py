"""Send the same HTTP request again and again over some connections, at little cost for the sender."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any, cast

from yarl import URL


class HttpLoad:
    """A closed loop: each connection sends a request as soon as the previous one is answered.

    Args:
        url: URL to send the requests to.
        body: JSON body of the requests.
        connections: Number of connections.
    """

    def __init__(self, url: str, body: dict[str, Any], connections: int) -> None:
        self.responses: Counter[int] = Counter()
        """Number of responses by HTTP status."""
        self.is_stopped = False
        self._url = URL(url)
        content = json.dumps(body).encode()
        head = f"POST {self._url.path} HTTP/1.1\r\nHost: {self._url.authority}\r\nContent-Length: {len(content)}"
        self.request = f"{head}\r\n\r\n".encode() + content
        self._connections = connections

    async def rate(self, seconds: float) -> float:
        """Return the number of responses per second, measured for some time."""
        loop = asyncio.get_running_loop()
        host, port = self._url.host, self._url.port
        assert host
        assert port
        transports = [
            (await loop.create_connection(lambda: _LoadConnection(self), host, port))[0]
            for _ in range(self._connections)
        ]
        await asyncio.sleep(seconds / 4)
        started, before = time.perf_counter(), self.responses.total()
        await asyncio.sleep(seconds)
        rate = (self.responses.total() - before) / (time.perf_counter() - started)
        self.is_stopped = True
        for transport in transports:
            transport.close()
        return rate


class _LoadConnection(asyncio.Protocol):
    def __init__(self, load: HttpLoad) -> None:
        self._load = load
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        self._load.responses[int(head.split(b" ", 2)[1])] += 1
        self._received = b""
        if not self._load.is_stopped:
            self._transport.write(self._load.request)
