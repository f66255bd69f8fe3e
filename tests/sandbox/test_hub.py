"""The hub: what holds for all fronts together, whatever arrives, ends and dies in which order."""

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from toolroll.errors import ConfigError
from toolroll.sandbox.server import settings
from toolroll.sandbox.server.api.idempotency import MAX_CACHED_RESPONSES
from toolroll.sandbox.server.execution.languages import RECIPES, MissingToolchain, Toolchain
from toolroll.sandbox.server.fronts import front_pool
from toolroll.sandbox.server.fronts.front_pool import FrontPool
from toolroll.sandbox.server.fronts.front_service import FrontConfig, MessageProtocol, _HubLogHandler
from toolroll.sandbox.server.hub.hub import Hub
from toolroll.sandbox.server.hub.hub_client import AtOtherFront, HubClient
from toolroll.sandbox.server.hub.hub_state import MAX_REMEMBERED_KEYS, HubState, KeyOwners
from toolroll.sandbox.server.hub.messages import (
    Admitted,
    Condition,
    CountRestarts,
    EndSession,
    Finished,
    Forwarded,
    HubMessage,
    Refused,
    ServerDescription,
    Ticket,
    decode,
    encode,
)
from toolroll.sandbox.server.hub.rejections import DeadlineExceeded, QueueFull
from toolroll.sandbox.server.hub.session_registry import MIN_IDLE_S
from toolroll.sandbox.server.settings import ServerSettings

FRONTS = st.integers(0, 2)
NAMES = st.sampled_from(["a", "b", "c"])
CAPACITY, MAX_WAITING, MAX_SESSIONS = 2, 3, 2


