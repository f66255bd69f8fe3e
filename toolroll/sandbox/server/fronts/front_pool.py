"""The processes of a server's fronts, as the hub sees them.

Invariants:

- A connection is accepted by the hub and passed to one front. While no front takes one, connections wait in the kernel.
- All fronts isolate programs in the same way, and have the same languages.
- A front that dies is replaced. Its requests count as running until all its programs have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError
from toolroll.sandbox.server.execution.languages import Toolchains
from toolroll.sandbox.server.fronts.front import find_toolchains, raise_open_file_limit
from toolroll.sandbox.server.fronts.front_service import FrontConfig, MessageProtocol
from toolroll.sandbox.server.hub.hub import Hub
from toolroll.sandbox.server.hub.messages import NotStarted, ServerDescription
from toolroll.sandbox.server.isolation import cgroup
from toolroll.sandbox.server.isolation.owned_directory import OwnedDirectory
from toolroll.sandbox.server.settings import ServerSettings

logger = logging.getLogger(__name__)

FRONT_START_TIMEOUT_S = 120.0
FRONT_STOP_TIMEOUT_S = 10.0
"""Time for a front to close its connections and to kill its programs. Then its guard does that."""
FRONT_BACKOFF_S = (0.0, 0.1, 1.0, 5.0)
"""Delays before a front is replaced, by the number of its failures in a row; the last one repeats."""
MIN_LIFETIME_S = 10.0
"""Time after which the death of a front does not count as a failed start."""
ACCEPT_RETRY_S = 0.1
PASS_RETRY_S = 0.005
_IMPORT_ROOT = str(Path(__file__).parents[4])
"""Directory that contains the package `toolroll`."""
_BOOT_FRONT = (
    "import sys; sys.path.append(sys.argv[1]); from toolroll.sandbox.server.fronts.front_guard import main; main()"
)


class FrontPool:
    """Starts the fronts of a server, passes connections to them, and replaces those that die.

    Args:
        settings: Settings of the server.
        hub: The hub.
    """

    def __init__(self, settings: ServerSettings, hub: Hub) -> None:
        self.settings = settings
        self.hub = hub
        self._scope_key = secrets.token_hex(16)
        self._directory = OwnedDirectory("sockets")
        self._left_cgroup: Path | None = None
        """Cgroup that this process has left, for those of the programs."""
        self._toolchains: Toolchains = {}
        """Toolchains of all fronts. A busy machine can hide a language from one search and not from the next one."""
        self._connections: dict[int, socket.socket] = {}
        """Socket to each front that is ready."""
        self._processes: dict[int, FrontProcess] = {}
        self._description: ServerDescription | None = None
        """Description of the front that was ready first."""
        self._any_ready = asyncio.Event()
        self._next = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, listeners: Sequence[socket.socket]) -> ServerDescription:
        """Start all fronts and accept connections.

        Args:
            listeners: Listening sockets.

        Returns:
            The description of a front; all have the same.

        Raises:
            ConfigError: If a front cannot be started, or fronts isolate programs differently.
        """
        raise_open_file_limit()
        with contextlib.suppress(OSError):  # without cgroups, the fronts find another isolation
            self._left_cgroup = cgroup.enter_server_cgroup()
        self._toolchains = await asyncio.to_thread(find_toolchains, self.settings.python)
        loop = asyncio.get_running_loop()
        first_starts: list[asyncio.Future[ServerDescription]] = [
            loop.create_future() for _ in range(self.settings.front_count)
        ]
        self._tasks = [asyncio.create_task(self._keep_alive(number, each)) for number, each in enumerate(first_starts)]
        ready = await asyncio.gather(*first_starts)
        self._tasks += [asyncio.create_task(self._accept(listener)) for listener in listeners]
        return ready[0]

    async def close(self) -> None:
        """End all fronts and their programs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that was cancelled while it stopped its front has not waited for it.
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        await asyncio.to_thread(self._directory.remove)

    async def _keep_alive(self, number: int, first_start: asyncio.Future[ServerDescription]) -> None:
        """Run a front again and again."""
        failures = 0
        while True:
            await asyncio.sleep(FRONT_BACKOFF_S[min(failures, len(FRONT_BACKOFF_S) - 1)])
            process = FrontProcess(
                number,
                self.settings,
                self._scope_key,
                self._directory.path,
                self._left_cgroup,
                self._toolchains,
                self.hub,
            )
            self._processes[number] = process
            try:
                ready = await process.start()
                self._check_isolation(number, ready)
                ready_at = time.monotonic()
                if not first_start.done():
                    first_start.set_result(ready)
                self._connections[number] = process.connections
                self._any_ready.set()
                await process.gone.wait()
                failures = 0 if time.monotonic() - ready_at > MIN_LIFETIME_S else failures + 1
                logger.error("Front %d died, and its requests are lost. Starting another one.", number)
                self.hub.front_restarts += 1
            except Exception as error:  # the first start must be answered, and a front must be replaced in any case
                failures += 1
                if not first_start.done():
                    first_start.set_exception(error)
                    return
                logger.error("Front %d cannot be started (attempt %d): %s", number, failures, error)
            finally:
                self._connections.pop(number, None)
                if not self._connections:
                    self._any_ready.clear()
                await process.stop()
                self.hub.disconnect(number)

    def _check_isolation(self, number: int, ready: ServerDescription) -> None:
        """Raise ConfigError if a front isolates programs in another way than the first one."""
        first = self._description = self._description or ready
        if ready.tier != first.tier:
            notes = "; ".join(ready.notes) or "none"
            raise ConfigError(
                f"Front {number} found isolation tier {ready.tier} instead of {first.tier}. "
                f"Reasons why stronger tiers do not work: {notes}."
            )

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._any_ready.wait()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, usually
                logger.error("A connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            with connection:
                while not self._pass_on(connection):  # noqa: ASYNC110 (the sockets of all fronts are full)
                    await asyncio.sleep(PASS_RETRY_S)

    def _pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection to the next front that takes it. Return False if none does now."""
        fronts = sorted(self._connections)
        self._next += 1
        for offset in range(len(fronts)):
            front = fronts[(self._next + offset) % len(fronts)]
            try:
                socket.send_fds(self._connections[front], [b"c"], [connection.fileno()])
                return True
            except BlockingIOError:  # it has not yet received those that were passed to it before
                pass
            except OSError as error:  # it has died, usually
                logger.error("A connection could not be passed to front %d: %s", front, error)
        return False


class FrontProcess:
    """One front in another process.

    Args:
        number: Number of the front.
        settings: Settings of the server.
        scope_key: Secret of the server in hexadecimal digits.
        directory: Directory for the Unix sockets of the fronts.
        left_cgroup: Cgroup that this process has left, if it has. Those of the programs are created in it.
        toolchains: Toolchain of each language.
        hub: The hub.
    """

    connections: socket.socket
    """Socket over which connections are passed."""

    def __init__(
        self,
        number: int,
        settings: ServerSettings,
        scope_key: str,
        directory: Path,
        left_cgroup: Path | None,
        toolchains: Toolchains,
        hub: Hub,
    ) -> None:
        self.number = number
        self.settings = settings
        self.gone = asyncio.Event()
        """Set when the front has closed its connection to the hub."""
        self._scope_key = scope_key
        self._directory = directory
        self._left_cgroup = left_cgroup
        self._toolchains = toolchains
        self._hub = hub
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._started: asyncio.Future[ServerDescription] = asyncio.get_running_loop().create_future()

    async def start(self) -> ServerDescription:
        """Start the process and wait until it is ready.

        Raises:
            ConfigError: If it cannot be started.
        """
        messages, front_messages = socket.socketpair()
        self.connections, front_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.setblocking(False)
        token = self.settings.token
        config = FrontConfig(
            number=self.number,
            settings=self.settings.model_copy(update={"token": None}),
            token=token.get_secret_value() if token else None,
            scope_key=self._scope_key,
            socket_directory=self._directory,
            left_cgroup=self._left_cgroup,
            messages_fd=front_messages.fileno(),
            connections_fd=front_connections.fileno(),
            log_level=logging.getLogger().getEffectiveLevel(),
            toolchains=self._toolchains,
        )
        with front_messages, front_connections:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                [sys.executable, "-P", "-c", _BOOT_FRONT, _IMPORT_ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[front_messages.fileno(), front_connections.fileno()],
                start_new_session=True,  # so that Ctrl+C reaches only the hub, which waits for running programs
            )
        assert self._process.stdin
        with self._process.stdin as stdin:
            stdin.write(config.model_dump_json().encode() + b"\n")
        loop = asyncio.get_running_loop()
        self._transport, protocol = await loop.create_connection(
            lambda: MessageProtocol(self._on_message, self._on_close), sock=messages
        )
        self._hub.connect(self.number, protocol.send)
        try:
            async with asyncio.timeout(FRONT_START_TIMEOUT_S):
                return await self._started
        except TimeoutError:
            raise ConfigError(f"A front of the server was not ready within {FRONT_START_TIMEOUT_S:g} s.") from None

    async def stop(self) -> None:
        """End the process, and wait until none of its programs is left."""
        if self._transport:
            self._transport.close()
        if self._process is None:
            return
        waiting = asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        done, _ = await asyncio.wait([waiting], timeout=FRONT_STOP_TIMEOUT_S)
        if not done:
            self._process.terminate()
            await waiting
        self.connections.close()

    def _on_message(self, message: Any) -> None:
        match message:
            case ServerDescription():
                self._set_started(lambda: self._started.set_result(message))
            case NotStarted(reason):
                self._set_started(lambda: self._started.set_exception(ConfigError(reason)))
            case _:
                self._hub.handle(self.number, message)

    def _on_close(self) -> None:
        self.gone.set()
        self._set_started(lambda: self._started.set_exception(ConfigError("A front of the server died as it started.")))

    def _set_started(self, set_result: Callable[[], None]) -> None:
        if not self._started.done():
            set_result()
