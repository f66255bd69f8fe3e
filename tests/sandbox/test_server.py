"""Behaviour of the server over HTTP."""

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import sandbox_fusion
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import JSON, scaled

from sandbox.serving import Serving, serving, wait_until
from toolroll.errors import SandboxRefused, SandboxUnavailable
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import Execution
from toolroll.sandbox.protocol import RunCodeRequest, RunJupyterRequest, RunStatus

pytestmark = pytest.mark.sandbox


async def post(url: str, body: Any, path: str = "/run_code", **headers: str) -> tuple[int, Any, dict[str, str]]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with aiohttp.ClientSession() as session, session.post(url + path, data=data, headers=headers) as response:
        return response.status, await response.json(), dict(response.headers)


def program(code: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "language": "python", **more}


# --- protocol


def test_sandbox_fusion_client_works_unchanged(server: str) -> None:
    request = sandbox_fusion.RunCodeRequest(
        code="print(input(), open('a/b.txt').read()); open('c', 'w').write('new')",
        language="python",
        stdin="word",
        files={"a/b.txt": base64.b64encode(b"content").decode()},
        fetch_files=["c", "missing"],
    )
    done = sandbox_fusion.run_code(request, endpoint=server)
    assert done.status is sandbox_fusion.RunStatus.Success
    assert done.run_result.stdout == "word content\n"
    assert done.run_result.return_code == 0
    assert done.files == {"c": base64.b64encode(b"new").decode()}


def test_sandbox_fusion_client_sees_failures(server: str) -> None:
    def run(**more: Any) -> Any:
        return sandbox_fusion.run_code(sandbox_fusion.RunCodeRequest(language="python", **more), endpoint=server)

    failed = run(code="raise ValueError('odd')")
    assert (failed.status, failed.run_result.return_code) == (sandbox_fusion.RunStatus.Failed, 1)
    assert "ValueError: odd" in failed.run_result.stderr
    slow = run(code="import time; time.sleep(9)", run_timeout=0.2)
    assert (slow.status, slow.run_result.return_code) == (sandbox_fusion.RunStatus.Failed, None)
    assert slow.run_result.status is sandbox_fusion.CommandRunStatus.TimeLimitExceeded
    summary = sandbox_fusion.summary_run_code_result(slow, sandbox_fusion.SummaryMapping(RunTimeout="slow"))
    assert summary == "slow"


def test_sandbox_fusion_client_runs_notebooks(server: str) -> None:
    request = sandbox_fusion.RunJupyterRequest(
        cells=["a = 123", "a", "print(a)", "import sys; sys.stderr.write('e')", "raise RuntimeError('odd')", "a + 1"],
        fetch_files=["x"],
    )
    done = sandbox_fusion.run_jupyter(request, endpoint=server)
    assert done.status is sandbox_fusion.RunStatus.Success
    assert [cell.stdout for cell in done.cells] == ["", "", "123\n", "", "", ""]
    assert done.cells[1].display[0]["text/plain"] == "123"
    assert done.cells[3].stderr == "e"
    assert (done.cells[4].error[0]["ename"], done.cells[4].error[0]["evalue"]) == ("RuntimeError", "odd")
    assert done.cells[5].display[0]["text/plain"] == "124"


async def test_ping_and_languages_describe_server(client: SandboxClient, sandbox: Serving) -> None:
    ping = await client.ping()
    assert ping.tier == sandbox.tier
    assert abs(ping.time - time.time()) < 5
    languages = await client.languages()
    assert languages["python"].available
    assert languages["python"].version
    assert languages["cuda"].missing


