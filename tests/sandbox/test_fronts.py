"""A server with several fronts behaves as one server, even if a front dies."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from sandbox.serving import Serving, name_process, serving, wait_until
from toolroll.sandbox.client import SandboxClient

pytestmark = pytest.mark.sandbox
FRONTS = 3


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Serving]:
    with serving("--fronts", str(FRONTS), "--capacity", "4", "--sessions", "3") as running:
        yield running


@pytest.fixture
async def client(sandbox: Serving) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(sandbox.url) as client:
        yield client


async def post(url: str, code: str, *, language: str = "python", lease: str = "", **fields: Any) -> dict[str, Any]:
    """Run a program over a new connection. Consecutive connections are those of different fronts."""
    headers = {"X-Toolroll-Lease": lease} if lease else {}
    body = {"code": code, "language": language, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/run_code", json=body, headers=headers) as response,
    ):
        return {"http_status": response.status, **await response.json()}


async def get(url: str, path: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return await response.text()


async def metric(url: str, name: str) -> float:
    lines = [line for line in (await get(url, "/metrics")).splitlines() if line.startswith(f"toolroll_sandbox_{name}")]
    return sum(float(line.split()[-1]) for line in lines)


async def test_capacity_and_queue_are_shared(sandbox: Serving) -> None:
    programs = [asyncio.create_task(post(sandbox.url, "import time; time.sleep(2)")) for _ in range(6)]
    pings: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while not pings or pings[-1]["waiting"] < 2:
            pings.append(json.loads(await get(sandbox.url, "/v1/ping")))
    assert [json.loads(await get(sandbox.url, "/v1/ping"))["running"] for _ in range(FRONTS)] == [4] * FRONTS
    assert max(ping["running"] for ping in pings) == 4
    assert [answer["status"] for answer in await asyncio.gather(*programs)] == ["Success"] * 6


async def test_session_is_reached_over_every_connection(sandbox: Serving) -> None:
    assert (await post(sandbox.url, "x = 0", session_id="counter"))["session_is_new"]
    for number in range(1, 2 * FRONTS):
        answer = await post(sandbox.url, "x += 1; x", session_id="counter")
        assert (answer["run_result"]["stdout"], answer["session_is_new"]) == (f"{number}\n", False)
    answers = await asyncio.gather(*(post(sandbox.url, "x += 1; x", session_id="counter") for _ in range(6)))
    values = sorted(int(answer["run_result"]["stdout"]) for answer in answers)
    assert values == list(range(2 * FRONTS, 2 * FRONTS + 6)), "cells of one session ran at the same time"


async def test_deleted_session_is_gone_at_every_front(sandbox: Serving) -> None:
    await post(sandbox.url, "x = 0", session_id="deleted")
    for was_open in (True, False):
        async with (
            aiohttp.ClientSession() as session,
            session.delete(f"{sandbox.url}/v1/sessions/deleted") as response,
        ):
            assert (await response.json())["ended"] == was_open
    for _ in range(FRONTS):
        assert (await post(sandbox.url, "x", session_id="deleted"))["http_status"] == 410


async def test_sessions_of_all_fronts_are_limited_together(sandbox: Serving) -> None:
    await asyncio.sleep(1.1)  # now the sessions of other tests can be evicted
    for name in ("one", "two", "three"):
        await post(sandbox.url, "x = 0", session_id=name)
    await asyncio.sleep(1.1)
    for name in ("two", "three"):
        assert not (await post(sandbox.url, "x", session_id=name))["session_is_new"]
    assert (await post(sandbox.url, "x = 0", session_id="four"))["session_is_new"]
    assert await metric(sandbox.url, "sessions ") == 3
    await asyncio.sleep(1.1)
    assert (await post(sandbox.url, "1", session_id="one"))["session_is_new"], "not the longest idle one was evicted"


async def test_idempotency_key_is_known_to_all_fronts(sandbox: Serving) -> None:
    before = await metric(sandbox.url, "executions_total")
    code = "import random, time; time.sleep(0.5); print(random.random())"
    requests = [post(sandbox.url, code, idempotency_key="once") for _ in range(2 * FRONTS)]
    answers = await asyncio.gather(*requests)
    answers.append(await post(sandbox.url, code, idempotency_key="once"))
    assert len({answer["run_result"]["stdout"] for answer in answers}) == 1
    assert await metric(sandbox.url, "executions_total") == before + 1


async def test_cell_that_ended_its_session_is_not_run_again(sandbox: Serving) -> None:
    before = await metric(sandbox.url, "executions_total")
    request = {"session_id": "over", "idempotency_key": "last"}
    answers = [await post(sandbox.url, "import os; os._exit(3)", **request) for _ in range(FRONTS)]
    assert [answer["run_result"]["return_code"] for answer in answers] == [3] * FRONTS
    assert await metric(sandbox.url, "executions_total") == before + 1


async def test_program_is_compiled_once_for_all_fronts(sandbox: Serving) -> None:
    code = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n; }\n"
    requests = [post(sandbox.url, code, language="cpp", stdin=str(number)) for number in range(2 * FRONTS)]
    answers = await asyncio.gather(*requests)
    assert [answer["run_result"]["stdout"] for answer in answers] == [str(number) for number in range(2 * FRONTS)]
    assert sum(answer["compile_result"]["execution_time"] > 0 for answer in answers) == 1, "the others were cached"


async def test_many_requests_can_be_forwarded_at_once(sandbox: Serving) -> None:
    front = sandbox.fronts()[0]
    address = next(found.laddr for found in front.net_connections("unix") if found.laddr.endswith(".sock"))
    with contextlib.ExitStack() as closing:
        front.suspend()
        closing.callback(front.resume)
        for _ in range(300):
            connection = closing.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            connection.connect(address)


async def test_fence_counts_programs_of_all_fronts(sandbox: Serving) -> None:
    async def fence() -> int:
        url = f"{sandbox.url}/v1/holders/holder/fence"
        async with aiohttp.ClientSession() as session, session.post(url, json={"lease": 1}) as response:
            return int((await response.json())["running"])

    programs = [asyncio.create_task(post(sandbox.url, "import time; time.sleep(2)", lease="holder/1")) for _ in "123"]
    async with asyncio.timeout(20):
        while json.loads(await get(sandbox.url, "/v1/ping"))["running"] < 3:
            await asyncio.sleep(0.05)
    assert await fence() == 3
    for _ in range(FRONTS):
        assert (await post(sandbox.url, "1", lease="holder/1"))["http_status"] == 412
    await asyncio.gather(*programs)
    assert await fence() == 0


async def test_front_killed_under_load_loses_no_request(sandbox: Serving, client: SandboxClient) -> None:
    restarts = await metric(sandbox.url, "front_restarts")
    results: list[bool] = []
    numbers = iter(range(300))

    async def work() -> None:
        for number in numbers:
            done = await client.run(f"print({number})", run_timeout=60)
            results.append(done.stdout == f"{number}\n")

    workers = [asyncio.create_task(work()) for _ in range(12)]
    while len(results) < 50:
        await asyncio.sleep(0.01)
    sandbox.fronts()[1].kill()
    await asyncio.gather(*workers)
    assert results == [True] * 300
    assert await asyncio.to_thread(wait_until, lambda: len(sandbox.fronts()) == FRONTS)
    assert await metric(sandbox.url, "front_restarts") == restarts + 1
    assert json.loads(await get(sandbox.url, "/v1/ping"))["running"] == 0


async def test_slots_of_dead_front_are_free_when_its_programs_have_ended(sandbox: Serving) -> None:
    code = f"{name_process('orphan')}; import time; time.sleep(60)"
    programs = [asyncio.create_task(post(sandbox.url, code, run_timeout=90)) for _ in range(3)]
    assert await asyncio.to_thread(wait_until, lambda: len(sandbox.processes_named("orphan")) == 3)
    orphans = sandbox.processes_named("orphan")
    counts = {front: sum(one in orphans for one in front.children(recursive=True)) for front in sandbox.fronts()}
    front = max(counts, key=lambda front: counts[front])
    front.kill()
    async with asyncio.timeout(30):
        while (running := json.loads(await get(sandbox.url, "/v1/ping"))["running"]) == 3:
            await asyncio.sleep(0.01)
    assert len(sandbox.processes_named("orphan")) == running == 3 - counts[front]
    for program in programs:
        program.cancel()
    await asyncio.gather(*programs, return_exceptions=True)


async def test_sessions_of_dead_front_start_again(sandbox: Serving, client: SandboxClient) -> None:
    names = ("red", "green", "blue")
    assert await asyncio.to_thread(wait_until, lambda: len(sandbox.fronts()) == FRONTS)
    for name in names:
        await client.run("x = 1", session_id=name)
    for front in sandbox.fronts():
        front.kill()
    for name in names:
        done = await client.run("x = globals().get('x', 0) + 1; x", session_id=name)
        assert (done.stdout, done.session_is_new) == ("1\n", True)
        assert not (await client.run("x", session_id=name)).session_is_new


async def test_killed_server_leaves_no_processes() -> None:
    with serving("--fronts", "2") as running:
        code = "import time; time.sleep(60)"
        slow = [asyncio.create_task(post(running.url, code, run_timeout=90)) for _ in range(2)]
        await asyncio.sleep(1)
        processes = running.processes()
        running.process.kill()
        await asyncio.gather(*slow, return_exceptions=True)
        assert await asyncio.to_thread(wait_until, lambda: not any(process.is_running() for process in processes[1:]))


async def test_sigterm_waits_for_programs_of_all_fronts() -> None:
    with serving("--fronts", "2") as running:
        code = "import time; time.sleep(8); print('done')"
        slow = [asyncio.create_task(post(running.url, code)) for _ in range(2)]
        async with asyncio.timeout(20):
            while json.loads(await get(running.url, "/v1/ping"))["running"] < 2:
                await asyncio.sleep(0.05)
        running.process.terminate()
        async with asyncio.timeout(20):
            while not all(["shutting down" in await get(running.url, "/v1/ping") for _ in range(2)]):
                await asyncio.sleep(0.05)
        assert [(await post(running.url, "1"))["http_status"] for _ in range(2)] == [503, 503]
        assert [answer["run_result"]["stdout"] for answer in await asyncio.gather(*slow)] == ["done\n"] * 2
        assert await asyncio.to_thread(running.process.wait, 20) == 0


async def test_host_with_several_addresses_is_served_at_each() -> None:
    with serving("--fronts", "2", "--host", "localhost") as running:
        port = running.url.rpartition(":")[2]
        addresses = {str(found[4][0]) for found in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)}
        for address in addresses:
            url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
            assert json.loads(await get(url, "/v1/ping"))["ping"] == "pong"


async def test_invalid_request_ends_no_session(sandbox: Serving) -> None:
    await asyncio.sleep(1.1)  # now the sessions of other tests can be evicted
    names = ["kept-1", "kept-2", "kept-3"]
    for name in names:
        await post(sandbox.url, "x = 1", session_id=name)
    await asyncio.sleep(1.1)
    for number in range(4):
        answer = await post(sandbox.url, "ls", language="bash", session_id=f"invalid-{number}")
        assert answer["http_status"] == 422
    assert [(await post(sandbox.url, "x", session_id=name))["session_is_new"] for name in names] == [False] * 3


def test_server_that_cannot_start_names_reason() -> None:
    with (
        pytest.raises(RuntimeError, match="cannot be run: /missing/python"),
        serving("--fronts", "2", "--python", "/missing/python"),
    ):
        pass