class HubMachine(RuleBasedStateMachine):
    """Fronts that send tickets, finish them, die, and open sessions some time after the hub has admitted a request."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.state = HubState(CAPACITY, MAX_WAITING, MAX_SESSIONS, self.now)
        self.next_number = 0
        self.arrived: list[tuple[int, int]] = []
        """Tickets that are not answered yet, in order of arrival."""
        self.tickets: dict[tuple[int, int], Ticket] = {}
        self.running: dict[tuple[int, int], Ticket] = {}
        self.places: set[tuple[int, str]] = set()
        """Sessions that the hub counts: open ones, and those of admitted requests."""
        self.open_sessions: set[tuple[int, str]] = set()
        self.ended_sessions: set[tuple[int, str]] = set()
        """Sessions that have ended at their front, which the hub does not know yet."""
        self.fenced: dict[str, int] = {}
        self.forwarded: list[tuple[int, Ticket]] = []
        """Requests to send to another front."""
        self.deleted: set[str] = set()
        self.crashed: set[str] = set()

    def take(self, outgoing: list[tuple[int, HubMessage]]) -> None:
        """Handle messages as the fronts do."""
        for front, message in outgoing:
            if isinstance(message, EndSession):
                session = front, message.name
                assert session in self.places | self.open_sessions
                self.places.discard(session)
                self.open_sessions.discard(session)
                self.ended_sessions.discard(session)
                continue
            assert isinstance(message, Admitted | Forwarded | Refused)
            ticket = self.tickets[front, message.number]
            if isinstance(message, Admitted):
                earlier = self.arrived[: self.arrived.index((front, message.number))]
                assert not earlier, "a request overtook another one"
                self.check_admission(front, ticket, message)
                self.running[front, message.number] = ticket
                if ticket.session is not None:
                    self.places.add((front, ticket.session))
            if isinstance(message, Forwarded):
                assert message.front != front
                self.forwarded.append((message.front, ticket._replace(is_forwarded=True)))
            self.arrived.remove((front, message.number))

    def check_admission(self, front: int, ticket: Ticket, message: Admitted) -> None:
        assert ticket.deadline is None or ticket.deadline >= self.now
        assert message.queue_time_s >= 0
        if ticket.lease:
            holder, _, number = ticket.lease.partition("/")
            assert int(number) > self.fenced.get(holder, -1), "a fenced lease was admitted"
        if ticket.session is not None:
            assert ticket.session not in self.deleted
            assert message.session_died == (ticket.session in self.crashed)
        for (other_front, _), other in self.running.items():
            same_key = ticket.session is None and other.session is None and ticket.keys and ticket.keys == other.keys
            same_session = ticket.session is not None and ticket.session == other.session
            if same_key or same_session:
                assert front == other_front

    @rule(
        front=FRONTS,
        session=st.none() | NAMES,
        key=st.none() | NAMES,
        lease=st.none() | st.builds("{}/{}".format, st.sampled_from("xy"), st.integers(0, 3)),
        seconds=st.none() | st.floats(-1, 5),
    )
    def arrive(
        self, front: int, session: str | None, key: str | None, lease: str | None, seconds: float | None
    ) -> None:
        deadline = None if seconds is None else self.now + seconds
        self.send(front, Ticket(0, deadline, lease, self.now, session, (key,) if key else ()))
        for hops in range(3):
            if self.forwarded:
                assert hops < 2, "a request is forwarded in a circle"
                self.send(*self.forwarded.pop())

    def send(self, front: int, ticket: Ticket) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        ticket = ticket._replace(number=number)
        was_full = self.state.is_full
        self.tickets[front, number] = ticket
        self.arrived.append((front, number))
        outgoing = self.state.arrive(front, ticket, self.now)
        self.take(outgoing)
        if was_full:
            assert (front, number) not in self.arrived
            assert (front, number) not in self.running
        if (front, number) in self.arrived:
            assert len(self.running) == CAPACITY, "a request waits although there is room"

    @precondition(lambda self: self.sessions_to_open())
    @rule(data=st.data())
    def open_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions_to_open()))
        self.open_sessions.add(session)
        self.ended_sessions.discard(session)  # a front does not report the end of a session that it has replaced

    def sessions_to_open(self) -> list[tuple[int, str]]:
        """Return the sessions of running requests, which may have been deleted since they were admitted."""
        sessions = {(front, ticket.session or "") for (front, _), ticket in self.running.items()}
        return sorted(one for one in sessions if one in self.places or one[1] in self.deleted)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.floats(0, 3), has_result=st.booleans())
    def finish(self, data: st.DataObject, seconds: float, has_result: bool) -> None:
        front, number = data.draw(st.sampled_from(sorted(self.running)))
        self.now += seconds
        session = front, self.running.pop((front, number)).session or ""
        is_open = session in self.open_sessions
        if not is_open:  # the front rejected the request
            self.places.discard(session)
        if has_result:
            self.crashed.discard(session[1])
        outgoing = self.state.finish(front, number, self.now, session_is_open=is_open, has_result=has_result)
        self.take(outgoing)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        front, number = data.draw(st.sampled_from(sorted(self.arrived)))
        self.arrived.remove((front, number))
        self.take(self.state.finish(front, number, self.now))

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for front, number in list(self.arrived):
            deadline = self.tickets[front, number].deadline
            if deadline is not None and deadline < self.now:
                self.take(self.state.expire(front, number, self.now))
                assert (front, number) not in self.arrived

    @rule(front=FRONTS)
    def die(self, front: int) -> None:
        self.running = {ticket: value for ticket, value in self.running.items() if ticket[0] != front}
        self.arrived = [ticket for ticket in self.arrived if ticket[0] != front]
        self.places = {session for session in self.places if session[0] != front}
        self.open_sessions = {session for session in self.open_sessions if session[0] != front}
        self.ended_sessions = {session for session in self.ended_sessions if session[0] != front}
        self.take(self.state.remove_front(front, self.now))

    @rule(holder=st.sampled_from("xy"), number=st.integers(0, 3))
    def fence(self, holder: str, number: int) -> None:
        running = self.state.fence(holder, number)
        self.fenced[holder] = max(number, self.fenced.get(holder, -1))
        leases = [ticket.lease.split("/") for ticket in self.running.values() if ticket.lease]
        assert running == sum(one == holder and int(lease) <= number for one, lease in leases)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        was_open = any(session == name for _, session in self.places)
        outgoing = self.state.delete_session(name)
        assert bool(outgoing) == was_open
        self.deleted.add(name)
        self.take(outgoing)

    @precondition(lambda self: self.open_sessions)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.open_sessions)))
        self.open_sessions.remove(session)
        self.ended_sessions.add(session)

    @precondition(lambda self: self.ended_sessions)
    @rule(data=st.data(), crashed=st.booleans())
    def report_end(self, data: st.DataObject, crashed: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.ended_sessions)))
        self.ended_sessions.remove(session)
        front, name = session
        if session not in {(front, ticket.session) for (front, _), ticket in self.running.items()}:
            self.places.discard(session)
        if crashed:
            self.crashed.add(name)
        self.state.close_session(front, name, crashed=crashed)

    @invariant()
    def counts_agree(self) -> None:
        assert self.state.running == len(self.running) <= CAPACITY
        assert self.state.waiting == len(self.arrived) <= MAX_WAITING
        assert self.state.open_sessions == len(self.places) <= MAX_SESSIONS
        assert 1 <= self.state.retry_after() <= 60

    @invariant()
    def session_is_open_at_one_front(self) -> None:
        names = [name for _, name in self.places | self.open_sessions]
        assert len(names) == len(set(names))

    @invariant()
    def idle_session_is_counted(self) -> None:
        used = {(front, ticket.session) for (front, _), ticket in self.running.items()}
        assert self.open_sessions <= self.places | used

    def teardown(self) -> None:
        for front in range(3):
            self.die(front)
        assert not self.state.sessions._entries
        assert not self.state._keys._pending
        assert not self.state._keys._settled
        assert not self.state.fences._running


TestHub = HubMachine.TestCase


def test_idle_session_makes_room_for_new_one() -> None:
    state = HubState(1, 0, 1, 0.0)
    assert state.arrive(0, Ticket(0, session="a"), 10.0) == [(0, Admitted(0, 0.0, False))]
    state.finish(0, 0, 11.0, session_is_open=True)
    ((_, refusal),) = state.arrive(1, Ticket(1, session="b"), 11.0 + MIN_IDLE_S / 2)
    assert isinstance(refusal, Refused)
    assert refusal.rejection == "SessionLimitReached"
    later = state.arrive(1, Ticket(2, session="b"), 11.5 + MIN_IDLE_S)
    assert later == [(0, EndSession("a")), (1, Admitted(2, 0.0, False))]


def test_keys_of_each_front_are_remembered() -> None:
    keys = KeyOwners(3)
    for number in range(5):
        keys.claim(f"key{number}", number)
        keys.settle(f"key{number}", number, 1.0)
    assert [keys.owner(f"key{number}") for number in range(5)] == [None, None, 2, 3, 4]
    state = HubState(1, 0, 1, 0.0, front_count=4)
    assert state._keys._max_remembered == 4 * MAX_REMEMBERED_KEYS
    assert MAX_REMEMBERED_KEYS >= 2 * MAX_CACHED_RESPONSES, "a front answers a request again from its cache"


def test_session_that_front_did_not_open_takes_no_place() -> None:
    state = HubState(2, 0, 1, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    state.finish(0, 0, 1.0, session_is_open=False)
    assert state.sessions.open_count == 0
    assert state.arrive(0, Ticket(1, session="b"), 1.0) == [(0, Admitted(1, 0.0, False))]


def test_session_that_ended_and_started_again_is_known() -> None:
    state = HubState(2, 0, 1, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    state.close_session(0, "a", crashed=True)
    state.finish(0, 0, 1.0, session_is_open=True)
    assert state.delete_session("a") == [(0, EndSession("a"))]


def test_session_that_ends_before_its_request_keeps_place() -> None:
    """The session has expired, and its front opens it again for a request that was admitted before the hub knew."""
    state = HubState(2, 0, 1, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    state.finish(0, 0, 2.0, session_is_open=True)
    assert state.arrive(0, Ticket(1, session="a"), 9.0) == [(0, Admitted(1, 0.0, False))]
    state.close_session(0, "a", crashed=False)
    ((_, refusal),) = state.arrive(0, Ticket(2, session="b"), 9.0)
    assert isinstance(refusal, Refused)
    assert refusal.rejection == "SessionLimitReached"
    state.finish(0, 1, 10.0, session_is_open=True)
    assert state.open_sessions == 1


def test_crash_is_reported_until_a_request_has_a_result() -> None:
    state = HubState(2, 0, 1, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    state.finish(0, 0, 2.0, session_is_open=True, has_result=True)
    state.close_session(0, "a", crashed=True)
    for number, has_result, session_died in ((1, False, True), (2, True, True), (3, True, False)):
        assert state.arrive(0, Ticket(number, session="a"), 3.0) == [(0, Admitted(number, 0.0, session_died))]
        state.finish(0, number, 3.0, session_is_open=has_result, has_result=has_result)


def test_session_opened_after_its_deletion_is_ended() -> None:
    state = HubState(2, 0, 1, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    assert state.delete_session("a") == [(0, EndSession("a"))]
    assert state.finish(0, 0, 2.0, session_is_open=True) == [(0, EndSession("a"))]
    assert state.sessions.open_count == 0


def test_key_of_long_request_is_remembered() -> None:
    """Requests with the same program have the same key. The second one outlives the memory of the first one's."""
    state = HubState(9, 0, 1, 0.0)
    for number in (0, 1):
        state.arrive(0, Ticket(number, keys=("program",)), 1.0)
    state.finish(0, 0, 2.0)
    state.arrive(0, Ticket(2, keys=("other",)), 100.0)
    state.finish(0, 2, 100.0)  # forgets finished requests
    assert state.arrive(1, Ticket(0, keys=("program",)), 100.0) == [(1, Forwarded(0, 0))]


