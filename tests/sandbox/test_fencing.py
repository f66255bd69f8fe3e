"""Requests of a process that lost its slots are rejected, and no request is rejected because clocks differ."""

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.fault_server import Behaviour, FaultServer, answer, hang, raw
from sandbox.http_front import FrontServer, http_front
from toolroll.errors import Fault, SandboxRefused, SandboxUnavailable, fault_of
from toolroll.limiter.ledger.lease import Lease, LeasedSlots
from toolroll.limiter.limiter import Limiter
from toolroll.limiter.slot import Slot
from toolroll.limiter.slot_queue import SlotQueue
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.fence import SandboxFence
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings
from toolroll.sandbox.protocol import LEASE_LOST_STATUS, RunCodeRequest, RunCodeResponse
from toolroll.sandbox.server.api import http_app
from toolroll.sandbox.server.hub import hub
from toolroll.sandbox.server_clock import ServerClock

pytestmark = pytest.mark.virtual_time
SKEWS_S = [-3600.0, -0.4, 0.4, 3600.0]


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def skew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Set the server's clock ahead of the client's by the parameter, in seconds. Both run in virtual time."""
    start, unix_start = time.monotonic(), time.time()
    monkeypatch.setattr(time, "time", lambda: unix_start + time.monotonic() - start)
    server_time = SimpleNamespace(time=lambda: time.time() + request.param, monotonic=lambda: time.monotonic())
    for module in (hub, http_app):
        monkeypatch.setattr(module, "time", server_time)
    return request.param


class BusyServer:
    """Makes programs of a server run until `done` is set."""

    def __init__(self, server: FrontServer) -> None:
        self.done, self.started = asyncio.Event(), list[str]()
        self._run_code = server.front.executor.run_code
        server.front.executor.run_code = self.run_code  # type: ignore[method-assign]

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.started.append(request.code)
        await self.done.wait()
        return await self._run_code(request)

    async def wait_for(self, count: int) -> None:
        while len(self.started) < count:
            await asyncio.sleep(0.01)


async def fence(server: FrontServer, holder: str, lease: int) -> dict[str, Any]:
    body = {"lease": lease}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/holders/{holder}/fence", json=body) as response,
    ):
        assert response.status == 200
        return dict(await response.json())


@pytest.mark.parametrize("skew", SKEWS_S, indirect=True)
@pytest.mark.parametrize("lease", [None, "holder/1"])
async def test_skewed_clock_does_not_reject_requests(skew: float, lease: str | None) -> None:
    async with http_front() as server, SandboxClient(server.url) as client:
        for _ in range(3):
            execution = await client.run("1", start_by=soon(0.3), deadline=soon(10), lease=lease)
            assert execution.stdout == "1"
            lease = lease and "holder/2"


@pytest.mark.parametrize("skew", SKEWS_S, indirect=True)
async def test_skewed_clock_does_not_extend_deadline(skew: float) -> None:
    """A request that waits in the server's queue is rejected at its deadline, not when the server's clock shows it."""
    async with http_front(capacity=1) as server, SandboxClient(server.url) as client:
        busy = BusyServer(server)
        first = asyncio.create_task(client.run("first", lease="holder/1"))
        await busy.wait_for(1)
        with pytest.raises(SandboxUnavailable, match="504"):
            await client.run("second", start_by=soon(0.3), deadline=soon(30), lease="holder/1")
        busy.done.set()
        await first
        assert busy.started == ["first"]


@given(
    skew=st.floats(-1e5, 1e5),
    trips=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(-1, 1)), min_size=1, max_size=10),
)
def test_estimated_time_is_never_later_than_the_server(skew: float, trips: list[tuple[float, float, float]]) -> None:
    """Each trip: time to the server, time back, and a step of the server's clock before it."""
    clock, now = ServerClock(), 1000.0
    for there, back, step in trips:
        skew += step
        clock.measure(now + there + skew, now, now + there + back)
        now += 10.0
    there, back, step = trips[-1]
    round_trip = there + back
    assert clock.at(now) <= now + skew + round_trip + 1e-6, "at most one round trip after a step of the clock"
    if all(step == 0 for *_, step in trips):
        assert now + skew - min(back for _, back, _ in trips) - 1e-6 <= clock.at(now) <= now + skew + 1e-6


async def test_server_without_clock_gets_local_time() -> None:
    async with FaultServer([answer(body=b'"pong"'), answer()]) as server, SandboxClient(server.url) as client:
        await client.run("1", deadline=soon(7), lease="holder/1")
    header = next(line for line in server.heads[1].split("\r\n") if line.startswith("X-Toolroll-Deadline"))
    assert float(header.split(": ")[1]) == pytest.approx(time.time() + 7, abs=0.5)


@pytest.mark.parametrize("behaviour", [hang(), raw(b""), answer(503)], ids=["hangs", "closes", "shuts down"])
async def test_program_is_sent_after_failed_measurement(behaviour: Behaviour) -> None:
    script = [behaviour] * 4 + [answer(body=b'"pong"'), answer()]
    async with FaultServer(script) as server, SandboxClient(server.url) as client:
        assert (await client.run("1", deadline=soon(60), lease="holder/1")).stdout == "2\n"
    assert [request and request["code"] for request in server.requests] == [None] * 5 + ["1"]


@pytest.mark.parametrize("skew", SKEWS_S, indirect=True)
async def test_restarted_server_rejects_slots_granted_before(skew: float) -> None:
    """It does not know whether their leases were fenced."""
    granted_at = time.monotonic()
    await asyncio.sleep(1)
    async with http_front() as server, SandboxClient(server.url) as client:
        with pytest.raises(SandboxRefused) as error:
            await client.run("1", lease="holder/1", granted_at=granted_at)
        assert error.value.status == LEASE_LOST_STATUS
        await asyncio.sleep(1)
        assert (await client.run("1", lease="holder/1", granted_at=time.monotonic())).stdout == "1"