async def test_metrics_count_executions(server: str, client: SandboxClient) -> None:
    async def value(line: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{server}/metrics") as response:
            found = [one for one in (await response.text()).splitlines() if one.startswith(line)]
            return float(found[0].split()[-1]) if found else 0.0

    name = 'toolroll_sandbox_executions_total{language="python",outcome="Failed"}'
    before = await value(name)
    await client.run("1 / 0")
    assert await value(name) == before + 1
    assert await value("toolroll_sandbox_running ") == 0


# --- invalid requests


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body"),
        (b"{", "json"),
        (b"[]", "object"),
        ({"language": "python"}, "code"),
        ({"code": 1, "language": "python"}, "code"),
        (program("", run_timeout=0), "greater than 0"),
        (program("", run_timeout=-1), "greater than 0"),
        (program("", run_timeout=1e9), "--max-timeout"),
        (b'{"code": "", "language": "python", "run_timeout": NaN}', "run_timeout"),
        (b'{"code": "", "language": "python", "run_timeout": Infinity}', "run_timeout"),
        (program("", memory_limit_MB=10**9), "--memory-mb"),
        ({"code": "", "language": "cobol"}, "language"),
        ({"code": "", "language": "cuda"}, "Language 'cuda' is not available"),
        (program("", files={"/etc/passwd": ""}), "can't be written"),
        (program("", files={"/tmp/work": ""}), "can't be written"),
        (program("", files={"a": "", "a/b": ""}), "can't be written"),
        (program("", files={"a\0b": ""}), "can't be written"),
        (program("", files={"x" * 300: ""}), "can't be written"),
        (program("", files={"a": "not base64!"}), "base64"),
        (program("", session_id="a b"), "session_id"),
        ({"code": "", "language": "bash", "session_id": "a"}, "session"),
    ],
)
async def test_invalid_request_is_rejected_with_reason(server: str, body: Any, message: str) -> None:
    status, answer, _ = await post(server, body)
    assert status == 422
    assert message.lower() in json.dumps(answer["detail"]).lower()


async def test_too_large_request_is_rejected(server: str) -> None:
    status, answer, _ = await post(server, program("x" * (70 << 20)))
    assert (status, "64 MB" in answer["detail"]) == (413, True)


async def test_expired_request_is_not_run(server: str, tmp_path: Path) -> None:
    status, answer, _ = await post(server, program("print(1)", deadline=time.time() - 1))
    assert status == 504
    assert "deadline" in answer["detail"]


async def test_token_is_required_if_set() -> None:
    with serving(environment={"TOOLROLL_SANDBOX_TOKEN": "s3cret"}) as running:
        assert (await post(running.url, program("print(1)")))[0] == 401
        assert (await post(running.url, program("print(1)"), Authorization="Bearer wrong"))[0] == 401
        with pytest.raises(SandboxRefused, match="token"):
            async with SandboxClient(running.url) as client:
                await client.run("print(1)")
        async with SandboxClient(running.url, token="s3cret") as client:
            assert (await client.run("import os; print(os.environ.get('TOOLROLL_SANDBOX_TOKEN'))")).stdout == "None\n"


# --- arbitrary bytes

BODIES = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys([*RunCodeRequest.model_fields, *RunJupyterRequest.model_fields], JSON),
    ).map(lambda value: json.dumps({"code": "", "language": "python", "cells": [], **value}).encode()),
)


@settings(max_examples=scaled(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=BODIES, path=st.sampled_from(["/run_code", "/run_jupyter", "/v1/ping", "/v1/languages", "/metrics", "/no"]))
def test_no_request_makes_server_fail(server: str, body: bytes, path: str) -> None:
    async def send() -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
            session.post(server + path, data=body) as response,
        ):
            return response.status, await response.read()

    status, answer = asyncio.run(send())
    assert status in (200, 404, 405, 413, 422, 429, 504)
    if status == 200:
        assert json.loads(answer)["status"] != RunStatus.SANDBOX_ERROR


# --- load


def namespaces(processes: Iterable[psutil.Process]) -> Iterator[str]:
    """Yield the namespaces of processes."""
    for process in processes:
        for link in Path(f"/proc/{process.pid}/ns").glob("*"):
            with contextlib.suppress(OSError):
                yield os.readlink(link)


class Footprint:
    """Resources that a server uses on its machine."""

    def __init__(self, running: Serving) -> None:
        processes = running.processes()
        self.processes = len(processes)
        self.descriptors = self.memory = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.descriptors += process.num_fds()
                self.memory += process.memory_info().rss
        self.mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
        self.cgroups = len(list(Path("/sys/fs/cgroup").glob(f"*/**/toolroll-{running.process.pid}-*")))
        self.namespaces = len(set(namespaces(processes)))


