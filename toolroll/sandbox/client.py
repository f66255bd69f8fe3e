"""SandboxClient: sends programs to a sandbox, and says whose fault it is when one comes to nothing.

    async with SandboxClient(["http://10.0.0.1:8080", "http://10.0.0.2:8080"]) as client:
        execution = await client.run("print(1 + 1)")

SandboxFusion and `toolroll sandbox serve` both understand it. It promises:

- An `Execution` is the program's own doing. What the service did is raised: SandboxUnavailable, or SandboxRefused for
  a request that it won't have, however often it is sent.
- Every call ends by its deadline, whatever the server does: nothing, half of something, or a byte a minute.
- Only what the program had no part in is tried again: a connection that failed, 429, 502, 503, 504, SandboxError. All
  attempts of a call carry one idempotency key.
- One pool of connections per event loop, which closes with the client or the loop. A cancelled call closes its own.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Self, TypeVar
from uuid import uuid4

import orjson
from pydantic import TypeAdapter
from tenacity import AsyncRetrying, retry_if_exception
from yarl import URL

from toolroll.errors import ConfigError, SandboxUnavailable
from toolroll.sandbox import protocol
from toolroll.sandbox.call import Call, Failure, Pool
from toolroll.sandbox.execution import Execution, Notebook, read_execution, read_notebook
from toolroll.sandbox.protocol import scrub

T = TypeVar("T")

QUEUE_ALLOWANCE = 30.0
"""Seconds to wait for a turn, where no deadline says: a burst works itself off."""
NAMES_TRIED = 32
"""For a session at an endpoint that is up; where most are down, it may still be at one of them."""
MARGIN = 5.0
"""Seconds beyond the program's own limits: to start it, to end it, and for the way there and back."""

_languages = TypeAdapter(dict[str, protocol.LanguageInfo])


