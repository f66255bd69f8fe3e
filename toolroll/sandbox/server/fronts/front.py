"""A front of the sandbox server: the HTTP application and the executor behind it, in this process."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from toolroll.sandbox import protocol
from toolroll.sandbox.server.api.access_log import AccessLogger, access_logger
from toolroll.sandbox.server.api.http_app import FORWARDED_HEADER, FrontDied, HttpApp
from toolroll.sandbox.server.execution import languages
from toolroll.sandbox.server.execution.languages import Toolchain, Toolchains
from toolroll.sandbox.server.execution.plain_executor import PlainExecutor
from toolroll.sandbox.server.hub.hub_client import HubClient
from toolroll.sandbox.server.hub.messages import FrontMessage, ServerDescription
from toolroll.sandbox.server.settings import ServerSettings, can_isolate
from toolroll.tracing.context import TRACEPARENT_HEADER

if TYPE_CHECKING:  # modules of Linux
    from toolroll.sandbox.server.execution.executor import Executor

KEEPALIVE_TIMEOUT_S = 75.0
"""Time after which a connection without a request is closed. Clients send again on a new connection."""
LISTEN_BACKLOG = 4096
"""Connections that the kernel queues. Thousands of clients may connect at once; they wait in the admission queue."""
MAX_OPEN_FILES_OF_MACOS = 10240
"""Maximum soft limit of open files that macOS always accepts, even if the hard limit is infinite."""
RESTART_CHECK_INTERVAL_S = 1.0
_KEPT_HEADERS = (
    "Authorization",
    TRACEPARENT_HEADER,
    protocol.DEADLINE_HEADER,
    protocol.LEASE_HEADER,
    protocol.GRANTED_HEADER,
)


class Front:
    """Handles connections, in one of the processes of a server.

    Args:
        settings: Settings of the server.
        send: Function that sends a message to the hub.
        scope_key: Secret of the server, by which the names of sessions are made unique to a token.
        socket_directory: Directory with a Unix socket of each front, if there are several.
    """

    executor: Executor | PlainExecutor
    http_app: HttpApp
    runner: web.AppRunner

    def __init__(
        self,
        settings: ServerSettings,
        send: Callable[[FrontMessage], None],
        scope_key: bytes,
        socket_directory: Path | None = None,
    ) -> None:
        self.settings = settings
        self.hub = HubClient(send, lambda name: self.executor.sessions.end(name))
        self._scope_key = scope_key
        self._socket_directory = socket_directory
        self._clients: dict[int, aiohttp.ClientSession] = {}
        self._reporting: asyncio.Task[None] | None = None

    async def start(self, toolchains: Toolchains) -> ServerDescription:
        """Find the isolation of this machine, start the executor and set up the HTTP application.

        Args:
            toolchains: Toolchain of each language.

        Returns:
            A description of this front.

        Raises:
            ConfigError: If programs cannot be run or isolated.
            OSError: If the executor cannot be started.
        """
        raise_open_file_limit()
        if can_isolate():
            from toolroll.sandbox.server.execution import isolation_tiers
            from toolroll.sandbox.server.execution.executor import Executor

            found = [toolchain for toolchain in toolchains.values() if isinstance(toolchain, Toolchain)]
            readable = [path for toolchain in found for path in toolchain.readable]
            isolation = await isolation_tiers.find(self.settings, readable)
            await self.serve(Executor(self.settings, isolation, toolchains))
        else:
            await self.serve(PlainExecutor(self.settings, toolchains, _search_path(self.settings.python)))
        isolation_found = self.executor.isolation
        available = sorted(name for name, toolchain in toolchains.items() if isinstance(toolchain, Toolchain))
        return ServerDescription(isolation_found.tier, isolation_found.gaps, isolation_found.notes, list(available))

    async def serve(self, executor: Executor | PlainExecutor) -> None:
        """Start an executor and set up the HTTP application. Connections are added by the caller."""
        self.executor = executor
        executor.sessions.on_closed = lambda name, crashed: self.hub.session_closed(name, crashed=crashed)
        self.http_app = HttpApp(self.settings, executor, self.hub, self._scope_key, self._forward)
        self.runner = web.AppRunner(
            self.http_app.build(),
            handler_cancellation=True,
            access_log=access_logger if self.settings.access_log else None,
            access_log_class=AccessLogger,
            shutdown_timeout=1,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        )
        await self.runner.setup()
        self._reporting = asyncio.create_task(self._report_restarts())
        await executor.start()

    async def close(self) -> None:
        """Close all connections and kill all programs."""
        if self._reporting:
            self._reporting.cancel()
            await self.runner.cleanup()
            await self.executor.close()
        for client in self._clients.values():
            await client.close()

    async def _report_restarts(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(RESTART_CHECK_INTERVAL_S)
            if self.executor.restarts != reported:
                reported = self.executor.restarts
                self.hub.count_restarts(reported)

    async def _forward(self, front: int, request: web.Request, body: bytes) -> web.Response:
        """Send a request to the front that has its session or result."""
        headers = {name: request.headers[name] for name in _KEPT_HEADERS if name in request.headers}
        headers[FORWARDED_HEADER] = self._scope_key.hex()
        try:
            async with self._client(front).post(
                f"http://localhost{request.path}", data=body, headers=headers
            ) as response:
                kept = {name: value for name, value in response.headers.items() if name == "Retry-After"}
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise FrontDied(f"the process that had the session or the program of this request died: {error}") from error
        return web.Response(body=answer, status=response.status, headers=kept, content_type=response.content_type)

    def _client(self, front: int) -> aiohttp.ClientSession:
        if front not in self._clients:
            assert self._socket_directory, "only one of several fronts forwards requests"
            connector = aiohttp.UnixConnector(str(socket_path(self._socket_directory, front)), limit=0)
            self._clients[front] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        return self._clients[front]


def find_toolchains(python: str) -> Toolchains:
    """Return the toolchain of each language, on a server with this Python interpreter for programs."""
    # Without isolation, compilers are not searched: on a Mac without them, that would open a dialog.
    return languages.find_all(_search_path(python), python, with_compilers=can_isolate())


def _search_path(python: str) -> str:
    return os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])


def socket_path(directory: Path, front: int) -> Path:
    """Return the path of a front's Unix socket, on which it receives requests of other fronts."""
    return directory / f"front-{front}.sock"


def raise_open_file_limit() -> None:
    """Raise the limit to the maximum: a connection uses one descriptor, a running program about nine.

    A process cannot pass descriptors while its user has more of them in flight than this limit. Programs of a server
    that runs as an unprivileged user have the same user and a lower limit, so that they cannot reach this one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if sys.platform == "linux" else max(soft, min(hard, MAX_OPEN_FILES_OF_MACOS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
