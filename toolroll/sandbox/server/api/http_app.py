"""HTTP application of the sandbox server.

Every request gets a response: the result of the program, or the reason why it was not run.

| status | meaning |
|---|---|
| 200 | the program ran, or `SandboxError`: the server failed (SandboxFusion's convention) |
| 400, 422 | the request is invalid |
| 401 | the token is missing or wrong |
| 403, 421 | the request comes from a web page |
| 410 | the session was deleted |
| 412 | the limiter's lease of the request has ended; the client must acquire another slot |
| 413 | the request is too large |
| 429 | the queue is full, all sessions are in use, or too many requests wait for one; `Retry-After` is in seconds |
| 503 | the server is shutting down |
| 504 | the deadline of the request has passed |

If the client disconnects, its program is killed. A request of a session is completed instead, because the session keeps
its side effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import SandboxResponse
from toolroll.sandbox.server.api import request_origin
from toolroll.sandbox.server.api.idempotency import IdempotencyCache
from toolroll.sandbox.server.api.request_body import BodyReceiver
from toolroll.sandbox.server.execution.job import InvalidProgram, JobFailed
from toolroll.sandbox.server.execution.languages import MissingToolchain, Toolchain
from toolroll.sandbox.server.hub.fencing import LeaseToken
from toolroll.sandbox.server.hub.hub_client import AtOtherFront, HubClient
from toolroll.sandbox.server.hub.messages import Ticket
from toolroll.sandbox.server.hub.rejections import LeaseLost, QueueFull, Rejected
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings

if TYPE_CHECKING:
    from toolroll.sandbox.server.execution.executor import Executor
    from toolroll.sandbox.server.execution.plain_executor import PlainExecutor

logger = logging.getLogger(__name__)

_VERSION = version("toolroll")
MAX_REPORTED_ERRORS = 20
"""Maximum number of validation errors in one response."""
_PUBLIC_PATHS = ("/v1/ping",)
"""Paths without authentication, for load balancers. They reveal nothing about programs."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FORWARDED_HEADER = "X-Toolroll-Forwarded"
"""Header of a request that another front has forwarded. Its value is a secret of the server."""
FORWARD_TIMEOUT_S = 30.0
FORWARD_RETRY_INTERVAL_S = 0.1
Forward = Callable[[int, web.Request, bytes], Awaitable[web.Response]]
"""Sends a request, with its body, to another front. Raises FrontDied if there is no response."""
RequestT = TypeVar("RequestT", protocol.RunCodeRequest, protocol.RunJupyterRequest)


class FrontDied(Exception):
    """Raised when the front to which a request was forwarded has died."""


