"""Serve tools over stdin and stdout. The process is one session, in every version of the protocol.

Invariant: only messages of the protocol reach stdout. The output of tools, of modules and of their child processes goes
to stderr, and they read an empty stdin.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import anyio
from mcp.server.stdio import stdio_server

from toolroll.integrations.mcp.protocol import Context, build_server, client_of
from toolroll.integrations.mcp.session import ToolSession
from toolroll.integrations.mcp.sessions import ToolSessions


class ProtocolStreams:
    """Private copies of stdin and stdout. Creating them diverts the originals, so do it once and before anything else.

    The SDK diverts them as well, but later: modules of tools may print when they are imported.
    """

    def __init__(self) -> None:
        self.stdin = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
        self.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)


async def serve_stdio(sessions: ToolSessions, streams: ProtocolStreams, stop: asyncio.Event) -> None:
    """Serve one client until it closes stdin or `stop` is set.

    A thread may still wait for stdin afterwards, so end the process with `os._exit`.

    Args:
        sessions: Opens the session of the client. The caller closes it.
        streams: The streams of the client.
        stop: Ends the server.
    """
    session: ToolSession | None = None

    def session_of(context: Context) -> ToolSession:
        nonlocal session
        session = session or sessions.open(client_of(context))
        return session

    server = build_server(sessions, session_of)

    async def serve() -> None:
        files: list[Any] = [anyio.wrap_file(streams.stdin), anyio.wrap_file(streams.stdout)]
        async with stdio_server(*files) as (received, sent):
            await server.run(received, sent, server.create_initialization_options())

    serving, stopping = asyncio.create_task(serve()), asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if serving.done():
        _check(serving)


def _check(serving: asyncio.Task[None]) -> None:
    """Raise the error of the server, unless the client closed its end of stdout before reading an answer."""
    error = serving.exception()
    if error is not None:
        only_pipes = isinstance(error, BaseExceptionGroup) and error.split(BrokenPipeError)[1] is None
        if not (only_pipes or isinstance(error, BrokenPipeError)):
            raise error
