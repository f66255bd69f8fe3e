"""Status of the HTTP response to a call, which the SDK does not report.

Invariant: a call reads the status of the response to its request, however many calls share a connection.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass

ARGUMENT_STATUSES = (400, 413, 414, 422, 431)
"""Statuses that the arguments of a call can cause."""
MESSAGE_TYPES = ("application/json", "text/event-stream")
"""Types of the content of MCP messages."""


REQUEST_DEADLINE_MARGIN_S = 1.0
"""Time by which an HTTP request of a call may outlast the call's timeout, so that the timeout is reported first."""


@dataclass
class HttpExchange:
    """The last HTTP response to the JSON-RPC requests of a task. Replies to requests of the server do not count."""

    deadline: float | None = None
    """Time by which the HTTP requests must end, on the clock of the event loop."""

    status: int | None = None
    """Its status. None without a response, or if the transport is not streamable HTTP."""
    content_type: str = ""
    retry_after_s: float = 0.0
    """Time for which the server asked to wait."""
    failure: str | None = None
    """Why the request failed. The status is 502 then."""
    is_too_long: bool = False
    """True if it failed because the response has more than `MAX_MESSAGE_BYTES`."""

    @property
    def is_message(self) -> bool:
        """True if the response can be an MCP message, or there is none."""
        return self.status is None or (self.status == 200 and self.content_type in MESSAGE_TYPES)

    def __str__(self) -> str:
        return f"HTTP status {self.status}" + (f", {self.content_type}" if self.status == 200 else "")


_exchange: ContextVar[HttpExchange | None] = ContextVar("toolroll_mcp_exchange", default=None)


def record_exchange(timeout_s: float | None = None) -> HttpExchange:
    """Record the responses to the requests of the current task in the object that is returned.

    Args:
        timeout_s: Timeout of the task. Its HTTP requests end `REQUEST_DEADLINE_MARGIN_S` later.
    """
    exchange = HttpExchange()
    if timeout_s is not None:
        exchange.deadline = asyncio.get_running_loop().time() + timeout_s + REQUEST_DEADLINE_MARGIN_S
    _exchange.set(exchange)  # the SDK sends each request in the context of its caller
    return exchange


def current_exchange() -> HttpExchange | None:
    """Return the object for the current request."""
    return _exchange.get()