class HttpApp:
    """Request handlers of one front.

    Args:
        settings: Settings of the server.
        executor: Executor that runs the programs.
        hub: The hub, which decides which requests may run.
        scope_key: Secret of the server, by which the names of sessions are made unique to a token.
        forward: Function that sends a request to another front and returns its response.
    """

    def __init__(
        self,
        settings: ServerSettings,
        executor: Executor | PlainExecutor,
        hub: HubClient,
        scope_key: bytes,
        forward: Forward,
    ) -> None:
        self.settings = settings
        self.executor = executor
        self.hub = hub
        self.idempotency_cache = IdempotencyCache()
        self._scope_key = scope_key
        self._forwarded = scope_key.hex()
        self._forward = forward
        self._bodies = BodyReceiver(settings.request_mb * MEGABYTE, settings.front_count)
        self._pod_name = os.environ.get("MY_POD_NAME")

    def build(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._handle_errors])
        app.router.add_post("/run_code", self._run_code)
        app.router.add_post("/run_jupyter", self._run_jupyter)
        app.router.add_delete("/v1/sessions/{session_id}", self._end_session)
        app.router.add_post("/v1/holders/{holder}/fence", self._fence_holder)
        app.router.add_get("/v1/ping", self._ping)
        app.router.add_get("/v1/languages", self._languages)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, call the handler and convert exceptions to responses."""
        try:
            request_origin.raise_if_from_web_page(request.headers, self.settings)
            if request.path not in _PUBLIC_PATHS:
                self._check_token(request)
            return await handler(request)
        except Rejected as error:
            return self._reject(error.status, error.label, str(error), error.retry_after)
        except InvalidProgram as error:
            return self._reject(422, "bad", str(error))
        except ValidationError as error:
            return self._reject(422, "bad", _validation_details(error))
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self.settings.request_mb} MB"
            return self._reject(413, "large", f"The request is larger than {limit} (server option --request-mb).")
        except web.HTTPException as error:
            return self._reject(error.status, "http", error.reason)
        except JobFailed as error:
            return self._sandbox_error(str(error))
        except Exception as error:  # a bug in the server, which a retry may not hit
            logger.exception("Unexpected error while handling %s %s", request.method, request.path)
            return self._sandbox_error(f"{type(error).__name__}: {error}")

    def _check_token(self, request: web.Request) -> None:
        if self.settings.token is None:
            return
        received = request.headers.get("Authorization", "").encode(errors="replace")
        tokens = [token.strip() for token in self.settings.token.get_secret_value().split(",")]
        if not any(hmac.compare_digest(received, f"Bearer {token}".encode()) for token in tokens if token):
            raise web.HTTPUnauthorized(reason="Missing or wrong token. Send the header 'Authorization: Bearer TOKEN'.")

    def _scoped(self, request: web.Request, name: str) -> str:
        """Return a name that only clients with the same token can use, as the server may not require one."""
        if (credentials := request.headers.get("Authorization")) is None:
            return name
        encoded = credentials.encode(errors="replace")
        return f"{name}@{hashlib.blake2b(encoded, key=self._scope_key, digest_size=8).hexdigest()}"

    def _reject(self, status: int, label: str, detail: Any, retry_after: int = 1) -> web.Response:
        self.hub.count_refused(label)
        headers = {"Retry-After": str(retry_after)} if status == 429 else {}
        return web.json_response({"detail": detail}, status=status, headers=headers)

    def _sandbox_error(self, message: str) -> web.Response:
        """Return the response for a failure of the server. It is never cached, so that a retry can succeed."""
        logger.warning("A program could not be run: %s", message)
        self.hub.count_failed()
        status = protocol.RunStatus.SANDBOX_ERROR
        response = protocol.RunCodeResponse(status=status, message=message, executor_pod_name=self._pod_name)
        return _json_response(response.model_dump_json().encode())

    async def _run_code(self, request: web.Request) -> web.Response:
        async with self._receive(request) as body:
            code = protocol.read(protocol.RunCodeRequest, body)
            self._check_timeouts(code.compile_timeout, code.run_timeout)
            if code.session_id is not None:
                self.executor.check_session_request(code)  # before admission, which may end another session
                code.session_id = self._scoped(request, code.session_id)
            key = self._response_key(request, code.idempotency_key, body)
            keys = tuple(filter(None, [key, self._program_key(code)]))
            ticket = self._ticket(request, code.deadline)._replace(session=code.session_id, keys=keys)

            async def respond() -> bytes:
                execution = partial(self._execute, code, self.executor.run_code, code.language, ticket)
                if code.session_id is None:
                    return await execution()
                with self.hub.in_flight():  # also if the client disconnects
                    # Locked before admission: requests that wait for one session must not occupy slots of others.
                    lock = await self.executor.sessions.acquire(code.session_id, ticket.deadline)
                    try:
                        return await execution()
                    finally:
                        lock.release()

            return await self._respond_once(request, body, key, respond, finish=code.session_id is not None)

    async def _run_jupyter(self, request: web.Request) -> web.Response:
        async with self._receive(request) as body:
            notebook = protocol.read(protocol.RunJupyterRequest, body)
            self._check_timeouts(notebook.cell_timeout, notebook.total_timeout)
            key = self._response_key(request, notebook.idempotency_key, body)
            ticket = self._ticket(request, notebook.deadline)._replace(keys=tuple(filter(None, [key])))
            respond = partial(self._execute, notebook, self.executor.run_jupyter, "jupyter", ticket)
            return await self._respond_once(request, body, key, respond, finish=False)

    @contextlib.asynccontextmanager
    async def _receive(self, request: web.Request) -> AsyncIterator[bytes]:
        """Receive the body of a request. It takes part in admission only when the body is complete."""
        self._raise_if_draining(request)
        condition = self.hub.condition
        if condition.is_full:  # before the body is read
            text = f"The queue of the sandbox is full. Retry after {condition.retry_after} s."
            raise QueueFull(text, condition.retry_after)
        async with self._bodies.receive(request) as body:
            self._raise_if_draining(request)  # the server may have been stopped in the meantime
            with self.hub.in_flight():
                yield body

    def _raise_if_draining(self, request: web.Request) -> None:
        if self.hub.condition.is_draining and not self._is_forwarded(request):
            raise web.HTTPServiceUnavailable(reason="The server is shutting down.")

    def _check_timeouts(self, *timeouts_s: float) -> None:
        if max(timeouts_s) > self.settings.max_timeout:
            maximum = f"{self.settings.max_timeout:g} s (server option --max-timeout)"
            raise InvalidProgram(f"The timeout of {max(timeouts_s):g} s exceeds the maximum of {maximum}.")

    def _ticket(self, request: web.Request, deadline: float | None) -> Ticket:
        """Return the conditions under which the program of a request may start.

        Args:
            request: The request.
            deadline: Deadline in its body. The earlier one of this and the header applies.

        Raises:
            InvalidProgram: If a header is invalid.
        """
        headers = request.headers
        lease, header = headers.get(protocol.LEASE_HEADER), headers.get(protocol.DEADLINE_HEADER)
        granted = headers.get(protocol.GRANTED_HEADER)
        try:
            if lease is not None:
                LeaseToken.parse(lease)
            deadlines = [float(text) for text in (deadline, header) if text is not None]
            granted_at = None if granted is None else float(granted)
            if any(map(math.isnan, [*deadlines, granted_at or 0.0])):
                raise ValueError
        except ValueError:
            values = f"{lease!r}, {header!r}, {granted!r}"
            raise InvalidProgram(f"Invalid lease, deadline or time of the grant in the headers: {values}.") from None
        is_forwarded = self._is_forwarded(request)
        return Ticket(0, min(deadlines, default=None), lease, granted_at, is_forwarded=is_forwarded)

    def _is_forwarded(self, request: web.Request) -> bool:
        """Return True if another front has sent a request."""
        value = request.headers.get(FORWARDED_HEADER)
        return value is not None and hmac.compare_digest(value.encode(errors="replace"), self._forwarded.encode())

    async def _execute(
        self,
        request: RequestT,
        run: Callable[[RequestT], Awaitable[SandboxResponse]],
        language: str,
        ticket: Ticket,
    ) -> bytes:
        if ticket.lease and ticket.deadline is not None and time.time() > ticket.deadline:
            # The process that sent the request was suspended, or the network delayed it.
            raise LeaseLost("The request arrived after its deadline. The program was not run. Acquire another slot.")
        async with self.hub.admit(ticket) as admission:
            started = time.monotonic()
            try:
                response = await run(request)
            finally:
                if ticket.session is not None:
                    admission.session_is_open = self.executor.sessions.is_open(ticket.session)
            admission.language, admission.status = language, response.status
            admission.run_time_s = time.monotonic() - started
        if isinstance(response, protocol.RunCodeResponse) and ticket.session is not None:
            response.session_died = admission.session_died
        response.queue_time = admission.queue_time_s
        response.executor_pod_name = self._pod_name
        return response.model_dump_json().encode()

    def _response_key(self, request: web.Request, key: str | None, body: bytes) -> str | None:
        """Return the key of a request's response.

        Responses are cached separately for each token. The body is part of the key, because clients may reuse
        idempotency keys.
        """
        return None if key is None else f"{self._scoped(request, key)} {hashlib.sha256(body).hexdigest()}"

    def _program_key(self, code: protocol.RunCodeRequest) -> str | None:
        """Return a key of the compiled program, so that requests with the same program use the same compile cache."""
        if self.settings.front_count == 1:
            return None
        toolchain = self.executor.toolchains[code.language]
        if isinstance(toolchain, MissingToolchain) or not toolchain.recipe.compiled:
            return None
        source = json.dumps([code.code, code.files], sort_keys=True)
        return f"{code.language} {hashlib.sha256(source.encode()).hexdigest()}"

    async def _respond_once(
        self,
        request: web.Request,
        body: bytes,
        key: str | None,
        respond: Callable[[], Coroutine[Any, Any, bytes]],
        *,
        finish: bool,
    ) -> web.Response:
        """Respond to a request, from the cache if a request with the same key was answered before.

        Args:
            request: Request to respond to.
            body: Body of the request.
            key: Key of the response; None if it is not cached.
            respond: Function that runs the request.
            finish: Whether to complete the request even if the client disconnects.
        """
        give_up_at = time.monotonic() + FORWARD_TIMEOUT_S
        while True:
            try:
                if key is not None:
                    return _json_response(await self.idempotency_cache.get(key, respond, finish=finish))
                return _json_response(await (asyncio.shield(asyncio.create_task(respond())) if finish else respond()))
            except AtOtherFront as other:
                try:
                    return await self._forward(other.front, request, body)
                except FrontDied as error:
                    if time.monotonic() > give_up_at:
                        raise JobFailed(str(error)) from error
            await asyncio.sleep(FORWARD_RETRY_INTERVAL_S)  # until the programs of the dead front have ended

    async def _end_session(self, request: web.Request) -> web.Response:
        name = self._scoped(request, request.match_info["session_id"])
        return web.json_response({"ended": await self.hub.ask("delete_session", name)})

    async def _fence_holder(self, request: web.Request) -> web.Response:
        fence = protocol.read(protocol.FenceRequest, await request.read())
        holder = request.match_info["holder"]
        # Leases have ASCII names only, so that no program of another holder can run.
        running = await self.hub.ask("fence", holder, fence.lease) if holder.isascii() else 0
        transport = request.transport
        address = transport.get_extra_info("sockname")[:2] if transport else ("", 0)
        return web.json_response(protocol.FenceResponse(running=running, address=address).model_dump())

    async def _ping(self, request: web.Request) -> web.Response:
        self._raise_if_draining(request)
        running, waiting = await self.hub.ask("status")
        ping = protocol.Ping(
            version=_VERSION,
            tier=self.executor.isolation.tier,
            gaps=self.executor.isolation.gaps,
            running=running,
            waiting=waiting,
            capacity=self.settings.capacity,
            time=time.time(),
        )
        return web.json_response(ping.model_dump())

    async def _languages(self, _: web.Request) -> web.Response:
        toolchains = self.executor.toolchains.items()
        return web.json_response({language: _language_info(found).model_dump() for language, found in toolchains})

    async def _metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=(await self.hub.ask("metrics")).encode(), headers=headers)


def _language_info(toolchain: Toolchain | MissingToolchain) -> protocol.LanguageInfo:
    if isinstance(toolchain, MissingToolchain):
        return protocol.LanguageInfo(available=False, missing=toolchain.install)
    return protocol.LanguageInfo(available=True, version=toolchain.version)


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _validation_details(error: ValidationError) -> list[dict[str, Any]]:
    """Return validation errors in FastAPI's format, without the input values, which may be large."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_REPORTED_ERRORS]
    return [{"loc": ["body", *map(str, one["loc"])], "msg": one["msg"], "type": one["type"]} for one in errors]
