"""A server that is started by this process and communicates over stdin and stdout.

The server runs under a guard (`server_guard.py`), so none of its processes outlives it or this process.

Unlike the SDK's transport, this one bounds what it reads. A response of more than `MAX_MESSAGE_BYTES` is discarded and
fails its call only. A server that writes one endless line, or output that is not MCP, ends its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from toolroll._internal.cancellation import finish_despite_cancellation, wait_despite_cancellation
from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.tools.mcp import server_guard
from toolroll.tools.mcp.settings import McpServerSettings

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCMessage

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
LONG_RESULT = f"The result of the tool is too long: it has more than {MAX_MESSAGE_BYTES >> 20} MiB."
"""Message of the fault of a call whose response has more than `MAX_MESSAGE_BYTES`."""
MAX_DISCARDED_LINE_BYTES = 1 << 30
"""Maximum length of a line that is discarded because it is a message of more than `MAX_MESSAGE_BYTES`."""
KEPT_END_BYTES = 200
"""Length of both ends of such a line that are kept to read its id."""
RESPONSE_WITH_ID_FIRST = re.compile(rb'\s*{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*,\s*"(?:result|error)"')
"""Start of a response of the SDK for Python."""
RESPONSE_WITH_ID_LAST = re.compile(
    rb'\s*{\s*"(?:result|error)".*,\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*}\s*', re.DOTALL
)
"""A response of the SDK for TypeScript. Text in a result cannot match: its quotation marks are escaped."""
MAX_STRAY_BYTES = 1 << 20
"""Maximum output between two messages that is not MCP, such as log lines."""
READ_CHUNK_BYTES = 1 << 16
STDERR_TAIL_BYTES = 500
EXIT_GRACE_S = 0.5
"""Time in which a server may end after its stdin is closed, before it receives SIGTERM."""
EXIT_POLL_INTERVAL_S = 0.02
"""Interval at which the end of a process is checked."""
GUARD_TIMEOUT_S = 30.0
"""Time in which a guard must have ended its server, before the guard is killed itself. A caller of
`McpConnection.close` waits less: the guard then works on in the background."""


class ServerProcess:
    """The process of a server, with its guard. `start()` starts it and `stop()` ends it.

    Args:
        settings: The server, which has a command.
    """

    def __init__(self, settings: McpServerSettings) -> None:
        self._settings = settings
        self._stderr = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self.problem: str | None = None
        """Why the connection ended, if not because the process did."""
        self.has_ended = False
        """True if the server has closed its stdout, or the connection was ended because of a `problem`."""

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: If no process can be started, or this machine does not run Linux.
        """
        from mcp.client.stdio import get_default_environment

        if sys.platform != "linux":
            raise OSError("MCP servers can be started on Linux only. Start it on another machine, and set its `url`.")
        settings = self._settings
        command = [settings.program, *settings.args]
        if settings.isolate is not None:
            from toolroll.tools.mcp.isolation import jailed_command

            command = await jailed_command(settings, settings.isolate)
        directory = settings.cwd or (server_guard.NEW_DIRECTORY if settings.scope == "trajectory" else str(Path.cwd()))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", server_guard.__file__, str(os.getpid()), directory),
            *command,
            env={**get_default_environment(), **settings.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl+C in the terminal is for this process only
            limit=READ_CHUNK_BYTES,
        )
        self._tasks.append(asyncio.create_task(self._read_stderr()))

    async def stop(self) -> None:
        """End the server and all processes that it has started, even if the caller is cancelled meanwhile.

        Takes at most `EXIT_GRACE_S` + `GUARD_TIMEOUT_S`.
        """
        await finish_despite_cancellation(self._stop())

    async def _stop(self) -> None:
        process = self._process
        try:
            if process.stdin is not None:
                process.stdin.close()
            if not await self._ends_within(0.0 if self.problem else EXIT_GRACE_S):
                await self._terminate()
        except asyncio.CancelledError:  # the event loop ends, and has cancelled all tasks once
            await self._terminate()
        finally:
            for task in self._tasks:
                task.cancel()
            # Else unread output would keep its pipe open. This kills a guard that is still running.
            process._transport.close()  # type: ignore[attr-defined]

    async def _terminate(self) -> None:
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        if not await self._ends_within(GUARD_TIMEOUT_S):
            logger.warning("the guard of an MCP server did not end: pid %d", process.pid)

    async def describe_end(self) -> str:
        """Return why the connection ended, as the end of a sentence about the server."""
        if self.problem is not None:
            return self.problem
        if not await self._ends_within(EXIT_GRACE_S):
            return "closed its output"
        await asyncio.wait(self._tasks, timeout=EXIT_GRACE_S)  # until stderr is read
        text = self._stderr.decode(errors="replace").strip()
        return f"exited with status {self._process.returncode}" + (f": {text}" if text else "")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TransportStreams]:
        """Start the server, and yield the streams of its messages. The server ends with the block."""
        starting = asyncio.create_task(self.start())
        try:
            await wait_despite_cancellation(starting)  # a process that was only half started could not be stopped
            starting.result()
            assert self._process.stdin is not None
            yield MessageReader(self._messages()), MessageWriter(self._process.stdin)
        finally:
            if not starting.cancelled() and starting.exception() is None:
                await self.stop()

    async def _ends_within(self, timeout_s: float) -> bool:
        """Return True if the process ends within a time. `Process.wait` would also wait until all output is read."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._process.returncode is None and clock() < deadline:  # noqa: ASYNC110 (asyncio has no event for it)
            await asyncio.sleep(EXIT_POLL_INTERVAL_S)
        return self._process.returncode is not None

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(READ_CHUNK_BYTES):
            self._stderr += chunk
            del self._stderr[:-STDERR_TAIL_BYTES]

    async def _messages(self) -> AsyncGenerator[SessionMessage]:
        """Yield the messages of the server, until it ends or violates the protocol."""
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        stray_bytes = 0
        message: JSONRPCMessage | None
        async for line in self._lines():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                message = _recover_message(line)
            if message is not None:
                stray_bytes = 0
                yield SessionMessage(message)
                continue
            stray_bytes += len(line) + 1
            if stray_bytes > MAX_STRAY_BYTES:
                self.problem = f"wrote {stray_bytes} bytes that are not MCP messages, e.g. {line[:60]!r}"
                break
        self.has_ended = True  # not if the session stops reading, for example because the server rejects it

    async def _lines(self) -> AsyncGenerator[bytes]:
        """Yield the lines of stdout, with an error in place of a response that is too long.

        Sets `problem` and ends at a line that is too long to be discarded, or is not a message.
        """
        assert self._process.stdout is not None
        start, discarded_bytes = bytearray(), 0
        while chunk := await self._process.stdout.read(READ_CHUNK_BYTES):
            *complete, rest = chunk.split(b"\n")
            for end in complete:
                line = bytes(start) + end if start else end
                yield _long_response_error(line[:KEPT_END_BYTES] + line[-KEPT_END_BYTES:]) if discarded_bytes else line
                start.clear()
                discarded_bytes = 0
                await asyncio.sleep(0)  # a server that writes without end must not occupy the event loop
            start += rest
            if len(start) > MAX_MESSAGE_BYTES:
                discarded_bytes += len(start) - 2 * KEPT_END_BYTES
                del start[KEPT_END_BYTES:-KEPT_END_BYTES]
                if discarded_bytes > MAX_DISCARDED_LINE_BYTES or not start.lstrip().startswith(b"{"):
                    self.problem = f"wrote a line of more than {MAX_MESSAGE_BYTES} bytes"
                    return


class MessageReader:
    """The stream from which the SDK reads the messages of a server, without a queue or a task in between.

    Args:
        messages: The messages.
    """

    def __init__(self, messages: AsyncGenerator[SessionMessage]) -> None:
        self._messages = messages

    async def receive(self) -> SessionMessage:
        """Return the next message.

        Raises:
            anyio.EndOfStream: If there is none.
        """
        import anyio

        try:
            return await anext(self._messages)
        except StopAsyncIteration:
            raise anyio.EndOfStream from None

    async def aclose(self) -> None:
        """Stop reading."""
        await self._messages.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage:
        return await anext(self._messages)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class MessageWriter:
    """The stream to which the SDK writes messages for a server.

    Args:
        stdin: Standard input of the server.
    """

    def __init__(self, stdin: asyncio.StreamWriter) -> None:
        self._stdin = stdin

    async def send(self, message: SessionMessage) -> None:
        """Write a message, waiting while the server does not read earlier ones. If cancelled, it writes nothing."""
        with contextlib.suppress(ConnectionError):  # the end of stdout reports that the server is gone
            await self._stdin.drain()
            self._stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async def aclose(self) -> None:
        """Do nothing: `ServerProcess.stop` closes stdin."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _long_response_error(line: bytes) -> bytes:
    """Return an error response in place of a response that is too long, or nothing if the line is something else.

    Args:
        line: The line without its middle.
    """
    from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError

    found = RESPONSE_WITH_ID_FIRST.match(line) or RESPONSE_WITH_ID_LAST.fullmatch(line)
    if found is None:
        logger.warning("discarded a message of an MCP server of more than %d bytes", MAX_MESSAGE_BYTES)
        return b""
    error = JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=ErrorData(code=INTERNAL_ERROR, message=LONG_RESULT))
    return error.model_dump_json(by_alias=True).encode()


def _recover_message(line: bytes) -> JSONRPCMessage | None:
    """Return the message of a line that the SDK cannot read, or None if the line is something else, such as a log line.

    Lone surrogates and invalid UTF-8 are replaced. An invalid response becomes an error, so that its request ends.
    """
    from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    if b'"jsonrpc"' not in line:  # saves most of the time for log lines
        return None
    try:
        content = replace_lone_surrogates_in_json(json.loads(line.decode(errors="replace")))
    except (ValueError, RecursionError):
        return None
    try:
        return jsonrpc_message_adapter.validate_python(content, by_name=False)
    except ValueError:
        is_response = isinstance(content, dict) and content.get("jsonrpc") == "2.0" and "method" not in content
        if not is_response or type(content.get("id")) not in (int, str):
            return None
        problem = f"The response violates the protocol: {line[:60]!r}"
        return JSONRPCError(jsonrpc="2.0", id=content["id"], error=ErrorData(code=PARSE_ERROR, message=problem))
