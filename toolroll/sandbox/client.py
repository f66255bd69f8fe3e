"""Client that runs programs in SandboxFusion or `toolroll sandbox serve`.

Invariants:

- An `Execution` is a result of the program. Failures of the sandbox are raised as `SandboxUnavailable`, or as
  `SandboxRefused` if retrying will not help.
- Every call ends by its deadline, even if the server stops responding in the middle of a response.
- Only failures that the program did not cause are retried: failed connections, statuses 429, 502, 503 and 504, and the
  run status `SandboxError`. All attempts of a call have the same idempotency key.
- Connections belong to one event loop and are closed with the client or the loop. Cancelling a call closes its
  connection.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Self, TypeVar
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.errors import SandboxRefused, SandboxUnavailable
from toolroll.http import AttemptFailed, HttpClient, HttpRequest, HttpService, RetryPolicy
from toolroll.http.failures import RETRYABLE_STATUSES, failure_from_status
from toolroll.sandbox import protocol
from toolroll.sandbox.execution import Execution, Notebook, read_execution, read_notebook
from toolroll.sandbox.server_clock import ServerClock
from toolroll.tracing.context import trace_headers

T = TypeVar("T")
Parser = Callable[[bytes, HttpRequest[Any]], T]

QUEUE_ALLOWANCE_S = 30.0
"""Time for a request to wait in the sandbox's queue if no deadline is given."""
EXECUTION_OVERHEAD_S = 5.0
"""Time beyond the timeouts of the program: to start it, to stop it, and to transfer request and response."""
CONTROL_TIMEOUT_S = 5.0
"""Default timeout for requests that do not run a program."""
CLOCK_REFRESH_INTERVAL_S = 60.0
"""Interval between measurements of a server's clock. Clocks drift by less than 10 ms in it."""
MAX_SESSION_NAMES_TRIED = 32
"""Maximum number of random session names tried to find one at an endpoint that is up."""

SANDBOX = HttpService(
    name="sandbox",
    example_url="http://127.0.0.1:8080",
    unavailable=SandboxUnavailable,
    rejected=SandboxRefused,
    hint="Check that the sandbox is running and not overloaded: GET {url}/v1/ping.",
    remedies={
        **dict.fromkeys((401, 403), f"Check the token ({protocol.TOKEN_ENV_VAR})."),
        404: "Check that this is the URL of a sandbox.",
    },
    connect_timeout_s=5.0,
    resend_after_close=True,
)

_languages = TypeAdapter(dict[str, protocol.LanguageInfo])