def test_request_goes_to_front_with_session_or_result() -> None:
    state = HubState(10, 0, 10, 0.0)
    state.arrive(0, Ticket(0, session="a"), 1.0)
    assert state.arrive(1, Ticket(0, session="a"), 1.0) == [(1, Forwarded(0, 0))]
    state.arrive(0, Ticket(1, keys=("k", "program")), 1.0)
    assert state.arrive(1, Ticket(1, keys=("k",)), 1.0) == [(1, Forwarded(1, 0))]
    state.finish(0, 1, 5.0)
    assert state.arrive(1, Ticket(2, keys=("other", "program")), 60.0) == [(1, Forwarded(2, 0))]
    assert state.arrive(1, Ticket(2, session="gone", keys=("k",)), 60.0) == [(1, Forwarded(2, 0))], "has the response"
    forwarded = Ticket(2, session="gone", keys=("k",), is_forwarded=True)
    assert isinstance(state.arrive(0, forwarded, 60.0)[0][1], Admitted)
    state.remove_front(0, 61.0)
    assert isinstance(state.arrive(1, Ticket(3, session="a"), 61.0)[0][1], Admitted)


@pytest.mark.parametrize("message", [Ticket(3, 1.5, "h/1", 2.5, "s", ("k",)), Refused(1, "QueueFull", "füll", 3)])
def test_message_survives_encoding(message: Any) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert encode(decode(line)) == line


