"""The process of `toolroll tools serve`: streams, signals and exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolroll.errors import ConfigError

if TYPE_CHECKING:
    from toolroll.integrations.mcp.http import HttpSettings
    from toolroll.integrations.mcp.sessions import ToolSessions
    from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

QUIET_LOGGERS = ("client", "httpx2", "mcp", "uvicorn")
"""Loggers of the SDK and of HTTP libraries, which only log warnings. They log ids of sessions and URLs, which may be
secrets."""

Serve = Callable[["ToolSessions", asyncio.Event], Awaitable[None]]
"""Serves sessions until the event is set."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `toolroll tools serve`."""

    create_kwargs: Mapping[str, Any]
    """Arguments of `create`, for all tools or by tool name."""
    records: Path | None
    call_timeout: float
    idle_timeout: float


def serve_mcp(load_tools: Callable[[], list[BaseTool[Any]]], http: str | None, options: ServeOptions) -> None:
    """Serve tools until the client leaves or a signal arrives, and end the process.

    Args:
        load_tools: Function that loads the tools. Its output does not reach a client.
        http: Address to listen on, or None for stdin and stdout.
        options: Other options.
    """
    from uvloop import new_event_loop

    serve = _over_stdio() if http is None else _over_http(http, options.idle_timeout)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    tools = load_tools()
    with redirect_stdout(sys.stderr), asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve_until_stopped(serve, tools, options))


async def _serve_until_stopped(serve: Serve, tools: Sequence[BaseTool[Any]], options: ServeOptions) -> None:
    from toolroll.integrations.mcp.sessions import ToolSessions
    from toolroll.records.writer import RecordWriter

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop_or_quit, stop)
    writer = None
    if options.records is not None:  # several servers may write at the same time, so each has a directory
        writer = RecordWriter(options.records, writer=f"{socket.gethostname()}-{os.getpid()}")
    kwargs = create_kwargs_by_tool(options.create_kwargs, [tool.name for tool in tools])
    async with ToolSessions(
        tools, create_kwargs=kwargs, call_timeout_s=options.call_timeout, records=writer
    ) as sessions:
        await serve(sessions, stop)
    if writer is not None:
        writer.close()
    logger.info("stopped")
    os._exit(0)  # sys.exit would wait for the threads of sync tools that are still running, and of stdin


def create_kwargs_by_tool(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the create_kwargs of each tool.

    Args:
        given: The create_kwargs of all tools or, if each key is the name of a tool, objects with those of each tool.
        names: Names of the tools.
    """
    if given.keys() <= set(names) and all(isinstance(value, dict) for value in given.values()):
        return dict(given)
    return dict.fromkeys(names, given)


def _stop_or_quit(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(130)
    stop.set()


def _over_stdio() -> Serve:
    from toolroll.integrations.mcp.stdio import ProtocolStreams, serve_stdio

    streams = ProtocolStreams()

    async def serve(sessions: ToolSessions, stop: asyncio.Event) -> None:
        logger.info("serving over stdio: %s", ", ".join(sessions.tools))
        await serve_stdio(sessions, streams, stop)

    return serve


def _over_http(address: str, idle_timeout: float) -> Serve:
    from toolroll.integrations.mcp.http import HttpServer

    settings = _http_settings(address, idle_timeout)

    async def serve(sessions: ToolSessions, stop: asyncio.Event) -> None:
        server = HttpServer(sessions, settings)
        logger.info("serving on %s: %s", server.url, ", ".join(sessions.tools))
        await server.serve(stop)

    return serve


def _http_settings(address: str, idle_timeout: float) -> HttpSettings:
    from toolroll.integrations.mcp.http import MCP_TOKEN_ENV_VAR, HttpSettings

    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"--http: invalid address {address!r}. Expected HOST:PORT, for example 127.0.0.1:8090.")
    token = os.environ.pop(MCP_TOKEN_ENV_VAR, None) or None  # removed, so that no child process inherits it
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    return HttpSettings(host=host, port=int(port), token=token, idle_timeout_s=idle_timeout)