class SandboxClient:
    """Client that runs programs in a sandbox with one or several endpoints.

    Each call goes to the endpoint with the fewest outstanding calls. Any event loop can use the client, and it can be
    pickled: connections are opened when they are needed.

    Args:
        endpoints: Base URLs. A trailing `/run_code`, as in verl's settings, is ignored.
        token: Bearer token, sent as `Authorization` header.
        max_connections: Maximum number of connections to each endpoint, for each event loop. Further calls wait. The
            default fits the usual limit of 1024 open files.

    Raises:
        ConfigError: If an endpoint or `max_connections` is invalid, or no endpoint is given.

    Example:
        async with SandboxClient(["http://10.0.0.1:8080", "http://10.0.0.2:8080"]) as client:
            execution = await client.run("print(1 + 1)")
            print(execution.stdout)
    """

    def __init__(self, endpoints: str | Sequence[str], *, token: str | None = None, max_connections: int = 512) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else endpoints
        bases = [url.strip().rstrip("/").removesuffix("/run_code") for url in urls]
        self.http = HttpClient(bases, SANDBOX, token=token, max_connections=max_connections)
        self._clocks = {url: ServerClock() for url in self.http.urls}
        self._measuring: set[str] = set()
        """Endpoints whose clock is being measured."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Base URLs of the endpoints."""
        return self.http.urls

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
        wall_timeout: float | None = None,
        deadline: float | None = None,
        start_by: float | None = None,
        max_outage_s: float = inf,
        lease: str | None = None,
        granted_at: float = inf,
    ) -> Execution:
        """Run a program.

        Args:
            code: Source code.
            language: Language of the code.
            stdin: Text for the standard input.
            files: Files to create before the run, by path.
            fetch_files: Paths of files to return after the run.
            compile_timeout: Timeout of the compiler, in seconds of CPU time.
            run_timeout: Timeout of the program, in seconds of CPU time. A program that sleeps or waits is stopped
                after twice this time plus a second. SandboxFusion limits the elapsed time.
            memory_limit_mb: Memory limit in megabytes. The server's limit by default.
            session_id: Session whose interpreter keeps its variables between calls. All clients with the same
                endpoints find a session at the same endpoint. SandboxFusion does not support sessions.
            show_value: If a Python program ends with an expression, write its value to stdout, as a notebook does.
                SandboxFusion ignores it.
            wall_timeout: Maximum elapsed time of compiler and program together, in seconds. By default the time that
                they may take if they sleep or wait. SandboxFusion ignores it.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`. By default `wall_timeout` plus
                `QUEUE_ALLOWANCE_S` and `EXECUTION_OVERHEAD_S`.
            start_by: Time after which the program is neither sent again nor started by the server. The deadline by
                default.
            max_outage_s: Time after which the call fails if the endpoints are down.
            lease: `Slot.lease` of a limiter's slot. The server rejects the program if the lease was fenced.
            granted_at: `Slot.granted_at`. The server rejects the program if it has started later, because it does not
                know then which leases were fenced.

        Returns:
            The result of the program, whether it succeeded or failed.

        Raises:
            SandboxUnavailable: If the sandbox was unreachable, overloaded or failing until the retries or the deadline
                were exhausted.
            SandboxRefused: If the sandbox rejected the request.
        """
        if wall_timeout is None:
            wall_timeout = protocol.max_wall_time(compile_timeout) + protocol.max_wall_time(run_timeout)
        if deadline is None:
            deadline = time.monotonic() + QUEUE_ALLOWANCE_S + wall_timeout + EXECUTION_OVERHEAD_S
        return await self._execute(
            "/run_code",
            read_execution,
            RetryPolicy(deadline=deadline, start_by=start_by, max_outage_s=max_outage_s),
            lease,
            granted_at,
            code=code,
            language=language,
            stdin=stdin,
            files=files,
            fetch_files=list(fetch_files),
            compile_timeout=compile_timeout,
            run_timeout=run_timeout,
            wall_timeout=wall_timeout,
            memory_limit_MB=memory_limit_mb,
            session_id=session_id,
            show_value=show_value or None,
        )

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
        """Run the cells of a notebook in order, in a new Python kernel.

        Args:
            cells: Source code of the cells.
            files: Files to create before the run, by path.
            fetch_files: Paths of files to return after the run.
            cell_timeout: Timeout for each cell, in seconds of CPU time. 0 for no limit other than the total.
            total_timeout: Timeout for all cells, in seconds of CPU time.
            memory_limit_mb: Memory limit in megabytes. The server's limit by default.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.

        Returns:
            The results of the cells, whether they succeeded or failed.

        Raises:
            SandboxUnavailable: If the sandbox was unreachable, overloaded or failing until the retries or the deadline
                were exhausted.
            SandboxRefused: If the sandbox rejected the request.
        """
        if deadline is None:
            wall_time = protocol.max_wall_time(total_timeout)
            deadline = time.monotonic() + QUEUE_ALLOWANCE_S + wall_time + EXECUTION_OVERHEAD_S
        return await self._execute(
            "/run_jupyter",
            read_notebook,
            RetryPolicy(deadline=deadline),
            cells=list(cells),
            files=files,
            fetch_files=list(fetch_files),
            cell_timeout=cell_timeout,
            total_timeout=total_timeout,
            memory_limit_MB=memory_limit_mb,
        )

    def new_session(self) -> str:
        """Create a unique session name. The session starts with the first program that uses it.

        Returns:
            A name whose endpoint is not known to be down, if one was found.
        """
        names = [uuid4().hex for _ in range(MAX_SESSION_NAMES_TRIED)]
        return next((name for name in names if not self.http.is_cooling(name)), names[0])

    async def end_session(self, session_id: str, *, deadline: float | None = None) -> bool:
        """End a session and all programs in it.

        Args:
            session_id: Name of the session.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.

        Returns:
            True if the session existed.

        Raises:
            SandboxUnavailable: If the endpoint did not respond.
            SandboxRefused: If the server does not support sessions, such as SandboxFusion.
        """
        path = f"/v1/sessions/{session_id}"
        return await self._control(path, _parse_ended, deadline, method="DELETE", affinity=session_id, sticky=True)

    async def ping(self, *, deadline: float | None = None) -> protocol.Ping:
        """Return the state of one of the endpoints.

        Args:
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.

        Returns:
            The state. All fields have their defaults if the server is SandboxFusion.

        Raises:
            SandboxUnavailable: If no endpoint responded.
            SandboxRefused: If the endpoint rejected the request.
        """
        return await self._control("/v1/ping", _parse_ping, deadline)

    async def languages(self, *, deadline: float | None = None) -> dict[str, protocol.LanguageInfo]:
        """Return the languages of one of the endpoints.

        Args:
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.

        Returns:
            Availability and version by language.

        Raises:
            SandboxUnavailable: If no endpoint responded.
            SandboxRefused: If the server does not list its languages, such as SandboxFusion.
        """
        return await self._control("/v1/languages", lambda body, _: _languages.validate_json(body), deadline)

    async def close(self) -> None:
        """Close the connections of this event loop. The client can be used again."""
        await self.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _execute(
        self,
        path: str,
        parse: Parser[T],
        policy: RetryPolicy,
        lease: str | None = None,
        granted_at: float = inf,
        **fields: Any,
    ) -> T:
        """Send a program. A field that is None is omitted."""
        if lease is not None and policy.last_start <= time.monotonic():
            raise SandboxRefused("The slot expired before the program was sent.", protocol.LEASE_LOST_STATUS)
        fields["files"] = {name: b64encode(content).decode() for name, content in (fields["files"] or {}).items()}
        fields["idempotency_key"] = uuid4().hex
        body = {key: replace_lone_surrogates_in_json(value) for key, value in fields.items() if value is not None}
        session_id, is_sticky = body.get("session_id"), "session_id" in body

        async def headers(url: str) -> dict[str, str]:
            if lease is not None or _was_late(request):
                await self._measure_clock(url)
            found = {**trace_headers(), protocol.DEADLINE_HEADER: str(self._server_time(url, policy.last_start))}
            if lease is not None:
                found[protocol.LEASE_HEADER] = lease
                found[protocol.GRANTED_HEADER] = str(self._server_time(url, granted_at))
            return found

        request = HttpRequest(path, parse, policy, lambda _: body, headers, affinity=session_id, sticky=is_sticky)
        return await self.http.send(request)

    async def _measure_clock(self, url: str) -> None:
        """Measure the clock of a server, unless that was done recently or another call does it."""
        clock, sent_at = self._clocks[url], time.monotonic()
        if sent_at - clock.measured_at > CLOCK_REFRESH_INTERVAL_S and not (clock.is_known and url in self._measuring):
            self._measuring.add(url)
            try:
                response = await self.http.send_once(url, "/v1/ping", timeout_s=CONTROL_TIMEOUT_S)
            except AttemptFailed as failure:  # the program was not sent, so that it can always be sent again
                raise AttemptFailed(failure.reason, retryable=True, endpoint_down=True) from None
            finally:
                self._measuring.discard(url)
            received_at = time.monotonic()
            if response.status in RETRYABLE_STATUSES:
                raise failure_from_status(*response)
            clock.measured_at = received_at
            with suppress(ValueError):
                if server_time := _parse_ping(response.content).time:  # SandboxFusion has no deadlines
                    clock.measure(server_time, sent_at, received_at)

    def _server_time(self, url: str, moment: float) -> float:
        """Return the Unix time by a server's clock at a moment of `time.monotonic()`. Never later than the moment."""
        if (clock := self._clocks[url]).is_known:
            return clock.at(moment)
        now = time.time()  # read first: if the process is suspended between the two, the result is too early
        return now + moment - time.monotonic()

    async def _control(self, path: str, parse: Parser[T], deadline: float | None, **options: Any) -> T:
        policy = RetryPolicy(deadline=time.monotonic() + CONTROL_TIMEOUT_S if deadline is None else deadline)
        return await self.http.send(HttpRequest(path, parse, policy, **options))


