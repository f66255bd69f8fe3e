"""Serve tools over streamable HTTP.

What a session is depends on the version of the protocol:

- Up to 2025-11-25 a client begins with `initialize`, and its session has an `Mcp-Session-Id`. It ends when the client
  deletes it, or `idle_timeout_s` after its last request.
- 2026-07-28 has no sessions over HTTP: each request is a session, so each call has new tool instances.

The server offers the versions with sessions to a client that asks for the supported versions (`server/discover`). A
client uses 2026-07-28 only if it does not ask.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from contextlib import nullcontext
from dataclasses import dataclass

import mcp_types as types
import uvicorn
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from toolroll.errors import ConfigError
from toolroll.integrations.mcp.protocol import Context, build_server, client_of
from toolroll.integrations.mcp.session import ToolSession
from toolroll.integrations.mcp.sessions import ToolSessions

PATH = "/mcp"
MCP_TOKEN_ENV_VAR = "TOOLROLL_MCP_TOKEN"  # noqa: S105
"""Environment variable with the token that clients must send."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SESSION_KEY = "toolroll"
"""Key of the session in the state of a connection."""
DRAIN_TIMEOUT_S = 1
"""Time for open requests to end when the server stops."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP server.

    Raises:
        ConfigError: If other machines could call the tools without a token.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """Port; 0 for a free one."""
    token: str | None = None
    """Token that requests must send as `Authorization: Bearer …`, or several separated by commas."""
    idle_timeout_s: float = 1800.0
    """Idle time after which a session ends."""

    def __post_init__(self) -> None:
        if self.token is None and self.host not in LOOPBACK:
            raise ConfigError(
                f"Cannot listen on {self.host} without a token: anyone who can reach this port could call the tools. "
                f"Set {MCP_TOKEN_ENV_VAR}, or listen on 127.0.0.1."
            )

    @property
    def security(self) -> TransportSecuritySettings:
        """Checks that keep web pages from calling the tools. With a token they cannot, whatever their origin."""
        allowed = [f"{host}:*" for host in ("127.0.0.1", "localhost", "[::1]")]
        return TransportSecuritySettings(
            enable_dns_rebinding_protection=self.token is None,
            allowed_hosts=allowed,
            allowed_origins=[f"http://{host}" for host in allowed],
        )


class HttpServer:
    """Serves tools over streamable HTTP.

    Args:
        sessions: Sessions of the clients. The caller closes them.
        settings: Settings.

    Raises:
        ConfigError: If the server cannot listen on the address.
    """

    def __init__(self, sessions: ToolSessions, settings: HttpSettings) -> None:
        self._sessions = sessions
        server = build_server(sessions, self._session_of)
        _offer_versions_with_sessions(server)
        self._manager = StreamableHTTPSessionManager(
            server, security_settings=settings.security, session_idle_timeout=settings.idle_timeout_s
        )
        app: ASGIApp = Starlette(routes=[Route(PATH, endpoint=StreamableHTTPASGIApp(self._manager))])
        if settings.token is not None:
            app = TokenCheck(app, settings.token)
        self._socket = _listen(settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}{PATH}"
        """URL of the server."""
        self._server = UvicornServer(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=DRAIN_TIMEOUT_S
            )
        )

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Called once."""
        stopping = asyncio.create_task(stop.wait())
        with self._socket:
            async with self._manager.run():
                serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                self._server.should_exit = True
            # Leaving the manager has closed the streams for notifications, which clients keep open.
            await self._sessions.close()  # answers the requests of running calls
            await serving
        stopping.cancel()

    def _session_of(self, context: Context) -> ToolSession:
        # The SDK ends a connection with its exit stack, but gives handlers no public reference to the connection.
        connection = context.session._connection
        if SESSION_KEY not in connection.state:
            session = connection.state[SESSION_KEY] = self._sessions.open(client_of(context))
            connection.exit_stack.callback(self._sessions.end, session)
        opened: ToolSession = connection.state[SESSION_KEY]
        return opened


class UvicornServer(uvicorn.Server):
    """Leaves the signals to the command."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Install no signal handlers."""
        return nullcontext()


class TokenCheck:
    """Rejects HTTP requests without a valid token.

    Args:
        app: Application that handles the other requests.
        tokens: Token, or several separated by commas.
    """

    def __init__(self, app: ASGIApp, tokens: str) -> None:
        self._app = app
        self._expected = [f"Bearer {token.strip()}".encode() for token in tokens.split(",") if token.strip()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as an ASGI application."""
        if scope["type"] == "http":
            received = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(received, expected) for expected in self._expected):
                text = "Missing or wrong token. Send the header 'Authorization: Bearer TOKEN'.\n"
                await PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _offer_versions_with_sessions(server: Server[object]) -> None:
    async def discover(context: Context, _: types.RequestParams) -> types.DiscoverResult:
        return types.DiscoverResult(
            supported_versions=list(HANDSHAKE_PROTOCOL_VERSIONS),
            capabilities=server.get_capabilities(protocol_version=context.protocol_version),
        )

    server.add_request_handler("server/discover", types.RequestParams, discover)


def _listen(settings: HttpSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        address = f"{settings.host}:{settings.port}"
        raise ConfigError(f"Cannot listen on {address}: {error.strerror or error}. Pass another address.") from error
