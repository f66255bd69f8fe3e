"""SandboxClient against scripted and faulty servers: each call ends with a result or an infra fault in time."""

import asyncio
import gc
import json
import pickle
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest
import uvloop
import virtual_time
from free_port import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_fusion.models import RunCodeRequest, RunJupyterRequest
from strategies import JSON, scaled

from sandbox.fault_server import SUCCESS, Behaviour, FaultServer, after, answer, drip, hang, program, raw, whole
from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import ConfigError, Fault, InfraFault, SandboxRefused, SandboxUnavailable
from toolroll.http import pool as pool_module
from toolroll.sandbox import protocol
from toolroll.sandbox.client import SandboxClient, run_code
from toolroll.sandbox.execution import Execution, ExecutionOutcome, Notebook

pytestmark = pytest.mark.virtual_time
SLACK = 0.15
"""Tolerance after the deadline for a noisy machine, in seconds."""
SANDBOX_ERROR = {"status": "SandboxError", "message": "no cgroup left"}


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def run_against(*script: Behaviour, seconds: float = 5.0, **options: Any) -> tuple[Execution, FaultServer]:
    async with FaultServer(script) as server, SandboxClient(server.url) as client:
        return await client.run("print(1 + 1)", deadline=soon(seconds), **options), server


async def unavailable(call: Awaitable[Any], within: float) -> str:
    """Return the message of the SandboxUnavailable that the call raises within the given time."""
    began = time.monotonic()
    with pytest.raises(SandboxUnavailable) as caught:
        await call
    assert time.monotonic() - began < within + SLACK
    return str(caught.value)


