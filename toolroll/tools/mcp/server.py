"""An MCP server as the tools of this process use it: its list of tools, and the connections of the trajectories.

Connections belong to the event loop that uses them. They are closed when they are released, and when the loop ends,
because `asyncio.run` cancels the tasks that own them.

Invariants:

- At most `MAX_CONCURRENT_STARTS` programs of servers are starting on an event loop at any time.
- With the scope `trajectory`, all tools of a trajectory share one connection. It is established when the first of them
  is created, and closed when the last one is released.
- A connection whose server describes its tools differently than at the start is never used.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from toolroll._internal.event_loop_thread import shared_event_loop_thread
from toolroll.errors import CallTimeout, InfraFault, MissingExtra, ToolContractError
from toolroll.tools.mcp.connection import ListedTool, McpConnection
from toolroll.tools.mcp.settings import McpServerSettings

if TYPE_CHECKING:
    from mcp_types import CallToolResult

MAX_CONCURRENT_STARTS = max(4, os.cpu_count() or 1)
UNRESPONSIVE_AFTER_S = 5.0
"""Time in which a shared server must list its tools after a call has timed out. Otherwise it is replaced."""
MAX_WAIT_SHARE = 0.1
"""Share of the time until its deadline that a call may have waited for a slot and for its server. If it waited longer
and then timed out, it is an infra fault."""
LISTING_LIFETIME_S = 60.0
"""Time for which the list of a server's tools is used for further entries and runs."""

_servers: dict[str, McpServer] = {}
_start_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def shared_server(settings: McpServerSettings) -> McpServer:
    """Return this process's server with these settings.

    Raises:
        MissingExtra: If the MCP SDK is not installed.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise MissingExtra("mcp", "mcp") from error
    return _servers.setdefault(settings.connection_key, McpServer(settings))


def listed_server(settings: McpServerSettings) -> McpServer:
    """Return this process's server with these settings, whose `listing` is recent. May connect to it, and block.

    If tools that are used have changed, it is another server. Existing tools keep the former one.

    Raises:
        InfraFault: If the server cannot be started or reached.
        MissingExtra: If the MCP SDK is not installed.
    """
    server = shared_server(settings)
    if time.monotonic() >= server.listed_at + LISTING_LIFETIME_S:
        listing = McpServer(settings).list_tools()
        if server.change_in(listing) is not None:
            server = _servers[settings.connection_key] = McpServer(settings)
        server.listing, server.listed_at = listing, time.monotonic()
    return server


def _restore_server(settings: McpServerSettings, exposed: Mapping[str, str]) -> McpServer:
    """Return this process's server for a pickled one, which rejects the same changes of its tools."""
    server = shared_server(settings)
    server._exposed.update(exposed)
    return server


@dataclass(frozen=True)
class ServerCall:
    """A call of a tool."""

    tool: str
    """Name of the tool on the server."""
    arguments: dict[str, Any]
    timeout_s: float
    """Timeout for the answer, in seconds. It starts when the connection is established."""
    deadline: float | None = None
    """Time by which the call must end, on the clock of `time.monotonic()`."""
    waited_s: float = 0.0
    """Time that the call has waited for a slot of its limits, in seconds."""

    def remaining_s(self) -> float | None:
        """Return the time until the deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


class ConnectionSlot:
    """A place for one connection, which is established when it is needed and replaced when it is lost.

    Args:
        connect: Establishes a connection.
        reports_loss: Whether to raise the loss of a connection once before it is replaced, because its state is lost.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, McpConnection]], *, reports_loss: bool) -> None:
        self._connect = connect
        self._reports_loss = reports_loss
        self._connecting: asyncio.Task[McpConnection] | None = None

    @property
    def current(self) -> McpConnection | None:
        """The connection, or None if `get` has to establish one."""
        if self._connecting is None or not self._connecting.done():
            return None
        connection = self._established()
        return connection if connection is not None and connection.is_usable else None

    async def get(self) -> McpConnection:
        """Return a connection, waiting until it is established.

        Raises:
            InfraFault: If it cannot be established, or was lost and this is to be reported.
        """
        if (connection := self.current) is not None:
            return connection
        if self._connecting is not None and self._connecting.done():
            lost, self._connecting = self._established(), None
            if lost is not None and not lost.is_retired:
                try:
                    fault = None if lost.loss_reported or not self._reports_loss else await lost.lost()
                finally:
                    lost.disconnect()  # also if this call is cancelled
                await lost.close()
                if fault is not None:
                    raise fault
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        try:
            return await asyncio.shield(self._connecting)
        except InfraFault as error:  # each waiting call needs its own exception, which gets its metrics
            raise InfraFault(str(error)) from error

    async def close(self) -> None:
        """Close the connection, or stop establishing it."""
        if self._connecting is None:
            return
        self._connecting.cancel()
        await asyncio.wait([self._connecting])
        connection, self._connecting = self._established(), None
        if connection is not None:
            await connection.close()

    def _established(self) -> McpConnection | None:
        connecting = self._connecting
        assert connecting is not None
        failed = connecting.cancelled() or connecting.exception() is not None
        return None if failed else connecting.result()