class SandboxClient:
    """Runs programs in a sandbox, at one endpoint or several: each call goes where the fewest are outstanding.

    Any event loop may use it, and it pickles: connections are opened where and when they are needed.

    Args:
        endpoints: Base URLs. A trailing `/run_code`, as in verl's settings, may stay.
        token: Sent as `Authorization: Bearer …`.
        max_connections: Per event loop; more calls wait. The default fits the usual 1024 open files of a process.
    """

    def __init__(self, endpoints: str | Sequence[str], *, token: str | None = None, max_connections: int = 512) -> None:
        given = [endpoints] if isinstance(endpoints, str) else endpoints
        self.endpoints = tuple(dict.fromkeys(map(_base_url, given)))
        if not self.endpoints:
            raise ConfigError("A SandboxClient needs an endpoint, e.g. 'http://127.0.0.1:8080'.")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._max_connections = max_connections
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        compile_timeout: float = 10,
        run_timeout: float = 10,
        memory_limit_mb: int | None = None,
        session_id: str | None = None,
        show_value: bool = False,
        deadline: float | None = None,
        begin_by: float | None = None,
        patience: float = inf,
    ) -> Execution:
        """Run a program.

        Args:
            session_id: Keep the interpreter, with its variables, for the next call that names the same session. All
                processes whose clients have the same endpoints find it at the same one of them.
            show_value: Where a Python program ends in an expression, add its value to stdout, as a notebook would.
                SandboxFusion ignores it.
            deadline: When the answer must be there, on the clock of `time.monotonic()`. By default there is time for
                the program, and half a minute for its turn to come.
            begin_by: After this moment it is neither sent again nor begun by a server that honours it. By default, the
                deadline.
            patience: Seconds after which a server that is down all the while isn't tried any more.
        """
        if deadline is None:
            deadline = time.monotonic() + QUEUE_ALLOWANCE + compile_timeout + run_timeout + MARGIN
        texts = {"code": code, "language": language, "stdin": stdin, "session_id": session_id}
        limits = {"compile_timeout": compile_timeout, "run_timeout": run_timeout, "memory_limit_MB": memory_limit_mb}
        request = {**texts, **limits, "show_value": show_value or None}
        return await self._run("/run_code", request, files, fetch_files, deadline, read_execution, begin_by, patience)

    async def run_jupyter(
        self,
        cells: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        cell_timeout: float = 0,
        total_timeout: float = 45,
        memory_limit_mb: int | None = None,
        deadline: float | None = None,
    ) -> Notebook:
        """Run cells, one after another, in a kernel of their own. A `cell_timeout` of 0 is none but the total."""
        if deadline is None:
            deadline = time.monotonic() + QUEUE_ALLOWANCE + total_timeout + MARGIN
        limits = {"cell_timeout": cell_timeout, "total_timeout": total_timeout, "memory_limit_MB": memory_limit_mb}
        request = {"cells": list(cells), **limits}
        return await self._run("/run_jupyter", request, files, fetch_files, deadline, read_notebook)

    def new_session(self) -> str:
        """A name for a session that nobody else has, at an endpoint that isn't known to be down."""
        name = uuid4().hex
        pool = self._pools.get(asyncio.get_running_loop())
        for _ in range(NAMES_TRIED if pool else 0):
            assert pool is not None
            if pool.session_endpoint(name).rests_until <= time.monotonic():
                break
            name = uuid4().hex
        return name

    async def end_session(self, session_id: str, *, deadline: float | None = None) -> bool:
        """End a session, and whatever runs in it. Whether there was one. SandboxFusion has none: SandboxRefused."""
        call = Call(f"/v1/sessions/{session_id}", None, deadline, session_id=session_id, method="DELETE")
        return await self._ask(call, lambda body, _: bool(orjson.loads(body)["ended"]))

    async def ping(self, *, deadline: float | None = None) -> protocol.Ping:
        """How one of the endpoints does. SandboxFusion says no more than that it is there."""
        return await self._ask(Call("/v1/ping", None, deadline), _ping)

    async def languages(self, *, deadline: float | None = None) -> dict[str, protocol.LanguageInfo]:
        """Which languages one of the endpoints has. SandboxFusion doesn't know the question: SandboxRefused."""
        return await self._ask(Call("/v1/languages", None, deadline), lambda body, _: _languages.validate_json(body))

    async def close(self) -> None:
        """Close this event loop's connections; another's close with it. Used again, the client opens new ones."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.keeper.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}}

    async def _run(
        self,
        path: str,
        request: dict[str, Any],
        files: Mapping[str, bytes] | None,
        fetch_files: Sequence[str],
        deadline: float,
        parse: Callable[[bytes, Call], T],
        begin_by: float | None = None,
        patience: float = inf,
    ) -> T:
        request["files"] = {name: b64encode(content).decode() for name, content in (files or {}).items()}
        request["fetch_files"] = list(fetch_files)
        begin_by = deadline if begin_by is None else begin_by
        request["deadline"] = time.time() + begin_by - time.monotonic()
        request["idempotency_key"] = uuid4().hex
        request = {key: scrub(value) for key, value in request.items() if value is not None}
        body, session_id = orjson.dumps(request), request.get("session_id")
        call = Call(path, body, deadline, begin_by=begin_by, patience=patience, session_id=session_id)
        return await self._ask(call, parse)

    async def _ask(self, call: Call, parse: Callable[[bytes, Call], T]) -> T:
        """Ask until there is an answer, or no hope of one by the deadline."""
        if not call.time_to_begin > 0:
            raise SandboxUnavailable("The deadline had passed before the sandbox was asked. Allow more time.")

        failed: list[Failure] = []

        async def attempt() -> T:
            if failed:
                raise failed.pop()
            return await call.attempt(await self._pool(), parse)

        again = retry_if_exception(lambda error: isinstance(error, Failure) and error.again)
        try:
            async with asyncio.timeout(call.left):
                try:
                    return await attempt()
                except Failure as failure:
                    failed.append(failure)
                # It goes on from the first failure. Around every call it would cost more CPU than all else of ours.
                return await AsyncRetrying(retry=again, wait=call.wait, stop=call.stop, reraise=True)(attempt)
        except TimeoutError:
            raise call.unavailable(in_time=False) from None
        except Failure:
            raise call.unavailable(in_time=True) from None

    async def _pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            for other in list(self._pools):
                if other.is_closed():
                    self._pools.pop(other, None)
            self._pools[loop] = pool = Pool(self.endpoints, self._max_connections, self._headers)
            await anext(pool.keeper)
        return self._pools[loop]


def run_code(
    code: str, language: str = "python", *, endpoint: str = "http://127.0.0.1:8080", **options: Any
) -> Execution:
    """Run a program from a script that has no event loop. The options are those of `SandboxClient.run`, and `token`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_run_once(endpoint, options.pop("token", None), code, language, **options))
    raise RuntimeError(
        "run_code blocks, and this thread runs an event loop, as a notebook does. Write instead: "
        "async with SandboxClient(…) as client: execution = await client.run(…)"
    )


async def _run_once(endpoint: str, token: str | None, *program: Any, **options: Any) -> Execution:
    async with SandboxClient(endpoint, token=token) as client:
        return await client.run(*program, **options)


def _ping(body: bytes, call: Call) -> protocol.Ping:
    return protocol.Ping() if body.strip() == b'"pong"' else protocol.read(protocol.Ping, body)


def _base_url(endpoint: str) -> str:
    base = endpoint.strip().rstrip("/").removesuffix("/run_code")
    try:
        url = URL(base)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{endpoint!r} is no sandbox's URL, which is like 'http://127.0.0.1:8080'.")
    return base