@pytest.fixture
async def black_hole() -> AsyncIterator[str]:
    """URL whose server neither accepts nor refuses connections: its backlog is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
    await asyncio.sleep(0.05)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for one in (listener, *fillers):
        one.close()


# Results of programs


async def test_successful_program() -> None:
    execution, server = await run_against(answer(), stdin="3", files={"data/in.bin": b"\x00\xff"})
    assert (execution.outcome, execution.fault, execution.stdout) == (ExecutionOutcome.OK, None, "2\n")
    assert (execution.return_code, execution.execution_time) == (0, 0.01)
    assert (execution.endpoint, execution.attempts) == (server.url, 1)
    assert (execution.queue_time, execution.session_is_new) == (None, None), "SandboxFusion does not report them"
    assert execution.run_result is not None
    assert execution.run_result.stdout == "2\n"


COMPILED = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
FAULTS: list[tuple[dict[str, Any], ExecutionOutcome]] = [
    (program(return_code=1, stderr="NameError"), ExecutionOutcome.FAILED),
    (program(return_code=-11), ExecutionOutcome.FAILED),
    (program(status="TimeLimitExceeded", return_code=None), ExecutionOutcome.TIMEOUT),
    (program(return_code=-9, memory_exceeded=True), ExecutionOutcome.OUT_OF_MEMORY),
    ({"status": "Failed", "compile_result": {**COMPILED, "return_code": 1}}, ExecutionOutcome.COMPILE_FAILED),
    ({"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}}, ExecutionOutcome.COMPILE_TIMEOUT),
    ({**program(return_code=2), "compile_result": COMPILED}, ExecutionOutcome.FAILED),
    ({"status": "Failed", "message": "", "run_result": None}, ExecutionOutcome.FAILED),
]


@pytest.mark.parametrize(("body", "outcome"), FAULTS)
async def test_failure_of_program_is_policy_fault_and_not_retried(body: Any, outcome: ExecutionOutcome) -> None:
    execution, server = await run_against(answer(body=body))
    assert (execution.outcome, execution.fault) == (outcome, Fault.POLICY)
    assert len(server.requests) == execution.attempts == 1


async def test_success_without_run_result() -> None:
    execution, _ = await run_against(answer(body={"status": "Success", "message": "", "run_result": None}))
    assert (execution.outcome, execution.stdout, execution.return_code) == (ExecutionOutcome.OK, "", None)


async def test_fields_that_toolroll_adds() -> None:
    body = {
        **program(stdout_truncated=True, cpu_time=0.2),
        "status": "Success",
        "queue_time": 0.5,
        "files": {"a": "AP8="},
    }
    execution, _ = await run_against(answer(body={**body, "session_is_new": True}), session_id="s", fetch_files=["a"])
    assert execution.files == {"a": b"\x00\xff"}
    assert (execution.stdout_truncated, execution.stderr_truncated) == (True, False)
    assert (execution.queue_time, execution.session_is_new) == (0.5, True)


async def test_compiler_output_if_program_did_not_start() -> None:
    compiled = {**COMPILED, "return_code": 1, "stderr": "expected ';'"}
    execution, _ = await run_against(answer(body={"status": "Failed", "compile_result": compiled}), language="cpp")
    assert (execution.stderr, execution.return_code) == ("expected ';'", 1)


async def test_lone_surrogate_in_response_is_replaced() -> None:
    body = json.dumps(program()).replace("2\\n", "\\ud800").encode()
    assert (await run_against(answer(body=body)))[0].stdout == "�"


# Jupyter, ping, languages


CELL = {"stdout": "1\n", "stderr": "", "display": [], "error": []}
RAISED = {**CELL, "error": [{"ename": "NameError", "evalue": "x", "traceback": []}]}
DRIVER = SUCCESS["run_result"]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({"status": "Success", "cells": [CELL, CELL], "driver": DRIVER}, ExecutionOutcome.OK),
        ({"status": "Success", "cells": [CELL, RAISED], "driver": DRIVER}, ExecutionOutcome.FAILED),
        ({"status": "Failed", "cells": [], "driver": {**DRIVER, "return_code": 1}}, ExecutionOutcome.FAILED),  # type: ignore[dict-item]
        ({"status": "Failed", "driver": {"status": "TimeLimitExceeded"}}, ExecutionOutcome.TIMEOUT),
        (
            {"status": "Failed", "driver": {"status": "Finished", "memory_exceeded": True}},
            ExecutionOutcome.OUT_OF_MEMORY,
        ),
    ],
)
async def test_notebook(body: Any, outcome: ExecutionOutcome) -> None:
    async with FaultServer([answer(body=body)]) as server, SandboxClient(server.url) as client:
        notebook = await client.run_jupyter(["print(1)", "x\ud800"], files={"a": b"b"}, cell_timeout=3)
    assert isinstance(notebook, Notebook)
    assert notebook.outcome is outcome
    assert len(notebook.cells) == len(body.get("cells", []))
    sent = RunJupyterRequest.parse_obj(server.requests[0])
    assert (sent.cells, sent.cell_timeout, sent.files) == (["print(1)", "x�"], 3, {"a": "Yg=="})


async def test_ping_of_toolroll_and_sandbox_fusion() -> None:
    ours = {"ping": "pong", "version": "1", "tier": "A", "running": 1, "waiting": 2, "capacity": 3, "time": 4.0}
    async with FaultServer([answer(body="pong"), answer(body=ours)]) as server, SandboxClient(server.url) as client:
        assert await client.ping() == protocol.Ping()
        assert (await client.ping()).tier == "A"
    assert [head.split("\r\n")[0] for head in server.heads] == ["GET /v1/ping HTTP/1.1"] * 2


async def test_languages() -> None:
    known = {"python": {"available": True, "version": "3.11"}, "lean": {"available": False, "missing": "elan"}}
    missing = answer(404, {"detail": "Not Found"})
    async with FaultServer([answer(body=known), missing]) as server, SandboxClient(server.url) as client:
        assert (await client.languages())["lean"].missing == "elan"
        with pytest.raises(SandboxRefused, match="404: Not Found"):
            await client.languages()


# Failures of the sandbox


async def test_closed_port() -> None:
    url = closed_port()
    async with SandboxClient(url) as client:
        message = await unavailable(client.run("1", deadline=soon(0.6)), within=0.6)
    assert f"{url}: can't be reached: Connection refused" in message
    assert "attempts: " in message


async def test_black_hole(black_hole: str) -> None:
    async with SandboxClient(black_hole) as client:
        message = await unavailable(client.run("1", deadline=soon(0.5)), within=0.5)
    assert black_hole in message


HALF = whole()[:-20]


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(hang(), id="never answers"),
        pytest.param(hang(HALF), id="half a body, then nothing"),
        pytest.param(hang(HALF[:30]), id="half a head, then nothing"),
        pytest.param(raw(b""), id="closes at once"),
        pytest.param(raw(HALF), id="half a body, then closes"),
        pytest.param(raw(HALF[:30]), id="half a head, then closes"),
        pytest.param(drip(whole(), 0.02), id="drips"),
        pytest.param(drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.001), id="endless 100 Continue"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n\r\n" + whole()[60:90]), id="half a body of unknown length"),
    ],
)
@pytest.mark.parametrize("big", [False, True])
async def test_incomplete_response_ends_at_deadline(behaviour: Behaviour, big: bool) -> None:
    async with FaultServer([behaviour]) as server, SandboxClient(server.url) as client:
        files = {"big": bytes(2**22)} if big else {}
        message = await unavailable(client.run("1", files=files, deadline=soon(0.3)), within=0.3)
        assert server.url in message
        await server.all_closed()


async def test_server_that_does_not_read() -> None:
    async with FaultServer(reads=False) as server, SandboxClient(server.url) as client:
        await unavailable(client.run("1", files={"big": bytes(2**24)}, deadline=soon(0.5)), within=0.5)
        await asyncio.sleep(0.01)
        assert [task for task in asyncio.all_tasks() if "write_bytes" in repr(task)] == []


async def test_response_beyond_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RESPONSE_LIMIT_BYTES", 10_000)
    async with FaultServer([answer(body=b" " * 10_001)]) as server, SandboxClient(server.url) as client:
        message = await unavailable(client.run("1"), within=1)
    assert "longer than 10000 bytes" in message
    assert len(server.requests) == 1


async def test_compressed_response_is_not_decompressed() -> None:
    behaviour = answer(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    async with FaultServer([behaviour]) as server, SandboxClient(server.url) as client:
        await unavailable(client.run("1"), within=1)
    assert "accept-encoding: identity" in server.heads[0].lower()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (answer(500, b"Internal Server Error"), "HTTP 500: Internal Server Error"),
        (answer(302, b"", {"Location": "/elsewhere"}), "HTTP 302"),
        (answer(201), "HTTP 201"),
        (answer(body=b"<html>"), "invalid response"),
        (answer(body=b'{"status": "Succ'), "invalid response"),
        (answer(body={"status": "Splendid"}), "status"),
        (answer(body={**SUCCESS, "files": {"a": "not base64!"}}), "invalid response"),
        (answer(body=b"[" * 100_000), "invalid response"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "invalid response"),
    ],
)
async def test_invalid_response_is_not_retried(behaviour: Behaviour, message: str) -> None:
    async with FaultServer([behaviour]) as server, SandboxClient(server.url) as client:
        assert message in await unavailable(client.run("1"), within=1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (422, {"detail": [{"loc": ["body", "language"], "msg": "Input should be 'python'"}]}, "language: Input should"),
        (400, {"detail": "too many files"}, "400: too many files"),
        (401, {"detail": "no token"}, "no token. Check the token"),
        (413, b"too large", "413: too large"),
        (404, {"detail": {"odd": 1}}, "404: "),
    ],
)
async def test_rejection_is_final(status: int, body: Any, message: str) -> None:
    async with FaultServer([answer(status, body)]) as server, SandboxClient(server.url, token="t") as client:
        with pytest.raises(SandboxRefused, match=message) as caught:
            await client.run("1", "klingon")
    assert isinstance(caught.value, InfraFault)
    assert len(server.requests) == 1
    assert "authorization: bearer t\r\n" in server.heads[0].lower()


@pytest.mark.parametrize(
    "body",
    [
        SANDBOX_ERROR,
        {**SUCCESS, "status": "Failed", "run_result": {"status": "Error", "stderr": "no cgroup left"}},
    ],
)
async def test_sandbox_error_is_retried_and_then_raised(body: Any) -> None:
    execution, server = await run_against(answer(body=body), answer())
    assert (execution.outcome, execution.attempts) == (ExecutionOutcome.OK, 2)
    keys = {request["idempotency_key"] for request in server.requests}
    assert len(keys) == 1, "all attempts have the same idempotency key"

    async with FaultServer([answer(body=body)]) as server, SandboxClient(server.url) as client:
        message = await unavailable(client.run("1"), within=5)
    assert "no cgroup left (attempts: 3," in message
    assert len(server.requests) == 3, "a program that crashes servers reaches only a few"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_busy_or_unavailable_service_is_retried(status: int) -> None:
    execution, _ = await run_against(answer(status), answer(status), answer())
    assert (execution.outcome, execution.attempts) == (ExecutionOutcome.OK, 3)


async def test_each_call_has_its_own_idempotency_key() -> None:
    async with FaultServer() as server, SandboxClient(server.url) as client:
        await client.run("1")
        await client.run("1")
    first, second = server.requests
    assert first["idempotency_key"] != second["idempotency_key"]


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after(form: str) -> None:
    began = time.monotonic()
    asked = "0.4" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    execution, _ = await run_against(answer(429, headers={"Retry-After": asked}), answer())
    assert execution.attempts == 2
    low, high = (0.4, 0.6) if form == "seconds" else (0.9, 2.2)
    assert low < time.monotonic() - began < high + SLACK


@pytest.mark.parametrize(
    "asked",
    ["60", "9" * 400, "inf", pytest.param(formatdate(time.time() + 3600, usegmt=True), id="a date")],
)
async def test_retry_after_beyond_deadline_ends_call(asked: str) -> None:
    full = answer(429, {"detail": "full"}, {"Retry-After": asked})
    async with FaultServer([full]) as server, SandboxClient(server.url) as client:
        message = await unavailable(client.run("1", deadline=soon(5)), within=0.2)
    assert "HTTP 429: full; its Retry-After of" in message
    assert " s is beyond the deadline (attempts: 1, in 0.0 s)" in message


@pytest.mark.parametrize("asked", ["", "soon", "-5", "nan", "0", "Wed, 99 Foo 2026 99:99:99 GMT"])
async def test_invalid_retry_after_is_ignored(asked: str) -> None:
    execution, _ = await run_against(answer(429, headers={"Retry-After": asked}), answer(), seconds=1)
    assert execution.attempts == 2


async def test_idle_connection_closed_by_server_is_retried() -> None:
    async with FaultServer([answer(), raw(b""), answer()]) as server, SandboxClient(server.url) as client:
        await client.run("1")
        assert (await client.run("1")).attempts == 2


# Deadlines


async def test_deadline_is_sent_as_unix_time() -> None:
    _, server = await run_against(answer(), seconds=7)
    assert deadline_sent_to(server) == pytest.approx(time.time() + 7, abs=0.5)
    async with FaultServer() as server, SandboxClient(server.url) as client:
        await client.run("1", compile_timeout=100, run_timeout=1000)
    timeouts_s = protocol.max_wall_time(100) + protocol.max_wall_time(1000)
    assert 0 < deadline_sent_to(server) - time.time() - timeouts_s < 100, "for the queue and for the transfer"


def deadline_sent_to(server: FaultServer) -> float:
    return float(re.findall(r"X-Toolroll-Deadline: (\S+)", server.heads[0])[0])


@pytest.mark.parametrize("seconds", [0.0, -10.0, float("nan")])
async def test_expired_call_is_not_sent(seconds: float) -> None:
    async with FaultServer() as server, SandboxClient(server.url) as client:
        assert "deadline passed" in await unavailable(client.run("1", deadline=soon(seconds)), within=0)
    assert server.requests == []


async def test_rejection_at_deadline_is_not_retried() -> None:
    late = after(0.3, answer(504, {"detail": "the deadline has passed"}))
    async with FaultServer([late]) as server, SandboxClient(server.url) as client:
        await unavailable(client.run("1", deadline=soon(0.3)), within=0.3)
    assert len(server.requests) == 1


# Several endpoints


async def test_dead_endpoint_is_avoided() -> None:
    async with FaultServer() as server, SandboxClient([closed_port(), server.url]) as client:
        executions = [await client.run("1", deadline=soon(5)) for _ in range(20)]
    assert {execution.endpoint for execution in executions} == {server.url}
    assert sum(execution.attempts for execution in executions) <= 21, "avoided after the first failure"


async def test_black_hole_leaves_time_for_other_endpoint(black_hole: str) -> None:
    async with FaultServer() as server, SandboxClient([black_hole, server.url]) as client:
        executions = [await client.run("1", deadline=soon(1)) for _ in range(8)]
    assert {execution.endpoint for execution in executions} == {server.url}


async def test_full_endpoint_is_avoided_and_other_used_at_once() -> None:
    full = answer(429, headers={"Retry-After": "3"})
    async with FaultServer([full]) as busy, FaultServer() as free, SandboxClient([busy.url, free.url]) as client:
        began = time.monotonic()
        for _ in range(20):
            assert (await client.run("1")).endpoint == free.url
        assert time.monotonic() - began < 2
    assert len(busy.requests) <= 1


async def test_calls_go_to_least_loaded_endpoint() -> None:
    slow, quick = FaultServer([hang()]), FaultServer([after(0.02, answer())])
    async with slow, quick, SandboxClient([slow.url, quick.url]) as client:
        tasks = [asyncio.create_task(client.run("1")) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert (slow.in_flight, len(quick.requests)) == (10, 10)
        for _ in range(30):
            assert (await client.run("1")).endpoint == quick.url
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_equal_endpoints_share_calls() -> None:
    async with FaultServer() as one, FaultServer() as other, SandboxClient([one.url, other.url]) as client:
        for _ in range(60):
            await client.run("1")
    assert min(len(one.requests), len(other.requests)) > 5


AFFINITY = """
import asyncio, sys
from toolroll.sandbox.client import SandboxClient