def connected_client(**options: Any) -> tuple[Hub, HubClient]:
    hub = Hub(ServerSettings(**options))
    client = HubClient(lambda message: hub.handle(0, message), lambda _: None)
    hub.connect(0, client.receive)
    return hub, client


@pytest.mark.virtual_time
async def test_expired_request_is_not_admitted() -> None:
    hub, client = connected_client(capacity=1)
    with pytest.raises(DeadlineExceeded, match=r"passed 5\.\d+ s ago"):
        async with client.admit(Ticket(0, time.time() - 5)):
            raise AssertionError
    async with client.admit(Ticket(0)):
        with pytest.raises(DeadlineExceeded):
            async with client.admit(Ticket(0, time.time() + 0.05)):
                raise AssertionError
    assert (hub.state.running, hub.state.waiting) == (0, 0)


@pytest.mark.virtual_time
async def test_deadline_of_dead_front_is_forgotten() -> None:
    """The tickets of its replacement have the same numbers."""
    hub, client = connected_client(capacity=1)
    async with client.admit(Ticket(0)):
        sent: list[HubMessage] = []
        hub.connect(1, sent.append)
        hub.handle(1, Ticket(5, time.time() + 1))
        hub.disconnect(1)
        hub.connect(1, sent.append)
        hub.handle(1, Ticket(5))
        await asyncio.sleep(2)
    assert [type(message).__name__ for message in sent if not isinstance(message, Condition)] == ["Admitted"]


