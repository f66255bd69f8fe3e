"""Serve the viewer to a browser: an HTTP server on the loopback interface that starts one viewer per open page.

Other machines cannot reach the loopback interface. Other users of this machine can, and so can pages of other sites in
the user's browser. Every request must therefore carry the secret key that is part of the printed URL, and must come
from the viewer's own page.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from toolroll.errors import ConfigError, MissingExtra

try:
    from aiohttp import web
    from aiohttp.typedefs import Handler
    from textual_serve.server import Server
except ImportError as error:
    raise MissingExtra("textual-serve", "viewer") from error

WEB_HOST = "127.0.0.1"
KEY_COOKIE = "toolroll_view"
KEY_PARAMETER = "key"
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws:"
)
"""Forbids the page to load anything from other hosts."""
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#16181d"/>'
    '<path d="M3 5l3 3-3 3M8 12h5" fill="none" stroke="#e5a550" stroke-width="2"/></svg>'
)
"""Icon of the page: a prompt of a terminal."""


class WebViewer(Server):
    """HTTP server that runs a viewer command for each open page.

    Args:
        command: Command that runs the viewer.
        title: Title of the page.
        port: Port to listen on.
        on_ready: Called with the URL once the server accepts connections.
    """

    def __init__(self, command: Sequence[str], title: str, port: int, on_ready: Callable[[str], None]) -> None:
        # The template of the base class has no title, loads a font from another host and does not take the focus.
        templates = Path(__file__).parent / "templates"
        super().__init__(shlex.join(command), host=WEB_HOST, port=port, title=title, templates_path=templates)
        self.key = secrets.token_urlsafe(24)
        self._on_ready = on_ready

    @property
    def url(self) -> str:
        """URL to open in the browser, including the key."""
        return f"http://{WEB_HOST}:{self.port}/?{KEY_PARAMETER}={self.key}"

    def run(self) -> None:
        """Serve until interrupted.

        Raises:
            ConfigError: If the port cannot be used.
        """

        def ready(*_: object) -> None:  # aiohttp prints once it accepts connections
            self._on_ready(self.url)

        try:
            web.run_app(
                self._make_app(), host=WEB_HOST, port=self.port, shutdown_timeout=1, access_log=None, print=ready
            )
        except OSError as error:
            problem = f"Cannot listen on port {self.port}: {error.strerror}. Choose another port with --port."
            raise ConfigError(problem) from error

    async def on_startup(self, app: web.Application) -> None:
        """Replace the banner of the base class by nothing; `on_ready` reports the URL."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.router.add_get("/favicon.ico", self._send_icon)
        app.middlewares.append(self._authorize)
        return app

    async def _send_icon(self, request: web.Request) -> web.Response:
        return web.Response(text=ICON, content_type="image/svg+xml")

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = f"{WEB_HOST}:{self.port}"
        origin = f"http://{host}"
        if request.host == f"localhost:{self.port}" and request.method == "GET" and request.path == "/":
            raise web.HTTPFound(origin + request.path_qs)
        if request.host != host or request.headers.get("Origin", origin) != origin:
            raise web.HTTPForbidden(text="Forbidden: requests from other sites are not accepted.")
        given = request.query.get(KEY_PARAMETER, request.cookies.get(KEY_COOKIE, ""))
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            raise web.HTTPForbidden(text="Missing or wrong key. Open the full URL printed by `toolroll view --web`.")
        response = await handler(request)
        if not response.prepared:
            response.set_cookie(KEY_COOKIE, self.key, httponly=True, samesite="Strict")
            response.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
            response.headers["Referrer-Policy"] = "no-referrer"
        return response