async def test_overload_is_answered_and_leaves_nothing() -> None:
    with serving("--capacity", "4", "--queue", "246") as running:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send(number: int) -> tuple[int, str, str]:
                code = f"print({number}, 'x' * 2000)"
                async with session.post(f"{running.url}/run_code", json=program(code, run_timeout=60)) as response:
                    answer = await response.json()
                    result = answer.get("run_result") or {}
                    return response.status, result.get("stdout", ""), response.headers.get("Retry-After", "")

            async with SandboxClient(running.url) as client:  # until all zygotes are ready
                await client.run("1", session_id="a")
                while (await client.run("import pandas")).execution_time > 0.2:
                    pass
            await asyncio.gather(*(send(number) for number in range(250)))  # creates cgroups, namespaces, connections
            before = Footprint(running)
            answers = await asyncio.gather(*(send(number) for number in range(1000)))
        ran = [(number, out) for number, (status, out, _) in enumerate(answers) if status == 200]
        assert all(out == f"{number} {'x' * 2000}\n" for number, out in ran)
        rejected = [retry for status, _, retry in answers if status == 429]
        assert len(ran) + len(rejected) == 1000
        assert len(ran) >= 250
        assert all(1 <= int(retry) <= 60 for retry in rejected)

        def is_as_before() -> bool:
            now = Footprint(running)
            return (
                now.processes <= before.processes
                and now.descriptors <= before.descriptors
                and now.mounts <= before.mounts
                and now.cgroups <= before.cgroups
                and now.namespaces <= before.namespaces + 4
                and now.memory < before.memory * 1.1 + (20 << 20)
            )

        assert wait_until(is_as_before), (vars(before), vars(Footprint(running)))


async def test_requests_run_in_order_of_arrival() -> None:
    with serving("--capacity", "1") as running:
        async with SandboxClient(running.url) as client:
            tasks: list[asyncio.Task[Execution]] = []
            while len(tasks) < 15:
                code = "import time\nprint(time.monotonic_ns())\ntime.sleep(0.05)"
                tasks.append(asyncio.create_task(client.run(code)))
                arrived = 0
                while arrived < len(tasks):
                    ping = await client.ping()
                    arrived = ping.running + ping.waiting + sum(task.done() for task in tasks)
            started = [int((await task).stdout) for task in tasks]
            assert started == sorted(started)


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def test_disconnected_client_ends_its_program(sandbox: Serving) -> None:
    marker = f"gone-{os.getpid()}"
    async with SandboxClient(sandbox.url) as client:
        code = f"import subprocess; subprocess.run(['sleep', '47.{os.getpid()}'])\n# {marker}"
        request = asyncio.create_task(client.run(code, run_timeout=50))

        def sleepers() -> list[psutil.Process]:
            return [one for one in sandbox.processes() if f"47.{os.getpid()}" in command_line(one)]

        while not sleepers():
            await asyncio.sleep(0.02)
        request.cancel()
        assert await asyncio.to_thread(wait_until, lambda: not sleepers(), 5)
        async with asyncio.timeout(5):
            while (await client.ping()).running:
                await asyncio.sleep(0.02)


async def test_request_after_a_disconnect_is_served(server: str, client: SandboxClient) -> None:
    for pause in (0.0, 0.001, 0.003, 0.005, 0.01, 0.02, 0.05):
        request = asyncio.create_task(client.run("import time; time.sleep(0.02)"))
        await asyncio.sleep(0.03 + pause)
        request.cancel()
        status, answer, _ = await post(server, program("print(1)"))
        assert (status, answer["status"]) == (200, "Success")


async def test_idempotency_key_runs_once(client: SandboxClient, server: str) -> None:
    body = program("import random; print(random.random())", idempotency_key=f"key-{time.time()}")
    first, second = await asyncio.gather(post(server, body), post(server, body))
    third = await post(server, body)
    assert first[1]["run_result"]["stdout"] == second[1]["run_result"]["stdout"] == third[1]["run_result"]["stdout"]


