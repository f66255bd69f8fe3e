"""A connection to an MCP server.

One task owns the connection: it enters the SDK's context managers and leaves them, because they must not be left in
another task. All methods are called on one event loop.

Invariants:

- A call ends with a result, a PolicyFault or an InfraFault, or is cancelled.
- After `close()`, the server that the connection has started has no processes left. A guard that takes longer than
  `CONNECTION_CLOSE_TIMEOUT_S` ends them in the background.
- A connection that is retired closes itself as soon as it has no calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from toolroll._internal.text import replace_lone_surrogates_in_json, shorten_middle
from toolroll.errors import InfraFault, PolicyFault
from toolroll.tools.mcp.http_exchange import ARGUMENT_STATUSES, HttpExchange, record_exchange
from toolroll.tools.mcp.settings import McpServerSettings, hide_url_secrets
from toolroll.tools.mcp.stdio import LONG_RESULT, ServerProcess
from toolroll.tracing.context import trace_headers

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp_types import CallToolResult

logger = logging.getLogger(__name__)

CONNECTION_CLOSE_TIMEOUT_S = 5.0
"""Timeout for closing a connection, after which its task is cancelled."""
LOSS_REPORT_TIMEOUT_S = 0.5
"""Time to wait for the cause of a lost connection, before a failed call is reported without it."""
MAX_PAGES = 100
"""Maximum number of pages of a list of tools."""
MAX_FAULT_CHARS = 1500
CLOSED_MESSAGE = "Connection closed"
LOST_MESSAGES = (CLOSED_MESSAGE, "SSE stream")
"""Starts of the messages of errors with the code CONNECTION_CLOSED that the SDK creates. Servers use the code, too."""
LONG_EVENT_MESSAGE = "SSE stream failed: Server-sent event exceeded"
"""Start of the SDK's message for an event of more than `MAX_MESSAGE_BYTES` over streamable HTTP."""
SERVER_ERROR_CODES = range(-32099, -31999)
"""Codes that JSON-RPC leaves to servers. With the status 400, servers report an unknown session with them."""


@dataclass(frozen=True)
class ListedTool:
    """A tool as its server describes it."""

    name: str
    description: str | None
    input_schema: dict[str, Any]

    @property
    def schema_hash(self) -> str:
        """Hash of all that the prompt contains of the tool."""
        return schema_hash([self.name, self.description, self.input_schema])


class McpServerFault(InfraFault):
    """Raised when an MCP server cannot be reached, has ended or violates the protocol."""

    status: int | None = None
    """Status of the HTTP response. With 429 or 503, for example, a limit that adapts is lowered."""
    retry_after_s: float = 0.0
    """Time for which the server asked to wait."""


def schema_hash(schema: Any) -> str:
    """Return the hash of a schema, which depends on the order of its keys as the prompt does."""
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]