async def test_fenced_lease_is_rejected_and_later_one_is_accepted() -> None:
    async with http_front() as server, SandboxClient(server.url) as client:
        await client.run("1", lease="host:1:a/7")
        assert (await fence(server, "host:1:a", 7))["running"] == 0
        with pytest.raises(SandboxRefused, match="fenced") as caught:
            await client.run("2", lease="host:1:a/7")
        assert caught.value.status == 412
        assert fault_of(caught.value) is Fault.INFRA
        await client.run("3", lease="host:1:a/8")
        await client.run("4", lease="host:1:b/1")
        await client.run("5")


async def test_fence_counts_running_programs_and_stops_queued_ones() -> None:
    async with http_front(capacity=2) as server, SandboxClient(server.url) as client:
        busy = BusyServer(server)
        calls = [asyncio.create_task(client.run(str(number), lease="a/1")) for number in range(3)]
        await busy.wait_for(2)
        assert (await fence(server, "a", 1))["running"] == 2
        assert (await fence(server, "b", 1))["running"] == 0
        busy.done.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["Execution", "Execution", "SandboxRefused"]
        assert len(busy.started) == 2
        assert (await fence(server, "a", 1))["running"] == 0


async def test_fence_asks_all_endpoints() -> None:
    async with http_front() as one, http_front() as other:
        fence_both = SandboxFence(SandboxClient([one.url, other.url]))
        async with fence_both.client:
            busy = BusyServer(other)
            async with SandboxClient(other.url) as client:
                call = asyncio.create_task(client.run("1", lease="a/1"))
                await busy.wait_for(1)
                assert await fence_both("a", 1) == 1
                busy.done.set()
                await call
            assert await fence_both("a", 1) == 0


@pytest.mark.parametrize(
    "behaviour",
    [
        answer(404, b"Not Found"),
        answer(body=b'"pong"'),
        answer(body={"running": 0, "address": ["10.96.0.7", 8080]}),
    ],
    ids=["SandboxFusion", "other service", "server behind a load balancer"],
)
async def test_fence_is_not_confirmed_by_other_servers(behaviour: Any) -> None:
    async with FaultServer([behaviour]) as server, SandboxClient(server.url) as client:
        assert await SandboxFence(client)("a", 1) is None


@pytest.mark.parametrize("headers", [{"X-Toolroll-Lease": "a"}, {"X-Toolroll-Deadline": "nan"}])
async def test_invalid_header_is_rejected(headers: dict[str, str]) -> None:
    body = {"code": "1", "language": "python"}
    async with (
        http_front() as server,
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/run_code", json=body, headers=headers) as response,
    ):
        assert response.status == 422


class RenewedLimiter(Limiter):
    """Limiter of a cluster whose lease is renewed before each slot."""

    def __init__(self) -> None:
        super().__init__(SlotQueue("shared", LeasedSlots("holder")))
        self.slots: list[Slot] = []

    def slot(self, deadline: float | None = None, hold: float | None = None) -> Slot:
        self.slots.append(super().slot(deadline, hold))
        assert hold
        self._queue._longest_hold.add(hold, time.monotonic())
        report = self._queue.report()
        self._queue.apply(Lease(report.seq, capacity=4, ttl=10.0, limit=4))
        return self.slots[-1]


@pytest.fixture
def limiter(monkeypatch: pytest.MonkeyPatch) -> RenewedLimiter:
    limiter = RenewedLimiter()
    monkeypatch.setattr("toolroll.sandbox.limited.get_limiter", lambda *_, **__: limiter)
    return limiter


async def test_call_that_lost_its_slot_acquires_another(limiter: RenewedLimiter) -> None:
    async with http_front() as server:
        sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=(server.url,), rate_limit=4))
        await fence(server, "holder", 1)
        result = await sandbox.run("1", run_timeout=5)
        await sandbox._client.close()
    assert result.execution.stdout == "1"
    assert len(limiter.slots) == 2
    assert limiter.in_use == 0


async def test_call_that_loses_every_slot_is_infra_fault(limiter: RenewedLimiter) -> None:
    async with http_front() as server:
        sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=(server.url,), rate_limit=4))
        await fence(server, "holder", 1000)
        with pytest.raises(SandboxRefused) as caught:
            await sandbox.run("1", run_timeout=5)
        await sandbox._client.close()
    assert fault_of(caught.value) is Fault.INFRA
    assert len(limiter.slots) == 4
    assert limiter.in_use == 0


async def test_slot_that_expired_before_use_is_not_used(
    limiter: RenewedLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is suspended for an hour between the grant of its slot and the request."""
    suspensions = [3600.0]
    acquire = LimitedSandbox._acquire_slots

    async def acquire_and_suspend(*arguments: Any) -> list[Slot]:
        slots = await acquire(*arguments)
        await asyncio.sleep(suspensions.pop() if suspensions else 0.0)
        return slots

    monkeypatch.setattr(LimitedSandbox, "_acquire_slots", acquire_and_suspend)
    monkeypatch.setattr("toolroll.sandbox.limited.MAX_WAIT_S", 7200.0)
    async with FaultServer([answer(body=b'"pong"'), answer()]) as server:
        sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=(server.url,), rate_limit=4))
        result = await sandbox.run("1", run_timeout=5)
        await sandbox._client.close()
    assert result.execution.stdout == "2\n"
    assert len(limiter.slots) == 2, "the first slot had expired"
    assert len(server.requests) == 2, "a ping and the program"