async def main():
    async with SandboxClient(sys.argv[1:]) as client:
        for name in "abcdefgh":
            print(name, (await client.run("1", session_id=name)).endpoint)

asyncio.run(main())
"""


@pytest.mark.process
async def test_all_processes_find_session_at_same_endpoint() -> None:
    async with FaultServer() as one, FaultServer() as two, FaultServer() as three:
        urls = [one.url, two.url, three.url]
        async with SandboxClient(urls) as client:
            here = {name: (await client.run("1", session_id=name)).endpoint for name in "abcdefgh" * 2}
        random.shuffle(urls)
        done = await asyncio.create_subprocess_exec(sys.executable, "-c", AFFINITY, *urls, stdout=subprocess.PIPE)
        there, _ = await done.communicate()
        assert dict(line.split() for line in there.decode().splitlines()) == here
        # Without one endpoint, only the sessions of that endpoint move.
        async with SandboxClient(urls[:2]) as client:
            for name, url in here.items():
                if url in urls[:2]:
                    assert (await client.run("1", session_id=name)).endpoint == url


async def test_sessions_are_spread_over_endpoints() -> None:
    async with FaultServer() as one, FaultServer() as other, SandboxClient([one.url, other.url]) as client:
        where = Counter([(await client.run("1", session_id=f"s{number}")).endpoint for number in range(40)])
    assert len(where) == 2


async def test_session_is_retried_at_its_endpoint() -> None:
    busy = [answer(503), answer(429), answer()]
    async with FaultServer(busy) as one, FaultServer(busy) as other, SandboxClient([one.url, other.url]) as client:
        assert (await client.run("1", session_id="s")).attempts == 3
    assert sorted([len(one.requests), len(other.requests)]) == [0, 3]


@pytest.mark.parametrize("endpoints", [[], "", "sandbox:8080", "ftp://sandbox", "http://", ["http://ok", "http://x:y"]])
def test_invalid_endpoints(endpoints: Any) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8080"):
        SandboxClient(endpoints)


def test_endpoints_are_normalized() -> None:
    assert SandboxClient(["http://a:1/", "http://a:1/run_code", "http://b/base/"]).endpoints == (
        "http://a:1",
        "http://b/base",
    )


# Connections, event loops, processes


async def test_connections_are_reused_and_closed() -> None:
    async with FaultServer() as server:
        async with SandboxClient(server.url) as client:
            for _ in range(10):
                await client.run("1")
            assert (server.connections, server.open) == (1, 1)
        await server.all_closed()
        await client.run("1")  # opens new ones
        await client.close()
        await client.close()


async def test_connection_limit() -> None:
    async with FaultServer([after(0.01, answer())]) as server, SandboxClient(server.url, max_connections=3) as client:
        await asyncio.gather(*[client.run("1") for _ in range(12)])
        assert (server.connections, server.max_in_flight) == (3, 3)


@pytest.mark.parametrize(
    ("behaviour", "idle"), [(hang(), 0), (hang(HALF), 0), (answer(429, headers={"Retry-After": "3"}), 1)]
)
async def test_cancellation_closes_connection_and_leaves_no_task(behaviour: Behaviour, idle: int) -> None:
    async with FaultServer([behaviour]) as server, SandboxClient(server.url) as client:
        before = asyncio.all_tasks()
        call = asyncio.create_task(client.run("1"))
        while not server.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.05)
        assert (server.in_flight, server.open) == (0, idle)
        assert {task for task in asyncio.all_tasks() - before if "FaultServer" not in repr(task)} == set()
        server.script = [answer()]
        assert (await client.run("1")).outcome is ExecutionOutcome.OK


async def test_call_is_resent_if_client_is_closed() -> None:
    async with FaultServer([hang(), answer()]) as server, SandboxClient(server.url) as client:
        call = asyncio.create_task(client.run("1"))
        while not server.requests:
            await asyncio.sleep(0.01)
        await client.close()
        assert (await call).attempts == 2


SERVER = """
import asyncio, sys
sys.path[:0] = [{tests!r}]
from sandbox.fault_server import FaultServer

