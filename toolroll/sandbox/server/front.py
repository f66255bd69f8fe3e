"""The HTTP side of the sandbox server.

Every request is answered: with what the program did, or with why it was not run. 400 and 422 for what can't be asked,
401 for a wrong token, 410 for a session that was ended, 413 for too much, 429 with Retry-After when full, 503 while
ending, 504 after the request's deadline; a failure of the server's own is SandboxError with 200, as SandboxFusion has
it. A caller who goes away takes the program with it, except in a session, where what was begun is brought to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from toolroll import __version__
from toolroll.sandbox.protocol import (
    LanguageInfo,
    Ping,
    RunCodeRequest,
    RunCodeResponse,
    RunJupyterRequest,
    RunJupyterResponse,
    RunStatus,
    read,
)
from toolroll.sandbox.server.admission import Admission, Full, Late
from toolroll.sandbox.server.answers import Answers
from toolroll.sandbox.server.job import BadRequest, JobFailed
from toolroll.sandbox.server.languages import Missing
from toolroll.sandbox.server.metrics import Metrics
from toolroll.sandbox.server.sandbox import Sandbox
from toolroll.sandbox.server.session import Ended, NoRoom
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings

logger = logging.getLogger(__name__)

MOST_HELD = 1 << 30
"""Bytes of requests that are here at once."""
SENT_WITHIN = 120.0
_OPEN = ("/v1/ping", "/metrics")
"""Asked by load balancers and monitors, which have no token; they say nothing of anybody's programs."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The requests of one server."""

    def __init__(self, settings: ServerSettings, sandbox: Sandbox) -> None:
        self.settings = settings
        self.sandbox = sandbox
        self.admission = Admission(settings.capacity, settings.queue)
        self.answers = Answers()
        self.metrics = Metrics()
        self.is_draining = False
        self._held = 0
        self._pod = os.environ.get("MY_POD_NAME")
        self.metrics.watch("running", "Programs that run now.", lambda: self.admission.running)
        self.metrics.watch("waiting", "Requests that wait for their turn.", lambda: self.admission.waiting)
        self.metrics.watch("sessions", "Sessions that are kept.", lambda: len(sandbox.sessions))
        self.metrics.watch(
            "interpreter_restarts", "Warm interpreters that had to be replaced.", lambda: sandbox.restarts
        )

    def app(self) -> web.Application:
        """The application, for aiohttp to serve."""
        app = web.Application(client_max_size=self.settings.request_mb * MEGABYTE, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/run_code", self._run_code),
                web.post("/run_jupyter", self._run_jupyter),
                web.delete("/v1/sessions/{session_id}", self._end_session),
                web.get("/v1/ping", self._ping),
                web.get("/v1/languages", self._languages),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def drain(self, within: float) -> None:
        """Take no more requests, and wait for those that are here."""
        self.is_draining = True
        deadline = time.monotonic() + within
        while self.admission.running or self.admission.waiting:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn whatever is raised into an answer."""
        try:
            if request.path not in _OPEN:
                self._check_token(request)
            return await handler(request)
        except Full as full:
            return self._refuse(429, "full", str(full), full.retry_after)
        except NoRoom as error:
            return self._refuse(429, "sessions", str(error), self.admission.retry_after())
        except Ended as error:
            return self._refuse(410, "ended", str(error))
        except Late as late:
            return self._refuse(504, "late", str(late))
        except BadRequest as error:
            return self._refuse(422, "bad", str(error))
        except ValidationError as error:
            return self._refuse(422, "bad", _detail(error))
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, "large", f"A request may have {self.settings.request_mb} MB (--request-mb).")
        except web.HTTPException as error:
            return self._refuse(error.status, "http", error.reason)
        except JobFailed as error:
            return self._fail(str(error))
        except Exception as error:  # a fault of ours: the caller may try again, and we have to look
            logger.exception("A request could not be answered.")
            return self._fail(f"{type(error).__name__}: {error}")

    def _check_token(self, request: web.Request) -> None:
        if self.settings.token is None:
            return
        shown = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(shown, f"Bearer {self.settings.token.get_secret_value()}".encode()):
            raise web.HTTPUnauthorized(reason="This server wants a token: Authorization: Bearer ...")

    def _refuse(self, status: int, reason: str, detail: Any, retry_after: int = 0) -> web.Response:
        self.metrics.refused.labels(reason).inc()
        headers = {"Retry-After": str(retry_after)} if retry_after else {}
        body = json.dumps({"detail": detail})
        return web.Response(status=status, text=body, content_type="application/json", headers=headers)

    def _fail(self, message: str) -> web.Response:
        """The answer for a failure of the server's own. Never remembered: another try may do better."""
        logger.warning("A program could not be run: %s", message)
        self.metrics.executions.labels("", RunStatus.SANDBOX_ERROR).inc()
        return _json(RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=message, executor_pod_name=self._pod))

    async def _run_code(self, request: web.Request) -> web.Response:
        with self._room_for(request):
            body = await self._body(request)
            asked = read(RunCodeRequest, body)
            self._check_seconds(asked.compile_timeout, asked.run_timeout)

            async def answer() -> bytes:
                if asked.session_id is None:
                    return await self._answer(asked, self.sandbox.run_code(asked), asked.language)
                # Its turn first: those who wait for one session must not take the places of others.
                async with self.sandbox.sessions.turn(asked.session_id):
                    return await self._answer(asked, self.sandbox.run_code(asked), asked.language)

            return await self._send(asked.idempotency_key, body, answer, finish=asked.session_id is not None)

    async def _run_jupyter(self, request: web.Request) -> web.Response:
        with self._room_for(request):
            body = await self._body(request)
            asked = read(RunJupyterRequest, body)
            self._check_seconds(asked.cell_timeout, asked.total_timeout)

            async def answer() -> bytes:
                return await self._answer(asked, self.sandbox.run_jupyter(asked), "jupyter")

            return await self._send(asked.idempotency_key, body, answer, finish=False)

    @contextlib.contextmanager
    def _room_for(self, request: web.Request) -> Iterator[None]:
        """Room for a request's content, until it is answered: what waits may be many, or large, not both."""
        size = request.content_length or self.settings.request_mb * MEGABYTE
        if self._held and self._held + size > MOST_HELD:
            raise Full(self.admission.retry_after())
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def _body(self, request: web.Request) -> bytes:
        """The request's content; not even looked at where there is no room for it."""
        if self.is_draining:
            raise web.HTTPServiceUnavailable(reason="This server is ending.")
        self.admission.check_room()
        try:
            async with asyncio.timeout(SENT_WITHIN):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"The request took longer than {SENT_WITHIN:g} s to come.") from None

    def _check_seconds(self, *timeouts: float) -> None:
        if max(timeouts) > self.settings.max_timeout:
            raise BadRequest(
                f"A time limit of {max(timeouts):g} s is more than this server's {self.settings.max_timeout:g} s "
                "(its option --max-timeout)."
            )

    async def _answer(
        self,
        asked: RunCodeRequest | RunJupyterRequest,
        run: Coroutine[Any, Any, RunCodeResponse | RunJupyterResponse],
        language: str,
    ) -> bytes:
        with contextlib.closing(run):  # it may never be begun
            async with self.admission.turn(asked.deadline) as waited:
                began = time.monotonic()
                answer = await run
        self.metrics.queue_seconds.observe(waited)
        self.metrics.run_seconds.observe(time.monotonic() - began)
        self.metrics.executions.labels(language, answer.status).inc()
        answer.queue_time = waited
        answer.executor_pod_name = self._pod
        return answer.model_dump_json().encode()

    async def _send(
        self, key: str | None, asked: bytes, make: Callable[[], Coroutine[Any, Any, bytes]], *, finish: bool
    ) -> web.Response:
        if key is not None:
            # With the request's content: another request under the same key is another request.
            key = f"{key} {hashlib.sha256(asked).hexdigest()}"
            body = await self.answers.get(key, make, finish=finish)
        elif finish:
            body = await asyncio.shield(asyncio.create_task(make()))
        else:
            body = await make()
        return web.Response(body=body, content_type="application/json")

    async def _end_session(self, request: web.Request) -> web.Response:
        ended = self.sandbox.sessions.end(request.match_info["session_id"])
        return web.Response(text=json.dumps({"ended": ended}), content_type="application/json")

    async def _ping(self, _: web.Request) -> web.Response:
        if self.is_draining:
            raise web.HTTPServiceUnavailable(reason="This server is ending.")
        return _json(
            Ping(
                version=__version__,
                tier=self.sandbox.isolation.tier,
                running=self.admission.running,
                waiting=self.admission.waiting,
                capacity=self.settings.capacity,
                time=time.time(),
            )
        )

    async def _languages(self, _: web.Request) -> web.Response:
        found = {
            name: LanguageInfo(available=False, missing=one.install)
            if isinstance(one, Missing)
            else LanguageInfo(available=True, version=one.version)
            for name, one in self.sandbox.toolchains.items()
        }
        body = json.dumps({name: info.model_dump() for name, info in found.items()})
        return web.Response(text=body, content_type="application/json")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


def _json(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json(), content_type="application/json")


def _detail(error: ValidationError) -> list[dict[str, Any]]:
    """What is wrong with a request, as FastAPI says it; without the input, which may be large and odd."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [{"loc": ["body", *map(str, one["loc"])], "msg": one["msg"], "type": one["type"]} for one in found[:20]]
