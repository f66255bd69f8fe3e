"""Adaptive limits: what a resource receives and completes while its capacity changes. Time is simulated."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.limiter.ledger.feedback import Feedback
from toolroll.limiter.ledger.lease import LeasedSlots
from toolroll.limiter.ledger.ledger import Ledger
from toolroll.limiter.ledger.policy import LimitPolicy

STEP_S = 0.005
REPORT_INTERVAL_S = 0.05


@dataclass
class Service:
    """A resource that runs `capacity` requests at a time and rejects others, or runs all with less speed each."""

    capacity: int
    duration_s: float
    queues: bool = False
    rejects_all: bool = False
    retry_after_s: float = 0.0
    """Time for which a rejection asks to wait."""
    running: list[float] = field(default_factory=list)
    """Remaining work of each running request, in seconds."""
    arrivals: list[tuple[float, bool]] = field(default_factory=list)
    """Time of each request, and whether it was accepted."""

    def accept(self, now: float) -> bool:
        accepted = not self.rejects_all and (self.queues or len(self.running) < self.capacity)
        self.arrivals.append((now, accepted))
        return accepted


@dataclass
class Client:
    """A process that always has waiters."""

    leased: LeasedSlots
    wants: int
    work: list[list[float]] = field(default_factory=list)
    """Remaining work, time of the grant and epoch of each running request."""
    reported_at: float = -1.0
    is_answered: bool = False
    """Whether the latest report has been answered. The next one is sent then."""
    stalled_until: float = 0.0
    """Time until which the process does not run."""


class World:
    """A ledger, clients and a service, in steps of `STEP_S`."""

    def __init__(self, service: Service, minimum: int = 4, maximum: int = 256, clients: int = 4, seed: int = 0) -> None:
        self.ledger = Ledger(LimitPolicy(minimum, maximum))
        self.service = service
        self.clients = [Client(LeasedSlots(f"client {index}"), wants=50) for index in range(clients)]
        self.now = 100.0
        self.limits: list[tuple[float, int]] = []
        self.done: list[float] = []
        self.random = random.Random(seed)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def step(self) -> None:
        self.now += STEP_S
        self._finish_requests()
        for client in self.random.sample(self._running_clients(), len(self._running_clients())):
            self._start_requests(client)
            is_due = self.now >= client.reported_at + REPORT_INTERVAL_S
            if client.is_answered or is_due or client.leased.has_unreported_rejection:
                self._report(client)
        self.ledger.divide(self.now)
        for client in self._running_clients():
            name, due = client.leased.holder, self.now >= client.reported_at + self.ledger.renewal_interval
            if not client.is_answered and name in self.ledger.holders and (lease := self.ledger.answer(name, due=due)):
                client.leased.apply(lease)
                client.is_answered = True
        self.limits.append((self.now, self.ledger.limit))

    def restart_ledger(self) -> None:
        """Replace the ledger by one that is restored from its checkpoint. The reports in transit are lost."""
        self.ledger = Ledger.restore(self.ledger.checkpoint(), self.now)
        for client in self.clients:
            client.is_answered = True

    def _running_clients(self) -> list[Client]:
        return [client for client in self.clients if self.now >= client.stalled_until]

    def _finish_requests(self) -> None:
        running = sum(len(client.work) for client in self.clients)
        speed = min(1.0, self.service.capacity / running) if running and self.service.queues else 1.0
        self.service.running = []
        for client in self.clients:
            for work in client.work:
                work[0] -= STEP_S * speed
            finished = [work for work in client.work if work[0] <= 0]
            for work in finished if self.now >= client.stalled_until else ():
                client.work.remove(work)
                client.leased.outcomes.succeed(int(work[2]), self.now - work[1])
                self.done.append(self.now)
            self.service.running += [work[0] for work in client.work if work[0] > 0]

    def _start_requests(self, client: Client) -> None:
        leased = client.leased
        while len(client.work) < min(client.wants, leased.usable(self.now)) and not leased.is_paused:
            epoch = leased.outcomes.epoch
            if self.service.accept(self.now):
                duration_s = self.service.duration_s * self.random.uniform(0.5, 1.5)
                client.work.append([duration_s, self.now, epoch])
                self.service.running.append(duration_s)
            else:
                leased.reject(epoch, self.now + self.service.retry_after_s)
                if epoch != leased.lease.epoch or not epoch:
                    break

    def _report(self, client: Client) -> None:
        in_use = len(client.work)
        self.ledger.report(client.leased.report(self.now, in_use=in_use, wants=client.wants, hold=1.0), self.now)
        client.reported_at, client.is_answered = self.now, False

    def throughput(self, since: float) -> float:
        """Return the completed requests per second."""
        return sum(moment >= since for moment in self.done) / (self.now - since)

    def rejected(self, since: float) -> float:
        """Return the fraction of the requests that the service rejected."""
        recent = [accepted for moment, accepted in self.service.arrivals if moment >= since]
        return recent.count(False) / len(recent)

    def limits_since(self, since: float) -> list[int]:
        return [limit for moment, limit in self.limits if moment > since]


@pytest.mark.parametrize("duration_s", [0.1, 0.2, 0.8])
def test_limit_follows_capacity(duration_s: float) -> None:
    world = World(Service(capacity=32, duration_s=duration_s))
    world.run(20.0)
    for capacity in (32, 8, 32):
        world.service.capacity = capacity
        world.run(10.0)
        settled = world.now
        world.run(20.0)
        assert world.throughput(settled) >= 0.9 * capacity / duration_s
        assert min(world.limits_since(settled)) >= 0.75 * capacity
        assert max(world.limits_since(settled)) <= 1.25 * capacity
        assert world.rejected(settled) < 0.02
    assert world.rejected(0.0) < 0.02


@given(capacity=st.sampled_from([8, 32]), seed=st.integers(0, 1000))
@settings(max_examples=scaled(10), deadline=None)
def test_processes_that_stall_do_not_lower_the_limit(capacity: int, seed: int) -> None:
    """While a process stalls, fewer requests run than the limit allows, so that a higher limit seems to be accepted."""
    world = World(Service(capacity=capacity, duration_s=0.1), seed=seed)
    world.run(10.0)
    settled = world.now
    for _ in range(15):
        world.random.choice(world.clients).stalled_until = world.now + world.random.uniform(0.1, 1.0)
        world.run(world.random.uniform(1.0, 3.0))
    limits = world.limits_since(settled)
    assert sum(limit < 0.9 * capacity for limit in limits) / len(limits) <= 0.05


def test_service_that_rejects_everything_gets_one_request_per_second() -> None:
    world = World(Service(capacity=32, duration_s=0.1))
    world.run(20.0)
    world.service.rejects_all = True
    world.run(2.0)
    stopped = world.now
    world.run(30.0)
    assert 20 <= sum(moment >= stopped for moment, _ in world.service.arrivals) <= 31
    assert "everything is rejected" in world.ledger.status().reason
    world.service.rejects_all = False
    world.run(5.0)
    recovered = world.now
    world.run(10.0)
    assert world.throughput(recovered) >= 0.9 * 320


def test_restarted_ledger_sends_one_request_per_second_to_such_a_service() -> None:
    service = Service(capacity=32, duration_s=0.1)
    world = World(service, minimum=8)
    world.run(5.0)
    service.rejects_all = True
    world.run(5.0)
    restarted_at = world.now
    world.restart_ledger()
    world.run(20.0)
    assert len([at for at, _ in service.arrivals if at > restarted_at]) <= 20
    service.rejects_all, recovered_at = False, world.now
    world.run(10.0)
    assert world.throughput(since=recovered_at + 5.0) >= 0.9 * 32 / 0.1


def test_retry_after_delays_the_next_request() -> None:
    world = World(Service(capacity=32, duration_s=0.1, retry_after_s=5.0))
    world.run(10.0)
    world.service.rejects_all = True
    world.run(5.0)
    stopped = world.now
    world.run(30.0)
    assert 4 <= sum(moment >= stopped for moment, _ in world.service.arrivals) <= 7


def test_retry_after_delays_higher_limits() -> None:
    world = World(Service(capacity=32, duration_s=0.1, retry_after_s=5.0))
    world.run(20.0)
    for rejected_at in (at for at, accepted in world.service.arrivals if not accepted):
        limits = [limit for at, limit in world.limits if rejected_at + REPORT_INTERVAL_S <= at < rejected_at + 5.0]
        assert limits == sorted(limits, reverse=True)
    assert not all(accepted for _, accepted in world.service.arrivals)


@pytest.mark.parametrize("idle_s", [2.0, 10.9, 30.0])
@pytest.mark.parametrize("hanging", [0, 1])
def test_open_breaker_sends_one_request_after_idle_time(idle_s: float, hanging: int) -> None:
    world = World(Service(capacity=100, duration_s=10**6))
    for client in world.clients:
        client.wants = hanging
    world.run(0.1)
    assert world.ledger.adaptive
    world.ledger.adaptive.open_breaker(world.now)
    world.run(idle_s)
    resumed = world.now
    for client in world.clients:
        client.wants = 3
    world.run(9.0)
    assert sum(at > resumed for at, _ in world.service.arrivals) == 1
    world.run(5.0)
    assert sum(at > resumed for at, _ in world.service.arrivals) == 2


def test_limit_adapts_after_days_without_work() -> None:
    world = World(Service(capacity=32, duration_s=0.1))
    world.run(10.0)
    world.now += 10 * 86_400
    resumed = world.now
    world.run(5.0)
    assert world.throughput(since=resumed + 1.0) >= 0.9 * 32 / 0.1


def test_service_that_queues_is_not_overloaded() -> None:
    """It never rejects a request, but takes longer for each if there are more."""
    world = World(Service(capacity=16, duration_s=0.1, queues=True))
    world.run(30.0)
    settled = world.now
    world.run(30.0)
    assert world.throughput(settled) >= 0.9 * 160
    assert max(world.limits_since(settled)) <= 2.5 * 16


def test_rare_rejections_cost_little() -> None:
    class Unreliable(Service):
        def accept(self, now: float) -> bool:
            return super().accept(now) and dice.random() > 0.001

    dice = random.Random(0)
    world = World(Unreliable(capacity=10**6, duration_s=0.1), maximum=64)
    world.run(60.0)
    settled = world.now
    world.run(60.0)
    assert world.throughput(settled) >= 0.8 * 640


@given(
    phases=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 20)), min_size=1, max_size=3),
    clients=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@example(phases=[(1, 2), (1, 3)], clients=1, seed=0)
@settings(max_examples=scaled(15), deadline=None)
def test_limit_stays_in_range(phases: list[tuple[int, int]], clients: int, seed: int) -> None:
    """Each phase has another capacity and another minimum of the limit."""
    world = World(Service(capacity=1, duration_s=0.05), minimum=1, maximum=60, clients=clients, seed=seed)
    for capacity, minimum in phases:
        world.service.capacity = capacity
        world.ledger.set_policy(LimitPolicy(minimum, 60), world.now)
        since = world.now
        world.run(3.0)
        # 0 while the circuit breaker is open, and then one more than the requests that may hang
        assert all(minimum <= limit <= 60 or limit <= 1 for limit in world.limits_since(since))
        assert world.ledger.adaptive
        assert minimum <= world.ledger.adaptive.limit <= 60


def test_feedback_is_counted_once() -> None:
    """Reports carry totals, so that a lost one is made up for by the next, and a repeated one is ignored."""
    ledger, leased = Ledger(LimitPolicy(1, 8)), LeasedSlots("h")
    lost = []
    for number in range(5):
        leased.outcomes.succeed(leased.outcomes.epoch, 0.1)
        report = leased.report(float(number), in_use=0, wants=1, hold=1.0)
        if number % 2:
            lost.append(report)
        else:
            assert ledger.report(report, float(number))
            assert not ledger.report(report, float(number))
    for report in lost:
        assert not ledger.report(report, 6.0)
    assert ledger.succeeded == 4, "the first report only states what the holder did before"
    assert ledger.holders["h"].feedback == Feedback(succeeded=5, busy_s=pytest.approx(0.5), epoch_succeeded=5)