@pytest.mark.virtual_time
async def test_full_queue_estimates_when_to_retry() -> None:
    hub, client = connected_client(capacity=1, queue=100)
    hub.state.mean_run_time_s = 1.0
    for number in range(101):
        hub.handle(1, Ticket(number))
    assert client.condition == Condition(is_full=True, retry_after=50)


@pytest.mark.virtual_time
async def test_fronts_are_rarely_sent_whether_queue_is_full() -> None:
    hub = Hub(ServerSettings(capacity=2, queue=0, fronts=2))
    sent: list[HubMessage] = []
    hub.connect(0, sent.append)
    hub.handle(0, Ticket(0))
    for number in range(1, 100):
        hub.handle(0, Ticket(number))
        hub.handle(0, Finished(number))
    await asyncio.sleep(1)
    assert [message.is_full for message in sent if isinstance(message, Condition)] == [False, True, False]


@pytest.mark.virtual_time
async def test_cancelled_request_leaves_queue() -> None:
    hub, client = connected_client(capacity=1, queue=1)

    async def request() -> None:
        async with client.admit(Ticket(0)):
            await asyncio.sleep(1000)

    tasks = [asyncio.create_task(request()) for _ in range(2)]
    await asyncio.sleep(1)
    assert client.condition.is_full
    with pytest.raises(QueueFull) as rejection:
        async with client.admit(Ticket(0)):
            raise AssertionError
    assert 1 <= rejection.value.retry_after <= 60
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not client.condition.is_full
    assert (hub.state.running, hub.state.waiting) == (0, 0)


async def test_session_of_other_front_is_found() -> None:
    hub, client = connected_client()
    other = HubClient(lambda message: hub.handle(1, message), lambda _: None)
    hub.connect(1, other.receive)
    async with client.admit(Ticket(0, session="a")) as admission:
        admission.session_is_open = True
    with pytest.raises(AtOtherFront) as found:
        async with other.admit(Ticket(0, session="a")):
            raise AssertionError
    assert found.value.front == 0


@pytest.mark.parametrize(("cpus", "count"), [(2, 1), (4, 1), (8, 2), (64, 16)])
def test_number_of_fronts_depends_on_cpus(cpus: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cpu_count", lambda: cpus)
    chosen = ServerSettings(fronts="auto")
    assert ServerSettings.model_validate_json(chosen.model_dump_json()).front_count == count


def test_message_after_one_that_fails_is_handled() -> None:
    handle = Mock(side_effect=[RuntimeError, None])
    MessageProtocol(handle, Mock()).data_received(encode(CountRestarts(1)) + encode(CountRestarts(2)))
    handle.assert_called_with(CountRestarts(2))


class FakeFront:
    """A front that is ready at once, and dies when `gone` is set."""

    tiers: Iterator[str]
    """Isolation tiers of the fronts, in order of their starts."""
    started: list["FakeFront"]
    lifetime_s = 1e6

    def __init__(self, number: int, *arguments: object) -> None:
        self.arguments = arguments
        self.started.append(self)
        self.connections = Mock()
        self.gone = asyncio.Event()
        asyncio.get_running_loop().call_later(self.lifetime_s, self.gone.set)

    async def start(self) -> ServerDescription:
        return ServerDescription(next(self.tiers), [], ["no cgroup"], [])

    async def stop(self) -> None:
        pass


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontPool]:
    """Return a pool of two fake fronts. It has not been started."""
    monkeypatch.setattr(front_pool, "FrontProcess", FakeFront)
    monkeypatch.setattr(front_pool, "OwnedDirectory", Mock())
    monkeypatch.setattr(front_pool, "find_toolchains", Mock(side_effect=lambda _: {"lua": MissingToolchain("lua")}))
    monkeypatch.setattr(front_pool.cgroup, "enter_server_cgroup", Mock(side_effect=OSError))
    monkeypatch.setattr(FakeFront, "started", [], raising=False)
    monkeypatch.setattr(FakeFront, "tiers", itertools.repeat("A"), raising=False)
    options = ServerSettings(fronts=2, capacity=2)
    pool = FrontPool(options, Hub(options))
    yield pool
    await pool.close()


