"""The viewer in a browser: a server on this machine's loopback, and a viewer of its own for each page that is open.

Nobody else gets in. Other machines can't reach the loopback; other users of this machine can, and so can pages of other
sites in the user's own browser, so a request must have the key that was told with the address, and must come from a
page of ours.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence

from toolroll.errors import ConfigError, MissingExtra

try:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware
    from textual_serve.server import Server
except ImportError as error:
    raise MissingExtra("textual-serve", "viewer") from error

HOST = "127.0.0.1"
COOKIE = "toolroll_view"
KEY = "key"
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws:"
)
"""What the page may load: nothing from elsewhere, so that nobody learns that it was opened."""


class WebViewer(Server):
    """Serves a command that runs the viewer.

    Args:
        command: What is run for each page.
        port: Where to listen, on the loopback.
        tell: Is told the address when it can be opened.
    """

    def __init__(self, command: Sequence[str], port: int, tell: Callable[[str], None]) -> None:
        super().__init__(shlex.join(command), host=HOST, port=port, title="toolroll view")
        self.key = secrets.token_urlsafe(24)
        self._tell = tell

    @property
    def address(self) -> str:
        """What to open in the browser."""
        return f"http://{HOST}:{self.port}/?{KEY}={self.key}"

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            web.run_app(
                self._make_app(),
                host=HOST,
                port=self.port,
                shutdown_timeout=1,
                access_log=None,
                print=lambda *_: self._tell(self.address),  # called when it listens
            )
        except OSError as error:
            raise ConfigError(
                f"Port {self.port} can't be used ({error.strerror}): name another with --port."
            ) from error

    async def on_startup(self, app: web.Application) -> None:
        """Say nothing yet."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard())
        return app

    def _guard(self) -> Middleware:
        ours = f"{HOST}:{self.port}"

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.host == f"localhost:{self.port}" and request.method == "GET" and request.path == "/":
                raise web.HTTPFound(f"http://{ours}{request.path_qs}")
            given = request.query.get(KEY, request.cookies.get(COOKIE, ""))
            if request.host != ours or request.headers.get("Origin", f"http://{ours}") != f"http://{ours}":
                raise web.HTTPForbidden(text="This page is not for you.")
            if not secrets.compare_digest(given.encode(), self.key.encode()):
                raise web.HTTPForbidden(text="Open the address that toolroll view --web printed, with its key.")
            response = await handler(request)
            if not response.prepared:
                response.set_cookie(COOKIE, self.key, httponly=True, samesite="Strict")
                response.headers["Content-Security-Policy"] = POLICY
                response.headers["Referrer-Policy"] = "no-referrer"
            return response

        return guard
