"""Scripted sandbox on bare sockets, so that its responses can violate HTTP.

    async with FaultServer([answer(429, headers={"Retry-After": "1"}), answer()]) as server:
        ...

Each request gets the next behaviour of the script. The last behaviour is repeated.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

SUCCESS = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "execution_time": 0.01, "return_code": 0, "stdout": "2\n", "stderr": ""},
    "executor_pod_name": None,
    "files": {},
}

Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


def program(**changes: Any) -> dict[str, Any]:
    """Return the response for a program whose result has the given fields."""
    return {**SUCCESS, "status": "Failed", "run_result": {**SUCCESS["run_result"], **changes}}  # type: ignore[dict-item]


def answer(status: int = 200, body: Any = SUCCESS, headers: dict[str, str] | None = None) -> Behaviour:
    """Send a complete response. A body other than bytes is sent as JSON."""
    return raw(whole(status, body, headers), close=False)


def whole(status: int = 200, body: Any = SUCCESS, headers: dict[str, str] | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{key}: {value}\r\n" for key, value in (headers or {}).items())
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(content)}\r\n\r\n".encode() + content


def raw(data: bytes, close: bool = True) -> Behaviour:
    """Send bytes, then close the connection."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return behave


def hang(data: bytes = b"") -> Behaviour:
    """Send bytes, then nothing."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await asyncio.Event().wait()

    return behave


def drip(data: bytes, pause: float) -> Behaviour:
    """Send one byte at a time."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(pause)

    return behave


def after(seconds: float, then: Behaviour) -> Behaviour:
    """Delay a behaviour."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        await then(writer)

    return behave


class FaultServer:
    """Server at `url`. `requests` has the received bodies, `heads` the request lines and headers."""

    def __init__(self, script: Iterable[Behaviour] = (answer(),), *, reads: bool = True) -> None:
        self.script = list(script)
        self.reads = reads
        self.requests: list[Any] = []
        self.heads: list[str] = []
        self.connections = 0
        self.open = 0
        self.in_flight = self.max_in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the server and all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_closed(self) -> None:
        """Wait up to 1 s until the client has closed all connections."""
        async with asyncio.timeout(1):
            while self.open:
                await asyncio.sleep(0.01)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        self.open += 1
        try:
            while not writer.is_closing() and await self._serve(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not self.reads:
            await asyncio.Event().wait()
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((line for line in head.lower().split("\r\n") if line.startswith("content-length:")), ":0")
        body = await reader.readexactly(int(length.split(":")[1]))
        self.heads.append(head)
        self.requests.append(json.loads(body) if body else None)
        behave = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        gone = asyncio.ensure_future(reader.read(1))  # our clients send nothing before the response
        acting = asyncio.ensure_future(behave(writer))
        try:
            done, _ = await asyncio.wait({gone, acting}, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                return False
            await acting
        finally:
            self.in_flight -= 1
            for task in (gone, acting):
                task.cancel()
            await asyncio.gather(gone, acting, return_exceptions=True)
        return True
