"""The sandbox server: set-up, listening, shutdown."""

from __future__ import annotations

import asyncio
import os
import resource
import selectors
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from toolroll.errors import ConfigError
from toolroll.sandbox.protocol import max_wall_time
from toolroll.sandbox.server.api.access_log import AccessLogger, access_logger
from toolroll.sandbox.server.api.http_app import HttpApp
from toolroll.sandbox.server.execution import languages
from toolroll.sandbox.server.execution.languages import Toolchain
from toolroll.sandbox.server.execution.plain_executor import NoIsolation, PlainExecutor
from toolroll.sandbox.server.settings import ServerSettings, can_isolate, require_isolation

if TYPE_CHECKING:  # modules of Linux
    from toolroll.sandbox.server.execution.executor import Executor, Toolchains
    from toolroll.sandbox.server.execution.isolation_tiers import IsolationTier

DRAIN_MARGIN_S = 60.0
"""Time for running programs to end on shutdown, in addition to the maximum timeout."""
KEEPALIVE_TIMEOUT_S = 75.0
"""Time after which a connection without a request is closed. Clients send again on a new connection."""
MAX_OPEN_FILES_OF_MACOS = 10240
"""Maximum soft limit of open files that macOS always accepts, even if the hard limit is infinite."""
LISTEN_BACKLOG = 4096
"""Connections that the kernel queues. Thousands of clients may connect at once; they wait in the admission queue."""


class SandboxServer:
    """A sandbox server in this process. Use it as an async context manager.

    Args:
        settings: Settings of the server.

    Example:
        ```python
        async with SandboxServer(ServerSettings(port=0)) as server:
            print(server.url, server.isolation.tier)
        ```
    """

    url: str
    """Address of the server, after it has started."""
    isolation: IsolationTier | NoIsolation
    """Isolation of the programs."""
    toolchains: Toolchains
    """Toolchain of each language, or how to install it."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> SandboxServer:
        """Set up the server and start listening.

        Raises:
            ConfigError: If the server cannot be started. The message names the remedy.
        """
        require_isolation(unsafe=self.settings.unsafe)
        _raise_open_file_limit()
        python = self.settings.python
        search_path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
        # Without isolation, compilers are not searched: on a Mac without them, that would open a dialog.
        self.toolchains = await asyncio.to_thread(languages.find_all, search_path, python, with_compilers=can_isolate())
        self.executor = (
            await self._isolating_executor()
            if can_isolate()
            else PlainExecutor(self.settings, self.toolchains, search_path)
        )
        self.isolation = self.executor.isolation
        self.http_app = HttpApp(self.settings, self.executor)
        try:
            await self.executor.start()
            await self._listen()
        except OSError as error:
            await self.executor.close()
            raise ConfigError(f"The server could not be started: {error}") from error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop listening and kill all programs."""
        if self._runner:
            await self._runner.cleanup()
        await self.executor.close()

    async def drain(self) -> None:
        """Reject new requests and wait until all programs have ended."""
        await self.http_app.drain(max_wall_time(self.settings.max_timeout) + DRAIN_MARGIN_S)

    async def _isolating_executor(self) -> Executor:
        from toolroll.sandbox.server.execution import isolation_tiers
        from toolroll.sandbox.server.execution.executor import Executor

        found = [toolchain for toolchain in self.toolchains.values() if isinstance(toolchain, Toolchain)]
        toolchain_paths = [path for toolchain in found for path in toolchain.readable]
        isolation = await isolation_tiers.find(self.settings, toolchain_paths)
        return Executor(self.settings, isolation, self.toolchains)

    async def _listen(self) -> None:
        app = self.http_app.build()
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=access_logger if self.settings.access_log else None,
            access_log_class=AccessLogger,
            shutdown_timeout=1,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.settings.host, self.settings.port, backlog=LISTEN_BACKLOG)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that programs cannot break.

    The kernel limits the epoll watches of each user. Programs of a server that runs as an unprivileged user have the
    same user and can use up all watches, upon which uvloop aborts the process. poll(2) has no such limit. A server that
    runs as root does not share its user with programs.

    Returns:
        A loop of uvloop for root, otherwise a loop of asyncio that uses poll.

    Example:
        ```python
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())
        ```
    """
    return uvloop.new_event_loop() if os.geteuid() == 0 else asyncio.SelectorEventLoop(selectors.PollSelector())


def _raise_open_file_limit() -> None:
    """Raise the limit to the maximum: a connection uses one descriptor, a running program about nine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if sys.platform == "linux" else max(soft, min(hard, MAX_OPEN_FILES_OF_MACOS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