def run_code(
    code: str, language: str = "python", *, endpoint: str = "http://127.0.0.1:8080", **options: Any
) -> Execution:
    """Run a program, from code without an event loop.

    Args:
        code: Source code.
        language: Language of the code.
        endpoint: Base URL of the sandbox.
        **options: `token`, and further arguments of `SandboxClient.run`.

    Returns:
        The result of the program.

    Raises:
        RuntimeError: If this thread runs an event loop.
        SandboxUnavailable: If the sandbox was unreachable, overloaded or failing.
        SandboxRefused: If the sandbox rejected the request.

    Example:
        execution = run_code("print(1 + 1)")
        print(execution.stdout)
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_run_once(endpoint, options.pop("token", None), code, language, **options))
    raise RuntimeError(
        "run_code blocks and cannot be called from a running event loop, such as that of a notebook. Use: "
        "async with SandboxClient(…) as client: execution = await client.run(…)"
    )


async def _run_once(endpoint: str, token: str | None, *program: Any, **options: Any) -> Execution:
    async with SandboxClient(endpoint, token=token) as client:
        return await client.run(*program, **options)


def _parse_ended(body: bytes, request: HttpRequest[Any]) -> bool:
    return bool(orjson.loads(body)["ended"])


def _was_late(request: HttpRequest[Any]) -> bool:
    failure = request.history.last_failure
    return failure is not None and failure.status == protocol.LATE_STATUS


def _parse_ping(body: bytes, request: HttpRequest[Any] | None = None) -> protocol.Ping:
    return protocol.Ping() if body.strip() == b'"pong"' else protocol.read(protocol.Ping, body)