class McpConnection:
    """A connection to a server. Call `start()` first and `close()` at the end.

    Args:
        settings: The server.
    """

    _client: Client

    def __init__(self, settings: McpServerSettings) -> None:
        self.settings = settings
        self.tools: dict[str, ListedTool] = {}
        """The tools of the server by name."""
        self.loss_reported = False
        """True if a call has failed because the connection was lost."""
        self._process: ServerProcess | None = ServerProcess(settings) if settings.command else None
        self._announced_changes = 0
        self._listed_changes = 0
        """Value of `_announced_changes` before the tools were listed."""
        self._closing = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._problem: str | None = None
        """Why the connection ended."""
        self._must_reconnect = False
        self.is_retired = False
        """True if no further calls may be made. The calls that are running continue."""
        self._running_calls = 0
        self._closing_retired: asyncio.Task[None] | None = None
        self._owner = asyncio.create_task(self._own())

    async def start(self) -> None:
        """Wait until the connection is established and the tools are listed.

        Raises:
            InfraFault: If the server cannot be reached, or does not answer within `start_timeout`.
        """
        timeout_s = self.settings.start_timeout
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._started)
        except TimeoutError:
            raise self.fault(f"did not start within {timeout_s:g} s") from None

    @property
    def is_usable(self) -> bool:
        """False if another connection has to be established for further calls."""
        has_ended = self._process is not None and self._process.has_ended
        return not (has_ended or self._must_reconnect or self.is_retired or self._owner.done())

    @property
    def list_changed(self) -> bool:
        """True if the server has announced other tools since they were listed."""
        return self._announced_changes != self._listed_changes

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult:
        """Call a tool. Runs in a separate task for each call.

        Args:
            name: Name of the tool on the server.
            arguments: Arguments of the call.
            timeout_s: Time after which the caller cancels the call. An HTTP request ends soon after it, even if the
                server ignores the cancellation.

        Returns:
            The result, which may be an error of the tool.

        Raises:
            PolicyFault: If the server rejects the call, or the result is too long.
            InfraFault: If the server has ended or violates the protocol.
        """
        from mcp import MCPError
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult
        from pydantic import ValidationError

        exchange = record_exchange(timeout_s)
        meta: Any = trace_headers() or None  # MCP names the fields of the trace context like the headers
        arguments = replace_lone_surrogates_in_json(arguments)
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments, _meta=meta))
        self._running_calls += 1
        try:
            return await self._client.session.send_request(request, CallToolResult)
        except MCPError as error:
            raise await self._read_error(error, exchange) from error
        except ValidationError as error:
            raise self.fault(f"returned an invalid result for {name!r}: {_first_line(error)}") from error
        finally:
            self._running_calls -= 1
            if self.is_retired:
                self._retire()

    async def list_again(self) -> None:
        """List the tools of the server again.

        Raises:
            InfraFault: If the server does not list them within `start_timeout`.
        """
        try:
            async with asyncio.timeout(self.settings.start_timeout):
                await self._list_tools()
        except Exception as error:
            fault = self.fault(self._problem or f"cannot list its tools: {_first_line(_leaf(error))}")
            self._retire()  # otherwise, all later calls would list the tools in vain
            raise fault from error

    async def responds(self, timeout_s: float) -> bool:
        """Return True if the server lists its tools within a timeout. The list is not used."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.list_tools()
        except Exception:  # it failed, or timed out
            return False
        return True

    def disconnect(self, reason: str | None = None) -> None:
        """End the connection because the server cannot be used any more. Its calls fail.

        Args:
            reason: Predicate of the message about the server, such as "exited with status 1". Default: the error that
                ends the connection.
        """
        self._problem = self._problem or reason
        self._must_reconnect = True
        self._closing.set()

    def _retire(self) -> None:
        """Have later calls use another connection. Close this one when no call runs."""
        self.is_retired = self.loss_reported = True
        if not self._running_calls:
            self._closing_retired = asyncio.create_task(self.close())

    async def close(self) -> None:
        """Close the connection and end the server. Takes a bounded time."""
        self._closing.set()
        if not self._started.done():
            self._owner.cancel()
        _, pending = await asyncio.wait([self._owner], timeout=CONNECTION_CLOSE_TIMEOUT_S)
        if pending:
            logger.warning("closing the connection to MCP server %s timed out", self.settings.label)
            self._owner.cancel()

    async def lost(self, message: str = CLOSED_MESSAGE) -> InfraFault:
        """Return the fault for a call that failed because the connection has ended.

        Args:
            message: Message of the SDK, for the case that nothing else is known.
        """
        self.loss_reported = True
        if self._process is not None and not self._must_reconnect:
            return self.fault(await self._process.describe_end())
        await asyncio.wait([self._owner], timeout=LOSS_REPORT_TIMEOUT_S)
        return self.fault(self._problem or message)

    def fault(self, reason: str, exchange: HttpExchange | None = None) -> McpServerFault:
        """Return a fault of the server.

        Args:
            reason: Predicate of the message about the server, such as "exited with status 1".
            exchange: Its HTTP response, if there is one.
        """
        reason = shorten_middle(hide_url_secrets(reason), MAX_FAULT_CHARS).rstrip(".")
        fault = McpServerFault(f"MCP server {self.settings.label}: {reason}.")
        if exchange is not None:
            fault.status, fault.retry_after_s = exchange.status, exchange.retry_after_s
        return fault

    async def _own(self) -> None:
        """Establish the connection, keep it until it is closed, and close it."""
        exchange = record_exchange()
        try:
            async with _client(self._transport(), self._on_message) as self._client:
                await self._list_tools()
                async with AsyncExitStack() as stack:
                    await self._listen(stack)
                    self._started.set_result(None)
                    await self._closing.wait()
        except Exception as error:
            self._problem = self._problem or _first_line(_leaf(error))
            if self._started.done():
                logger.info("%s", self.fault(f"the connection ended: {self._problem}"))
            elif self._process is not None and self._process.has_ended:
                self._started.set_exception(await self.lost())
            else:
                status = f" ({exchange})" if exchange.status and exchange.status >= 400 else ""
                problem = exchange.failure or f"{self._problem}{status}"
                self._started.set_exception(self.fault(f"cannot be started or reached: {problem}", exchange))
        finally:
            if not self._started.done():
                self._started.cancel()
            elif not self._started.cancelled():
                self._started.exception()  # nobody may be waiting any more

    def _transport(self) -> AbstractAsyncContextManager[TransportStreams]:
        if self._process is not None:
            return self._process.connect()
        from toolroll.tools.mcp.http import HttpTransport

        return HttpTransport(self.settings, self.disconnect).connect()

    async def _list_tools(self) -> None:
        announced = self._announced_changes
        self.tools = await _list_all(self._client)
        self._listed_changes = announced

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Subscribe to changes of the list of tools. Servers of older protocols announce them without it."""
        from mcp import MCPError
        from mcp.client.subscriptions import SubscriptionLost
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS

        tools = self._client.server_capabilities.tools
        if self._client.protocol_version in MODERN_PROTOCOL_VERSIONS and tools is not None and tools.list_changed:
            with contextlib.suppress(MCPError, SubscriptionLost):
                await stack.enter_async_context(self._client.listen(tools_list_changed=True))

    async def _on_message(self, message: Any) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, Exception) and self.settings.transport == "sse":  # no call would get its response
            self.disconnect(f"sent an invalid message: {_first_line(message)}")
        self._announced_changes += isinstance(message, ToolListChangedNotification)

    async def _read_error(self, error: Any, exchange: HttpExchange) -> PolicyFault | InfraFault:
        """Return the fault for an error response.

        Errors that only the server, the network or this client can cause are infra faults. All others may depend on the
        arguments, so they are policy faults.
        """
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR

        if exchange.is_too_long or error.message.startswith(LONG_EVENT_MESSAGE):
            return PolicyFault(LONG_RESULT)
        if exchange.failure is not None:
            return self.fault(f"the request failed: {exchange.failure}", exchange)
        if error.code == CONNECTION_CLOSED and not self.is_usable:
            return await self.lost(error.message)
        if error.code == CONNECTION_CLOSED and self.settings.url and error.message.startswith(LOST_MESSAGES):
            if error.message == CLOSED_MESSAGE:
                self.disconnect()
            return await self.lost(error.message)
        status = "" if exchange.is_message else f" ({exchange})"
        is_session_unknown = exchange.status == 404 or (
            exchange.status == 400 and (error.code == INVALID_REQUEST or error.code in SERVER_ERROR_CODES)
        )
        if is_session_unknown:  # if other calls still get responses, it was only this call that the server rejected
            self.is_retired = self.loss_reported = True
        is_rejection = exchange.is_message or exchange.status in ARGUMENT_STATUSES
        if is_session_unknown or not is_rejection or error.code in (METHOD_NOT_FOUND, PARSE_ERROR):
            return self.fault(f"responded with error {error.code}: {error.message}{status}", exchange)
        return PolicyFault(f"{error.message or f'The call failed with error {error.code}.'}{status}")


@asynccontextmanager
async def _client(transport: Any, on_message: Any) -> AsyncIterator[Client]:
    from mcp import Client
    from mcp_types import Implementation

    info = Implementation(name="toolroll", version=version("toolroll"))
    async with Client(transport, cache=None, client_info=info, message_handler=on_message) as client:
        yield client


async def _list_all(client: Client) -> dict[str, ListedTool]:
    tools: dict[str, ListedTool] = {}
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools |= {one.name: ListedTool(one.name, one.description, one.input_schema) for one in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _leaf(error: BaseException) -> BaseException:
    """Return the first exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() if error is not None else []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