@pytest.mark.virtual_time
async def test_replacement_with_other_isolation_is_not_used(pool: FrontPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFront, "tiers", iter("AABA"))
    assert (await pool.start([])).tier == "A"
    FakeFront.started[0].gone.set()
    await asyncio.sleep(0.15)
    assert (len(FakeFront.started), list(pool._connections)) == (3, [1])
    await asyncio.sleep(10)
    assert (len(FakeFront.started), sorted(pool._connections)) == (4, [0, 1])


@pytest.mark.virtual_time
async def test_all_fronts_have_the_same_toolchains(pool: FrontPool) -> None:
    await pool.start([])
    FakeFront.started[0].gone.set()
    await asyncio.sleep(10)
    found = {id(each) for front in FakeFront.started for each in front.arguments if isinstance(each, dict)}
    assert (len(FakeFront.started), len(found)) == (3, 1)


@pytest.mark.parametrize(
    "toolchain",
    [
        MissingToolchain("g++"),
        Toolchain(
            recipe=RECIPES["cpp"], version="1", programs={"g++": "/g++"}, variables={"a": "b"}, readable=("/lib",)
        ),
    ],
)
def test_toolchain_survives_encoding(toolchain: Toolchain | MissingToolchain) -> None:
    config = FrontConfig(
        number=0,
        settings=ServerSettings(),
        token=None,
        scope_key="",
        socket_directory=Path("/"),
        left_cgroup=None,
        messages_fd=0,
        connections_fd=0,
        log_level=0,
        toolchains={"cpp": toolchain},
    )
    assert FrontConfig.model_validate_json(config.model_dump_json()).toolchains == {"cpp": toolchain}


def test_log_record_of_front_is_sent_with_traceback() -> None:
    sent: list[Any] = []
    front_logger, handler = logging.getLogger("toolroll.front"), _HubLogHandler(sent.append)
    front_logger.addHandler(handler)
    try:
        raise KeyError("bug")
    except KeyError:
        front_logger.exception("Request %d failed.", 7)
    front_logger.removeHandler(handler)
    record = logging.makeLogRecord(decode(encode(sent[0])).fields)
    assert (record.name, record.levelname) == ("toolroll.front", "ERROR")
    assert record.getMessage().startswith("Request 7 failed.\nTraceback")
    assert record.getMessage().endswith("KeyError: 'bug'")


@pytest.mark.virtual_time
async def test_fronts_with_different_tiers_do_not_start(pool: FrontPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFront, "tiers", iter("AB"))
    with pytest.raises(ConfigError, match=r"tier B instead of A\..* no cgroup"):
        await pool.start([])


@pytest.mark.virtual_time
async def test_fronts_that_die_after_their_start_are_delayed(pool: FrontPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFront, "lifetime_s", 0.01)
    await pool.start([])
    await asyncio.sleep(20)
    assert len(FakeFront.started) < 20


async def test_hub_raises_its_limit_of_open_files(pool: FrontPool) -> None:
    """Else, a program that has many descriptors in flight prevents it from passing connections to fronts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    await pool.start([])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


async def test_connections_wait_while_fronts_are_busy(pool: FrontPool) -> None:
    count = 40
    pool._connections[0], front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool._connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # for a few connections
    pool._any_ready.set()
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        for each in (pool._connections[0], front, listener):
            closing.enter_context(each).setblocking(False)
        accepting = asyncio.create_task(pool._accept(listener))
        for _ in range(count):
            closing.enter_context(socket.create_connection(listener.getsockname()))
        await asyncio.sleep(0.1)
        passed = 0
        async with asyncio.timeout(10):
            while passed < count:
                try:
                    os.close(socket.recv_fds(front, 1, 1)[1][0])
                    passed += 1
                except BlockingIOError:
                    await asyncio.sleep(0.01)
        accepting.cancel()