@dataclass
class TrajectoryLease:
    """The connection of a trajectory and the tools that use it."""

    slot: ConnectionSlot
    users: set[str] = field(default_factory=set)


@dataclass
class LoopConnections:
    """The connections to a server on one event loop."""

    shared: ConnectionSlot
    leases: dict[str, TrajectoryLease] = field(default_factory=dict)
    probe: asyncio.Task[None] | None = None


class McpServer:
    """A server. Created by `shared_server`.

    Args:
        settings: The server.
    """

    def __init__(self, settings: McpServerSettings) -> None:
        self.settings = settings
        self.listing: Mapping[str, ListedTool] = {}
        """The tools of the server by name."""
        self.listed_at = -math.inf
        """Time at which the tools were listed, on the clock of `time.monotonic()`."""
        self._exposed: dict[str, str] = {}
        """Hashes of the tools that are used, by name."""
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_server, (self.settings, self._exposed)

    def list_tools(self) -> Mapping[str, ListedTool]:
        """Connect to the server and return its tools by name. Blocks.

        Raises:
            InfraFault: If the server cannot be started or reached.
        """
        return shared_event_loop_thread("toolroll-mcp", close_at_exit=True).run(self._fetch_listing())

    def expose(self, tools: Iterable[ListedTool]) -> None:
        """Declare tools as used. Connections on which they differ are rejected."""
        self._exposed.update({tool.name: tool.schema_hash for tool in tools})

    def change_in(self, tools: Mapping[str, ListedTool]) -> str | None:
        """Return how tools differ from those that are used, as the end of a sentence about the server."""
        for name, expected in self._exposed.items():
            found = tools.get(name)
            if found is None or found.schema_hash != expected:
                change = "no longer has the tool" if found is None else "has changed the schema of the tool"
                return f"{change} {name!r}, which the prompt shows. Pin the version of the server"
        return None

    async def acquire(self, instance_id: str, tool: str) -> None:
        """Prepare the connection of a tool's instance.

        Raises:
            InfraFault: If the server of a trajectory cannot be started or reached.
        """
        if self.settings.scope == "trajectory":
            leases = self._connections().leases
            if instance_id not in leases:
                leases[instance_id] = TrajectoryLease(ConnectionSlot(self._open, reports_loss=True))
            leases[instance_id].users.add(tool)
            await leases[instance_id].slot.get()

    async def release(self, instance_id: str, tool: str) -> None:
        """Release the connection of a tool's instance. Does nothing if it was not acquired."""
        leases = self._connections().leases
        if (lease := leases.get(instance_id)) is not None:
            lease.users.discard(tool)
            if not lease.users:
                del leases[instance_id]
                await lease.slot.close()

    async def call(self, instance_id: str, call: ServerCall) -> CallToolResult:
        """Call a tool.

        Args:
            instance_id: Id of the instance.
            call: The call.

        Raises:
            PolicyFault: If the server rejects the call, or does not answer in time.
            InfraFault: If the server cannot be reached, has ended or violates the protocol.
        """
        began = time.monotonic()
        slot = self._slot(instance_id)
        connection = slot.current
        if connection is None or connection.list_changed:
            connection = await self._prepare(slot, call)
        waited_s, remaining_s = call.waited_s + time.monotonic() - began, call.remaining_s()
        timeout_s = call.timeout_s if remaining_s is None else min(call.timeout_s, remaining_s)
        answer = asyncio.create_task(connection.call(call.tool, call.arguments, timeout_s))
        try:
            # A cancelled call may wait until the server reads the cancellation, so it is not awaited.
            done, _ = await asyncio.wait([answer], timeout=timeout_s)
        finally:
            answer.cancel()
        if done:
            return answer.result()
        self._probe(connection)
        if timeout_s < call.timeout_s and waited_s >= MAX_WAIT_SHARE * (waited_s + timeout_s):
            waits = f"it had {timeout_s:.2f} s left after waiting for {waited_s:.2f} s"
            raise connection.fault(f"the call started too late: {waits}")
        # The cause is a rejection for a limit that adapts.
        raise CallTimeout(f"The tool call timed out after {timeout_s:.3g} s.") from TimeoutError()

    async def _prepare(self, slot: ConnectionSlot, call: ServerCall) -> McpConnection:
        """Return a connection whose list of tools is known."""
        connection = None
        try:
            async with asyncio.timeout(call.remaining_s()):
                connection = await slot.get()
                if connection.list_changed:
                    await connection.list_again()
                    self._check_tools(connection)
                return connection
        except TimeoutError:
            if connection is not None:
                self._probe(connection)
            missing = "start" if connection is None else "list its tools"
            message = f"MCP server {self.settings.label}: did not {missing} before the call's deadline."
            raise InfraFault(message) from None

    async def _fetch_listing(self) -> dict[str, ListedTool]:
        connection = await self._open()
        await connection.close()
        return connection.tools

    async def _open(self) -> McpConnection:
        loop = asyncio.get_running_loop()
        if loop not in _start_slots:
            _forget_closed_loops(_start_slots)
            _start_slots[loop] = asyncio.Semaphore(MAX_CONCURRENT_STARTS)
        slots = _start_slots[loop]
        async with slots if self.settings.command else nullcontext():
            connection = McpConnection(self.settings)
            try:
                await connection.start()
                self._check_tools(connection)
            except BaseException:
                await connection.close()
                raise
            return connection

    def _check_tools(self, connection: McpConnection) -> None:
        """Raise InfraFault if the server describes a tool that is used differently than at the start."""
        if (reason := self.change_in(connection.tools)) is not None:
            connection.disconnect(reason)
            connection.loss_reported = True
            raise connection.fault(reason)

    def _connections(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            _forget_closed_loops(self._by_loop)
            self._by_loop[loop] = LoopConnections(ConnectionSlot(self._open, reports_loss=False))
        return self._by_loop[loop]

    def _slot(self, instance_id: str) -> ConnectionSlot:
        connections = self._connections()
        if self.settings.scope == "process":
            return connections.shared
        if instance_id not in connections.leases:
            raise ToolContractError(f"MCP server {self.settings.label} has no instance {instance_id!r}. Create it.")
        return connections.leases[instance_id].slot

    def _probe(self, connection: McpConnection) -> None:
        """Disconnect a shared server that does not respond at all, so that it is replaced."""
        connections = self._connections()
        if self.settings.scope == "process" and (connections.probe is None or connections.probe.done()):
            connections.probe = asyncio.create_task(_disconnect_unresponsive(connection))


def _forget_closed_loops(by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any]) -> None:
    """Remove the entries of closed event loops. Their values refer to the loops, so these would never be freed."""
    for reference in by_loop.keyrefs():
        if (loop := reference()) is not None and loop.is_closed():
            by_loop.pop(loop, None)


async def _disconnect_unresponsive(connection: McpConnection) -> None:
    if not await connection.responds(UNRESPONSIVE_AFTER_S):
        connection.disconnect("does not respond")
