"""The sandbox server: set-up, listening, shutdown.

A server has one hub and one or more fronts. A single front runs in the process of the hub. Several fronts are separate
processes, which share one address: see `front_pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from aiohttp import web

from toolroll.errors import ConfigError
from toolroll.sandbox.protocol import max_wall_time
from toolroll.sandbox.server.fronts.front import LISTEN_BACKLOG, Front, find_toolchains
from toolroll.sandbox.server.hub.hub import Hub
from toolroll.sandbox.server.hub.messages import ServerDescription
from toolroll.sandbox.server.settings import ServerSettings, require_isolation

DRAIN_MARGIN_S = 60.0
"""Time for running programs to end on shutdown, in addition to the maximum timeout."""


class SandboxServer:
    """A sandbox server. Use it as an async context manager.

    Args:
        settings: Settings of the server.

    Example:
        ```python
        async with SandboxServer(ServerSettings(port=0)) as server:
            print(server.url, server.description.tier)
        ```
    """

    url: str
    """Address of the server, after it has started."""
    description: ServerDescription
    """Isolation and languages of the programs, after the server has started."""
    hub: Hub

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> SandboxServer:
        """Set up the server and start listening.

        Raises:
            ConfigError: If the server cannot be started. The message names the remedy.
        """
        require_isolation(unsafe=self.settings.unsafe)
        self.hub = Hub(self.settings)
        async with contextlib.AsyncExitStack() as closing:
            try:
                if self.settings.front_count == 1:
                    front = self._new_front()
                    closing.push_async_callback(front.close)
                    self.description = await front.start(await asyncio.to_thread(find_toolchains, self.settings.python))
                    await self._listen(front)
                else:
                    await self._start_processes(closing)
            except OSError as error:
                raise ConfigError(f"The server could not be started: {error}") from error
            self._closing = closing.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop listening and kill all programs."""
        await self._closing.aclose()

    async def drain(self) -> None:
        """Reject new requests and wait until all programs have ended."""
        await self.hub.drain(max_wall_time(self.settings.max_timeout) + DRAIN_MARGIN_S)

    def _new_front(self) -> Front:
        """Return a front in this process."""
        number = 0
        front = Front(self.settings, lambda message: self.hub.handle(number, message), os.urandom(16))
        self.hub.connect(number, front.hub.receive)
        return front

    async def _listen(self, front: Front) -> None:
        """Accept connections for a front in this process."""
        site = web.TCPSite(front.runner, self.settings.host, self.settings.port, backlog=LISTEN_BACKLOG)
        await site.start()
        self._set_url(*front.runner.addresses[0][:2])

    async def _start_processes(self, closing: contextlib.AsyncExitStack) -> None:
        from toolroll.sandbox.server.fronts.front_pool import FrontPool

        listeners = _listening_sockets(self.settings.host, self.settings.port)
        for listener in listeners:
            closing.enter_context(listener)
        pool = FrontPool(self.settings, self.hub)
        closing.push_async_callback(pool.close)
        self.description = await pool.start(listeners)
        self._set_url(*listeners[0].getsockname()[:2])

    def _set_url(self, host: str, port: int) -> None:
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host that this machine has, all with the same port.

    Raises:
        OSError: If the port is in use, or the machine has none of the addresses.
    """
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    # A hosts file may contain an address twice.
    for found in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)):
        family, address = found[0], found[4]
        try:
            listener = socket.create_server((address[0], port, *address[2:]), family=family, backlog=LISTEN_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # for example, ::1 on a machine without IPv6
                missing = error
                continue
            for listener in listeners:
                listener.close()
            raise
        listener.setblocking(False)
        listeners.append(listener)
        port = listener.getsockname()[1]
    if missing and not listeners:
        raise missing
    return listeners