# --- crashes and shutdown


async def test_killed_zygote_is_replaced_and_requests_retried() -> None:
    with serving("--fronts", "1", "--capacity", "4") as running:
        async with SandboxClient(running.url) as client:
            assert (await client.run("print(1)")).stdout == "1\n"
        children = psutil.Process(running.process.pid).children()
        zygotes = [process for process in children if "zygote" in " ".join(process.cmdline())]
        assert len(zygotes) == 3
        slow = [
            asyncio.create_task(post(running.url, program("import time; time.sleep(60)", run_timeout=60)))
            for _ in range(4)
        ]
        await asyncio.sleep(0.5)
        for zygote in zygotes:
            zygote.kill()
        killed = time.monotonic()
        for status, answer, _ in await asyncio.gather(*slow):
            assert (status, answer["status"]) == (200, "SandboxError")
            assert "died" in answer["message"]
        status, answer, _ = await post(running.url, program("print(2)"))
        assert (status, answer["run_result"]["stdout"]) == (200, "2\n")
        assert time.monotonic() - killed < 30, "the programs ran to their end"
        # The client retries.
        async with SandboxClient(running.url) as client:
            request = asyncio.create_task(client.run("import time; time.sleep(1); print(3)"))
            await asyncio.sleep(0.3)
            for one in psutil.Process(running.process.pid).children():
                one.kill()
            done = await request
            assert (done.stdout, done.attempts) == ("3\n", 2)


async def wait_for_ping(url: str, text: str) -> None:
    """Wait until the response to a ping contains a text."""
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/v1/ping") as response:
                if text in await response.text():
                    return
            await asyncio.sleep(0.05)


async def test_sigterm_drains_and_rejects_new_requests() -> None:
    with serving("--capacity", "2") as running:
        slow = asyncio.create_task(post(running.url, program("import time; time.sleep(8); print('done')")))
        await wait_for_ping(running.url, '"running": 1')
        running.process.send_signal(signal.SIGTERM)
        await wait_for_ping(running.url, "shutting down")
        assert (await post(running.url, program("print(1)")))[0] == 503
        assert (await slow)[1]["run_result"]["stdout"] == "done\n"
        assert await asyncio.to_thread(running.process.wait, 10) == 0


@pytest.mark.parametrize("fronts", ["1", "2"])
async def test_sigterm_waits_for_requests_without_ticket(fronts: str) -> None:
    """The second request of a session waits for the first one, before admission."""
    with serving("--capacity", "2", "--fronts", fronts) as running:
        await post(running.url, program("x = 0", session_id="s"))
        code = "import time; time.sleep(8 if x == 0 else 0); x += 1; print(x)"
        first, second = (asyncio.create_task(post(running.url, program(code, session_id="s"))) for _ in range(2))
        await wait_for_ping(running.url, '"running": 1')
        await asyncio.sleep(2)  # until the second request has arrived, which a ping does not show
        running.process.send_signal(signal.SIGTERM)
        assert {(await one)[1]["run_result"]["stdout"] for one in (first, second)} == {"1\n", "2\n"}
        assert await asyncio.to_thread(running.process.wait, 10) == 0


async def test_killed_server_leaves_no_processes() -> None:
    with serving("--capacity", "2") as running:
        slow = [
            asyncio.create_task(post(running.url, program("import time; time.sleep(60)", run_timeout=90)))
            for _ in range(2)
        ]
        await asyncio.sleep(0.7)
        processes = running.processes()
        assert len(processes) > 5
        running.process.kill()
        await asyncio.gather(*slow, return_exceptions=True)
        assert await asyncio.to_thread(
            wait_until, lambda: not any(process.is_running() for process in processes[1:]), 20
        )


async def test_unreachable_server_raises_sandbox_unavailable() -> None:
    async with SandboxClient("http://127.0.0.1:9") as client:
        with pytest.raises(SandboxUnavailable):
            await client.run("print(1)", deadline=time.monotonic() + 0.5)