async def main():
    async with FaultServer() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def elsewhere(root: Any) -> Any:
    """URL of a server in another process, for tests without an event loop."""
    code = SERVER.format(tests=str(root / "tests"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.mark.sandbox
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_client_in_several_event_loops(elsewhere: str, new_loop: Any) -> None:
    client = SandboxClient(elsewhere)

    async def calls() -> list[Execution]:
        return await asyncio.gather(*[client.run("1") for _ in range(3)])

    for _ in range(3):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert {execution.stdout for execution in runner.run(calls())} == {"2\n"}
    assert len(client.http._pools) == 1, "pools of closed loops are dropped"


@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_dropped_client_closes_its_connections(in_a_cycle: bool) -> None:
    async with FaultServer() as server:
        client = SandboxClient(server.url)
        await client.run("1")
        assert server.open == 1
        if in_a_cycle:  # a reference cycle
            client.itself = client  # type: ignore[attr-defined]
        del client
        gc.collect()
        await server.all_closed()
        assert server.open == 0


async def test_client_can_be_pickled() -> None:
    async with FaultServer() as server, SandboxClient(server.url, token="t", max_connections=7) as client:
        await client.run("1")
        async with pickle.loads(pickle.dumps(client)) as copy:
            execution = await copy.run("1")
        assert server.connections == 2
        assert "authorization: bearer t\r\n" in server.heads[1].lower()
    assert pickle.loads(pickle.dumps(execution)) == execution


@pytest.mark.sandbox
def test_run_code_without_event_loop(elsewhere: str) -> None:
    assert run_code("print(1 + 1)", endpoint=elsewhere, run_timeout=3).stdout == "2\n"


async def test_run_code_in_event_loop_names_alternative() -> None:
    with pytest.raises(RuntimeError, match=r"await client\.run"):
        run_code("print(1 + 1)")


# Requests


TEXT = st.text(st.characters(codec=None), max_size=20)


@given(
    code=TEXT,
    stdin=st.none() | TEXT,
    name=TEXT,
    content=st.binary(max_size=20),
    memory=st.none() | st.integers(1, 9999),
)
@settings(max_examples=scaled(40))
def test_sandbox_fusion_accepts_requests(code: str, stdin: str | None, name: str, content: bytes, memory: Any) -> None:
    async def main() -> dict[str, Any]:
        async with FaultServer() as server, SandboxClient(server.url) as client:
            await client.run(
                code,
                "cpp",
                stdin=stdin,
                files={name: content},
                fetch_files=[name],
                memory_limit_mb=memory,
                run_timeout=3,
            )
        sent = server.requests[0]
        assert isinstance(sent, dict)
        return sent

    sent = asyncio.run(main())
    assert None not in sent.values()
    theirs, ours = RunCodeRequest.parse_obj(sent), protocol.RunCodeRequest.model_validate(sent)
    assert theirs.code == ours.code == replace_lone_surrogates(code)
    assert theirs.stdin == (None if stdin is None else replace_lone_surrogates(stdin))
    assert list(theirs.files) == theirs.fetch_files == [replace_lone_surrogates(name)]
    assert (theirs.run_timeout, ours.memory_limit_MB) == (3, -1 if memory is None else memory)


async def test_lone_surrogates_in_request_are_replaced() -> None:
    async with FaultServer() as server, SandboxClient(server.url) as client:
        await client.run("print('\ud800')", stdin="\udfff", session_id="\ud800", files={"\ud83d": b""})
    assert (server.requests[0]["code"], server.requests[0]["stdin"]) == ("print('�')", "�")


# Arbitrary responses and load


LIKELY = st.sampled_from(
    ["Success", "Failed", "SandboxError", "Finished", "Error", "TimeLimitExceeded", 0, 1, "AA==", None]
)
FIELDS = st.sampled_from([*SUCCESS, *SUCCESS["run_result"], "queue_time", "detail", "a"])  # type: ignore[misc]
ANSWERS = st.recursive(LIKELY | JSON, lambda inner: st.dictionaries(FIELDS, inner, max_size=7), max_leaves=12)
BODIES = st.binary(max_size=60) | st.builds(lambda value: json.dumps(value).encode(), ANSWERS)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Retry-After", "Content-Encoding", "Transfer-Encoding", "Content-Length", "Location", "Connection"]
    ),
    st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=12)
    | st.sampled_from(["0", "1", "gzip", "chunked", "close", "br"]),
    max_size=3,
)
REPLIES = (
    st.builds(whole, st.integers(100, 699) | st.sampled_from([200, 200, 429, 503]), BODIES, HEADERS)
    | st.binary(max_size=80)
    | st.builds(lambda body: whole(200, body), BODIES)
)


@given(st.lists(st.tuples(REPLIES, st.booleans()), min_size=8, max_size=8))
@settings(max_examples=scaled(25))
def test_arbitrary_response_ends_in_time(replies: list[tuple[bytes, bool]]) -> None:
    async def one(reply: bytes, close: bool) -> None:
        async with FaultServer([raw(reply) if close else hang(reply)]) as server, SandboxClient(server.url) as client:
            with suppress(SandboxUnavailable, SandboxRefused):
                assert isinstance(await client.run("1", deadline=soon(0.2)), Execution)

    async def main() -> None:
        began = time.monotonic()
        await asyncio.gather(*[one(*reply) for reply in replies])
        assert time.monotonic() - began < 0.2 + 2 * SLACK
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(main())


async def test_two_thousand_concurrent_calls() -> None:
    async with FaultServer() as server, SandboxClient(server.url) as client:
        began = time.monotonic()
        executions = await asyncio.gather(*[client.run("print(1 + 1)") for _ in range(2000)])
        assert time.monotonic() - began < 10
        assert {execution.outcome for execution in executions} == {ExecutionOutcome.OK}
        assert server.connections <= 512
