"""Proxy for a real sandbox that counts the requests in flight and the connections of its clients.

    async with Proxy(sandbox_url) as proxy:
        ...  # use proxy.url
        assert proxy.max_in_flight <= 8

A request is in flight until the sandbox has responded, even if the client has disconnected. If the sandbox is down, the
proxy responds with 503, as a load balancer does. If the sandbox dies during a request, the proxy closes the client's
connection. A plain proxy supports only the fields and paths of SandboxFusion.
"""

import asyncio
import json
from typing import Any, Self

import aiohttp
from aiohttp import web

ASKED = ("code", "language", "compile_timeout", "run_timeout", "memory_limit_MB", "stdin", "files", "fetch_files")
ANSWERED = ("status", "message", "compile_result", "run_result", "executor_pod_name", "files")
RESULT = ("status", "execution_time", "return_code", "stdout", "stderr")


class Proxy:
    """Proxy at `url`."""

    def __init__(self, sandbox: str, *, plain: bool = False) -> None:
        self.sandbox = sandbox
        self.plain = plain
        self.in_flight = self.max_in_flight = self.requests = 0
        self.connections: set[Any] = set()
        self.max_connections = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        # A client that disconnects must not cancel the request at the sandbox.
        runner = self._runner = web.AppRunner(self._app(), handler_cancellation=False, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        self.connections = {one for one in self.connections if one is not None and not one.is_closing()}
        self.max_connections = max(self.max_connections, len(self.connections))
        if self.plain and request.path not in ("/run_code", "/run_jupyter"):
            return web.Response(status=404)
        body = await request.read()
        self.in_flight += 1
        self.requests += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            return await self._ask(request, body)
        except aiohttp.ClientConnectorError:
            return web.Response(status=503)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError):
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=502)
        finally:
            self.in_flight -= 1

    async def _ask(self, request: web.Request, body: bytes) -> web.Response:
        if self.plain:
            asked = json.loads(body)
            body = json.dumps({key: value for key, value in asked.items() if key in ASKED}).encode()
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            request.method, self.sandbox + request.path, data=body, headers=headers
        ) as got:
            answer = await got.read()
            if self.plain and got.status == 200:
                answer = json.dumps(_plain(json.loads(answer))).encode()
            kept = {key: value for key, value in got.headers.items() if key == "Retry-After"}
            return web.Response(status=got.status, body=answer, content_type="application/json", headers=kept)


def _plain(answer: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in answer.items() if key in ANSWERED}
    for name in ("compile_result", "run_result"):
        if kept.get(name):
            kept[name] = {key: value for key, value in kept[name].items() if key in RESULT}
    return kept
