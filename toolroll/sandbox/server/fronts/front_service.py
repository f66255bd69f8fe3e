"""The event loop of a front's process: connections and messages from the hub."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from pydantic import BaseModel, ConfigDict, SecretStr

from toolroll.errors import ConfigError
from toolroll.sandbox.protocol import Language
from toolroll.sandbox.server.event_loop import new_event_loop
from toolroll.sandbox.server.execution.languages import MissingToolchain, Toolchain
from toolroll.sandbox.server.fronts.front import LISTEN_BACKLOG, Front, socket_path
from toolroll.sandbox.server.hub.messages import FrontMessage, LogMessage, NotStarted, decode, encode
from toolroll.sandbox.server.isolation import cgroup
from toolroll.sandbox.server.settings import ServerSettings

logger = logging.getLogger(__name__)

MAX_LOG_TEXT_CHARS = 10_000


class FrontConfig(BaseModel):
    """Configuration of a front's process. It contains secrets, and is passed over a pipe."""

    model_config = ConfigDict(extra="forbid")

    number: int
    settings: ServerSettings
    token: str | None
    """Token of the settings, which are serialized without it."""
    scope_key: str
    """Secret of the server in hexadecimal digits."""
    socket_directory: Path
    left_cgroup: Path | None
    """Cgroup that the hub has left, if it has. Those of the programs are created in it."""
    messages_fd: int
    """Socket for messages to and from the hub."""
    connections_fd: int
    """Socket over which the hub passes accepted connections."""
    log_level: int
    toolchains: Mapping[Language, Toolchain | MissingToolchain]
    """Toolchain of each language, so that all fronts have the same."""


class MessageProtocol(asyncio.Protocol):
    """Messages over a stream socket, one per line.

    Args:
        on_message: Called for each message.
        on_close: Called when the other side is gone.
    """

    def __init__(self, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._received = b""
        self._unsent: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle complete lines and keep the rest."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                self._on_message(decode(line))
            except Exception:  # a bug, which must not affect the requests of other messages
                logger.exception("A message between the hub and a front could not be handled.")

    def connection_lost(self, _: Exception | None) -> None:
        """Report that the other side is gone."""
        self._on_close()

    def send(self, message: Any) -> None:
        """Send a message, together with others of this iteration of the event loop, unless the connection is closed."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encode(message))

    def _flush(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()


class _HubLogHandler(logging.Handler):
    """Sends log records to the hub, whose process has the handlers of the user.

    Args:
        send: Function that sends a message to the hub, from any thread.
    """

    def __init__(self, send: Callable[[FrontMessage], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. Its text contains the arguments and the traceback."""
        try:
            text = self.format(record)[:MAX_LOG_TEXT_CHARS]
            unsent = {"args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            self._send(LogMessage({**record.__dict__, **unsent, "msg": text, "message": text}))
        except Exception:  # the code that logs must not fail
            self.handleError(record)


def run(config_line: bytes) -> None:
    """Run a front until the hub closes the connection."""
    config = FrontConfig.model_validate_json(config_line)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: FrontConfig) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    settings = config.settings.model_copy(update={"token": config.token and SecretStr(config.token)})
    messages = MessageProtocol(lambda message: front.hub.receive(message), stopped.set)
    front = Front(settings, messages.send, bytes.fromhex(config.scope_key), config.socket_directory)
    await loop.create_connection(lambda: messages, sock=socket.socket(fileno=config.messages_fd))
    log_handler = _HubLogHandler(lambda message: loop.call_soon_threadsafe(messages.send, message))
    logging.basicConfig(level=config.log_level, handlers=[log_handler])
    if config.left_cgroup:
        cgroup.enter_server_cgroup(config.left_cgroup)
    try:
        ready = await front.start(config.toolchains)
        path = socket_path(config.socket_directory, config.number)
        path.unlink(missing_ok=True)
        await web.UnixSite(front.runner, str(path), backlog=LISTEN_BACKLOG).start()
    except (ConfigError, OSError) as error:
        messages.send(NotStarted(str(error)))
        await stopped.wait()
        await front.close()
        return
    handler_factory = front.runner.server
    assert handler_factory
    connections = socket.socket(fileno=config.connections_fd)
    connections.setblocking(False)
    accepting = set[asyncio.Task[Any]]()

    def receive_connections() -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(connections, 1, 1)
            except BlockingIOError:
                return
            if not data:
                loop.remove_reader(connections)
                return
            for descriptor in descriptors:
                accepted = loop.connect_accepted_socket(handler_factory, socket.socket(fileno=descriptor))
                task = loop.create_task(accepted)
                accepting.add(task)
                task.add_done_callback(accepting.discard)

    loop.add_reader(connections, receive_connections)
    messages.send(ready)
    await stopped.wait()
    loop.remove_reader(connections)
    await front.close()
