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
| 429 | the queue is full or all sessions are in use; `Retry-After` is the delay in seconds |
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
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from aiohttp import web
from pydantic import ValidationError

from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import SandboxResponse
from toolroll.sandbox.server.api import request_origin
from toolroll.sandbox.server.api.admission import AdmissionQueue, DeadlineExceeded, QueueFull
from toolroll.sandbox.server.api.fencing import LeaseFences, LeaseLost, LeaseToken
from toolroll.sandbox.server.api.idempotency import IdempotencyCache
from toolroll.sandbox.server.api.metrics import ServerMetrics
from toolroll.sandbox.server.api.request_body import BodyMemoryExhausted, BodyReceiver
from toolroll.sandbox.server.execution.job import InvalidProgram, JobFailed
from toolroll.sandbox.server.execution.languages import MissingToolchain, Toolchain
from toolroll.sandbox.server.execution.sessions import SessionEnded, SessionLimitReached
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings

if TYPE_CHECKING:
    from toolroll.sandbox.server.execution.executor import Executor
    from toolroll.sandbox.server.execution.plain_executor import PlainExecutor

logger = logging.getLogger(__name__)

_VERSION = version("toolroll")
DRAIN_POLL_INTERVAL_S = 0.02
MAX_REPORTED_ERRORS = 20
"""Maximum number of validation errors in one response."""
_PUBLIC_PATHS = ("/v1/ping",)
"""Paths without authentication, for load balancers. They reveal nothing about programs."""
_REJECTIONS: dict[type[Exception], tuple[int, str]] = {
    QueueFull: (429, "full"),
    BodyMemoryExhausted: (429, "full"),
    SessionLimitReached: (429, "sessions"),
    SessionEnded: (410, "ended"),
    DeadlineExceeded: (protocol.LATE_STATUS, "late"),
    LeaseLost: (protocol.LEASE_LOST_STATUS, "fenced"),
    InvalidProgram: (422, "bad"),
}
"""HTTP status and label of the `refused` metric for each exception."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RequestT = TypeVar("RequestT", protocol.RunCodeRequest, protocol.RunJupyterRequest)


class StartConditions(NamedTuple):
    """Conditions under which the program of a request may start."""

    deadline: float | None
    """Unix time after which it may not start."""
    lease: LeaseToken | None
    """Lease of the limiter by which it is sent."""
    granted_at: float
    """Unix time at which its slot was granted."""

    @classmethod
    def read(cls, headers: Mapping[str, str], deadline: float | None) -> Self:
        """Read the headers of a request, whose body may contain a deadline, too.

        Raises:
            InvalidProgram: If a header is invalid.
        """
        lease, header = headers.get(protocol.LEASE_HEADER), headers.get(protocol.DEADLINE_HEADER)
        granted = headers.get(protocol.GRANTED_HEADER, "inf")
        try:
            deadlines = [] if deadline is None else [deadline]
            deadlines += [] if header is None else [float(header)]
            if any(map(math.isnan, [*deadlines, float(granted)])):
                raise ValueError
            token = None if lease is None else LeaseToken.parse(lease)
            return cls(min(deadlines, default=None), token, float(granted))
        except ValueError:
            values = f"{lease!r}, {header!r}, {granted!r}"
            raise InvalidProgram(f"Invalid lease, deadline or time of the grant in the headers: {values}.") from None

    def raise_if_late(self) -> None:
        """Raise LeaseLost if the request arrives late. Its process was suspended, or the network delayed it."""
        if self.lease and self.deadline is not None and time.time() > self.deadline:
            raise LeaseLost("The request arrived after its deadline.")


class HttpApp:
    """Request handlers of one server.

    Args:
        settings: Settings of the server.
        executor: Executor that runs the programs.
    """

    def __init__(self, settings: ServerSettings, executor: Executor | PlainExecutor) -> None:
        self.settings = settings
        self.executor = executor
        self.admission = AdmissionQueue(settings.capacity, settings.queue)
        self.idempotency_cache = IdempotencyCache()
        self.fences = LeaseFences(time.time())
        self.metrics = ServerMetrics()
        self.is_draining = False
        self._scope_key = os.urandom(16)
        self._bodies = BodyReceiver(settings.request_mb * MEGABYTE)
        self._pod_name = os.environ.get("MY_POD_NAME")
        self.metrics.add_gauge("running", "Programs that are running.", lambda: self.admission.running)
        self.metrics.add_gauge("waiting", "Requests in the admission queue.", lambda: self.admission.waiting)
        self.metrics.add_gauge("sessions", "Open sessions.", lambda: len(executor.sessions))
        self.metrics.add_gauge("interpreter_restarts", "Zygotes that were replaced.", lambda: executor.restarts)

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

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests and wait until the admitted and waiting ones have ended, or until the timeout."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self.admission.running or self.admission.waiting:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(DRAIN_POLL_INTERVAL_S)

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, call the handler and convert exceptions to responses."""
        try:
            request_origin.raise_if_from_web_page(request.headers, self.settings)
            if request.path not in _PUBLIC_PATHS:
                self._check_token(request)
            return await handler(request)
        except tuple(_REJECTIONS) as error:
            return self._reject(*_REJECTIONS[type(error)], str(error))
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

    def _reject(self, status: int, reason: str, detail: Any) -> web.Response:
        self.metrics.refused.labels(reason).inc()
        headers = {"Retry-After": str(self.admission.retry_after())} if status == 429 else {}
        return web.json_response({"detail": detail}, status=status, headers=headers)

    def _sandbox_error(self, message: str) -> web.Response:
        """Return the response for a failure of the server. It is never cached, so that a retry can succeed."""
        logger.warning("A program could not be run: %s", message)
        status = protocol.RunStatus.SANDBOX_ERROR
        self.metrics.executions.labels("", status).inc()
        response = protocol.RunCodeResponse(status=status, message=message, executor_pod_name=self._pod_name)
        return _json_response(response.model_dump_json().encode())

    async def _run_code(self, request: web.Request) -> web.Response:
        async with self._receive(request) as body:
            code = protocol.read(protocol.RunCodeRequest, body)
            conditions = StartConditions.read(request.headers, code.deadline)
            self._check_timeouts(code.compile_timeout, code.run_timeout)
            in_session, sessions = code.session_id is not None, self.executor.sessions
            if code.session_id is not None:
                code.session_id = self._scoped(request, code.session_id)
            # Locked before admission: requests that wait for one session must not occupy slots of other requests.
            lock = sessions.lock(code.session_id) if code.session_id is not None else contextlib.nullcontext()

            async def respond() -> bytes:
                async with lock:
                    return await self._execute(code, self.executor.run_code, code.language, conditions)

            return await self._respond_once(request, code.idempotency_key, body, respond, finish=in_session)

    async def _run_jupyter(self, request: web.Request) -> web.Response:
        async with self._receive(request) as body:
            notebook = protocol.read(protocol.RunJupyterRequest, body)
            self._check_timeouts(notebook.cell_timeout, notebook.total_timeout)
            conditions = StartConditions.read(request.headers, notebook.deadline)
            respond = partial(self._execute, notebook, self.executor.run_jupyter, "jupyter", conditions)
            return await self._respond_once(request, notebook.idempotency_key, body, respond, finish=False)

    @contextlib.asynccontextmanager
    async def _receive(self, request: web.Request) -> AsyncIterator[bytes]:
        """Receive the body of a request. It takes part in admission only when the body is complete."""
        self._raise_if_draining()
        self.admission.raise_if_full()  # before the body is read
        async with self._bodies.receive(request) as body:
            self._raise_if_draining()  # the server may have been stopped in the meantime
            yield body

    def _raise_if_draining(self) -> None:
        if self.is_draining:
            raise web.HTTPServiceUnavailable(reason="The server is shutting down.")

    def _check_timeouts(self, *timeouts_s: float) -> None:
        if max(timeouts_s) > self.settings.max_timeout:
            maximum = f"{self.settings.max_timeout:g} s (server option --max-timeout)"
            raise InvalidProgram(f"The timeout of {max(timeouts_s):g} s exceeds the maximum of {maximum}.")

    async def _execute(
        self,
        request: RequestT,
        run: Callable[[RequestT], Awaitable[SandboxResponse]],
        language: str,
        conditions: StartConditions,
    ) -> bytes:
        conditions.raise_if_late()
        async with self.admission.admit(conditions.deadline) as queue_time_s:
            with self.fences.run(conditions.lease, conditions.granted_at):
                started = time.monotonic()
                response = await run(request)
        self.metrics.queue_seconds.observe(queue_time_s)
        self.metrics.run_seconds.observe(time.monotonic() - started)
        self.metrics.executions.labels(language, response.status).inc()
        response.queue_time = queue_time_s
        response.executor_pod_name = self._pod_name
        return response.model_dump_json().encode()

    async def _respond_once(
        self,
        request: web.Request,
        key: str | None,
        body: bytes,
        respond: Callable[[], Coroutine[Any, Any, bytes]],
        *,
        finish: bool,
    ) -> web.Response:
        """Respond to a request, from the cache if a request with the same key and body was answered before.

        Args:
            request: Request to respond to. Responses are cached separately for each token.
            key: Idempotency key of the request.
            body: Body of the request. It is part of the cache key, because clients may reuse idempotency keys.
            respond: Function that runs the request.
            finish: Whether to complete the request even if the client disconnects.
        """
        if key is not None:
            cache_key = f"{self._scoped(request, key)} {hashlib.sha256(body).hexdigest()}"
            return _json_response(await self.idempotency_cache.get(cache_key, respond, finish=finish))
        return _json_response(await (asyncio.shield(asyncio.create_task(respond())) if finish else respond()))

    async def _end_session(self, request: web.Request) -> web.Response:
        name = self._scoped(request, request.match_info["session_id"])
        return web.json_response({"ended": self.executor.sessions.end(name)})

    async def _fence_holder(self, request: web.Request) -> web.Response:
        fence = protocol.read(protocol.FenceRequest, await request.read())
        running = self.fences.fence(request.match_info["holder"], fence.lease)
        transport = request.transport
        address = transport.get_extra_info("sockname")[:2] if transport else ("", 0)
        return web.json_response(protocol.FenceResponse(running=running, address=address).model_dump())

    async def _ping(self, _: web.Request) -> web.Response:
        self._raise_if_draining()
        ping = protocol.Ping(
            version=_VERSION,
            tier=self.executor.isolation.tier,
            gaps=self.executor.isolation.gaps,
            running=self.admission.running,
            waiting=self.admission.waiting,
            capacity=self.settings.capacity,
            time=time.time(),
        )
        return web.json_response(ping.model_dump())

    async def _languages(self, _: web.Request) -> web.Response:
        toolchains = self.executor.toolchains.items()
        return web.json_response({language: _language_info(found).model_dump() for language, found in toolchains})

    async def _metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.render(), headers=headers)


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
