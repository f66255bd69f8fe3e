"""Protection of a server on the loopback interface from web pages in a browser on the same machine.

A page can send requests to any address. The browser adds `Origin` if the address is not the page's own. By DNS
rebinding, a page makes its own name resolve to 127.0.0.1; then `Host` has the name of the page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache

from aiohttp import web
from yarl import URL

from toolroll.sandbox.protocol import TOKEN_ENV_VAR
from toolroll.sandbox.server.settings import ServerSettings


def raise_if_from_web_page(headers: Mapping[str, str], settings: ServerSettings) -> None:
    """Reject requests that a web page may have sent.

    Args:
        headers: Headers of the request.
        settings: Settings of the server. A server with a token, or on another address, is reachable by any name.

    Raises:
        HTTPForbidden: If the request has an origin.
        HTTPMisdirectedRequest: If the server is on the loopback interface, has no token, and the request names another
            host.
    """
    if "Origin" in headers:
        raise web.HTTPForbidden(
            reason="Requests of web pages are rejected. Send the request without the header Origin."
        )
    host = headers.get("Host")
    if host is None or settings.token is not None or not _is_loopback(settings.host):
        return
    if not _is_loopback(_without_port(host)):
        reason = (
            f"Host {host[:100]!r} is not this server, which is only reachable as localhost. Use http://127.0.0.1, or "
            f"start the server with a token ({TOKEN_ENV_VAR})."
        )
        raise web.HTTPMisdirectedRequest(reason=reason)


@lru_cache(maxsize=256)
def _without_port(host: str) -> str:
    try:
        return URL(f"http://{host}").host or ""
    except ValueError:
        return ""


@lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
