"""Dispatch: every item is completed once, even if workers are lost, come back, or repeat requests."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from strategies import scaled

from toolroll.rollout.distributed.coordinator import WorkCoordinator
from toolroll.rollout.distributed.dispatch import (
    MAX_READ_AHEAD_ITEMS,
    WORKER_LEASE_S,
    Dispatch,
    WorkerLease,
    WorkItem,
)
from toolroll.rollout.distributed.worker import ItemCancelled, Worker

pytestmark = pytest.mark.virtual_time


def items(count: int) -> list[WorkItem[int]]:
    return [WorkItem(number, number) for number in range(count)]


def dispatch(count: int, *, workers: int = 1, registered: str = "a") -> Dispatch[int]:
    made = Dispatch(iter(items(count)), workers=workers)
    for name in registered:
        made.register(name, 0.0)
    return made


def test_items_of_lost_worker_come_before_new_ones() -> None:
    work = dispatch(10, workers=2, registered="ab")
    assert [item.key for item in work.take("a", 3, 1.0)] == [0, 1, 2]
    assert [item.key for item in work.take("b", 1, 9.0)] == [3]
    (lost,) = work.expire_leases(1.0 + WORKER_LEASE_S + 0.1)
    assert (lost.worker, [item.key for item in lost.items]) == ("a", [0, 1, 2])
    assert [item.key for item in work.take("b", 1, 12.0)] == [4], "the items of a are not settled yet"
    work.settle("a", committed=[1])
    assert [item.key for item in work.take("b", 2, 12.0)] == [0, 2]


def test_report_of_lost_worker_is_rejected() -> None:
    work = dispatch(1, registered="ab")
    work.take("a", 1, 0.0)
    work.renew_lease("b", WORKER_LEASE_S)
    work.expire_leases(WORKER_LEASE_S + 1)
    assert not work.renew_lease("a", WORKER_LEASE_S + 1)
    assert not work.complete("a", 0)
    work.settle("a", committed=[])
    assert [item.key for item in work.take("b", 5, WORKER_LEASE_S + 1)] == [0]
    assert not work.is_finished
    assert work.complete("b", 0)
    assert work.is_finished


def test_worker_takes_its_share_at_end_of_source() -> None:
    work = dispatch(128, workers=2, registered="a")
    assert len(work.take("a", 1000, 0.0)) == 64, "the second worker is expected"
    assert len(work.take("a", 1000, 0.0)) == 0
    work.register("b", 0.0)
    assert len(work.take("b", 1000, 0.0)) == 64


def test_missing_worker_does_not_block_the_end() -> None:
    work, done = dispatch(100, workers=4), 0
    while not work.is_finished:
        taken = work.take("a", 10, 0.0)
        assert taken
        done += sum(work.complete("a", item.key) for item in taken)
    assert done == 100


def test_read_ahead_is_bounded() -> None:
    read = Counter[str]()

    def endless() -> object:
        while True:
            read["items"] += 1
            yield WorkItem(read["items"], 0)

    work = Dispatch(endless(), workers=1000)  # type: ignore[arg-type]
    work.register("a", 0.0)
    assert len(work.take("a", 1024, 0.0)) == 1024
    assert read["items"] <= MAX_READ_AHEAD_ITEMS + 1024


def test_worker_stops_committing_before_its_lease_expires() -> None:
    lease = WorkerLease(0.0)
    assert lease.is_valid(WORKER_LEASE_S * 0.89)
    assert not lease.is_valid(WORKER_LEASE_S * 0.91)
    lease.renew(WORKER_LEASE_S * 0.5)
    assert lease.is_valid(WORKER_LEASE_S * 1.3)
    lease.renew(WORKER_LEASE_S * 0.4)
    assert lease.is_valid(WORKER_LEASE_S * 1.3), "a late answer does not shorten the lease"


async def test_suspended_coordinator_loses_no_worker() -> None:
    coordinator = WorkCoordinator(iter(items(3)))
    await coordinator.register("a")
    assert await coordinator.exchange("a", 1, [], 1)
    loop: Any = asyncio.get_running_loop()
    loop.now += 5 * WORKER_LEASE_S
    await asyncio.sleep(0.5 * WORKER_LEASE_S)
    assert coordinator.lost_workers == 0
    assert await coordinator.exchange("a", 2, [], 1), "its request was waiting"
    await asyncio.sleep(1.5 * WORKER_LEASE_S)
    assert coordinator.lost_workers == 1
    await coordinator.close()


async def test_late_copy_of_request_takes_no_items() -> None:
    coordinator = WorkCoordinator(iter(items(3)))
    await coordinator.register("a")
    answers = [await coordinator.exchange("a", sequence, [], 1) for sequence in (1, 2, 1)]
    assert [[item.key for item in answer.items] for answer in answers if answer] == [[0], [1], []]
    await coordinator.close()


async def test_copy_of_waiting_request_gets_the_same_items() -> None:
    coordinator = WorkCoordinator[int](iter([]), stays_open=True)
    await coordinator.register("a")
    requests = [asyncio.create_task(coordinator.exchange("a", 1, [], 1)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await coordinator.add(items(2))
    answers = await asyncio.gather(*requests)
    assert answers[0] is answers[1]
    assert [item.key for item in answers[0].items] == [0]
    await coordinator.close()


async def test_late_copies_do_not_revive_a_worker_that_left() -> None:
    coordinator = WorkCoordinator(iter(items(3)))
    await coordinator.register("a")
    await coordinator.deregister("a")
    await coordinator.register("a")
    assert await coordinator.exchange("a", 1, [], 1) is None
    await coordinator.close()


class CountingCoordinator(WorkCoordinator[int]):
    """Records the items that are counted."""

    def __init__(self, count: int) -> None:
        super().__init__(iter(items(count)))
        self.counted = Counter[Any]()

    def record_result(self, key: Any, result: Any) -> None:
        self.counted[key] += 1


@pytest.mark.parametrize("fraction", [0.5, 0.89, 0.91, 0.99, 1.5])
async def test_item_that_ends_too_late_to_be_committed_is_done_again(fraction: float) -> None:
    """The process is suspended while it runs items, for less than a lease or longer."""
    coordinator, commits, suspended = CountingCoordinator(3), Counter[int](), False
    loop: Any = asyncio.get_running_loop()

    async def execute(number: int) -> int:
        nonlocal suspended
        await asyncio.sleep(0.1)
        if not suspended:
            suspended = True
            loop.now += fraction * WORKER_LEASE_S
        return number

    async def commit(worker: str, number: int, result: int) -> None:
        commits[number] += 1

    async with asyncio.timeout(10 * WORKER_LEASE_S):
        await Worker(coordinator, execute, commit, capacity=2).run()
    assert coordinator.counted == commits == Counter({0: 1, 1: 1, 2: 1})
    await coordinator.close()


async def test_item_that_cancels_itself_stops_the_worker() -> None:
    coordinator = CountingCoordinator(3)

    async def execute(number: int) -> None:
        if number == 1:
            raise asyncio.CancelledError

    async def commit(worker: str, number: int, result: None) -> None: ...

    async with asyncio.timeout(10 * WORKER_LEASE_S):
        with pytest.raises(ItemCancelled, match="Work item 1: "):
            await Worker(coordinator, execute, commit, capacity=2).run()
    await coordinator.close()


class Cluster(RuleBasedStateMachine):
    """Workers that register, work, stop responding, die after a commit, come back and report late."""

    COUNT = 6

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.work = Dispatch(iter(items(self.COUNT)), workers=2)
        self.names = 0
        self.alive: dict[str, tuple[set[int], WorkerLease]] = {}
        self.committed: Counter[int] = Counter()
        """Number of commits of each item."""
        self.committed_by: dict[str, set[int]] = {}
        self.counted: Counter[int] = Counter()

    def _any_worker(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.alive)))

    @rule()
    @precondition(lambda self: len(self.alive) < 4)
    def register(self) -> None:
        name = f"w{self.names}"
        self.names += 1
        self.work.register(name, self.now)
        self.alive[name], self.committed_by[name] = (set(), WorkerLease(self.now)), set()

    @rule(data=st.data(), max_items=st.integers(0, 8), answer_is_lost=st.booleans())
    @precondition(lambda self: self.alive)
    def take(self, data: st.DataObject, max_items: int, answer_is_lost: bool) -> None:
        name = self._any_worker(data)
        held, lease = self.alive[name]
        if not self.work.renew_lease(name, self.now):
            del self.alive[name]
            return
        if not answer_is_lost:
            held.update(int(str(item.key)) for item in self.work.take(name, max_items, self.now))
            lease.renew(self.now)

    @rule(data=st.data(), reports=st.booleans())
    @precondition(lambda self: any(held for held, _ in self.alive.values()))
    def commit(self, data: st.DataObject, reports: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, (held, _) in self.alive.items() if held)))
        held, lease = self.alive[name]
        key = data.draw(st.sampled_from(sorted(held)))
        if lease.is_valid(self.now):
            held.discard(key)
            self.committed[key] += 1
            self.committed_by[name].add(key)
            if reports:
                self.counted[key] += self.work.complete(name, key)
            else:
                del self.alive[name]  # it dies before it can report the commit

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def die(self, data: st.DataObject) -> None:
        del self.alive[self._any_worker(data)]

    @rule(seconds=st.sampled_from([0.1, 0.3 * WORKER_LEASE_S, 0.95 * WORKER_LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.expire_leases()

    def expire_leases(self) -> None:
        for lost in self.work.expire_leases(self.now):
            pending = {int(str(item.key)) for item in lost.items}
            committed = self.committed_by[lost.worker] & pending
            for key in committed:
                self.counted[key] += 1
            self.work.settle(lost.worker, committed)

    @invariant()
    def no_item_is_done_twice(self) -> None:
        assert all(count == 1 for count in self.committed.values())
        assert all(count <= 1 for count in self.counted.values())

    def teardown(self) -> None:
        """Check that a worker that stays completes all remaining items."""
        self.alive.clear()
        self.work.register("last", self.now)
        for _ in range(200):
            self.now += 1.0
            self.expire_leases()
            for item in self.work.take("last", 5, self.now):
                self.committed[int(str(item.key))] += 1
                self.counted[int(str(item.key))] += self.work.complete("last", item.key)
            if self.work.is_finished:
                break
        assert self.work.is_finished
        assert self.committed == self.counted == Counter(range(self.COUNT))


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=scaled(100), stateful_step_count=40, deadline=None)


def test_stopped_dispatch_assigns_no_more_items() -> None:
    dispatch = Dispatch(iter([WorkItem(number, number) for number in range(9)]), workers=2)
    for worker in ("a", "b"):
        dispatch.register(worker, now=0.0)
        assert len(dispatch.take(worker, 2, now=0.0)) == 2
    dispatch.stop()
    assert dispatch.take("a", 2, now=0.0) == []
    assert not dispatch.is_finished, "assigned items are completed"
    dispatch.deregister("b")
    for item in list(dispatch.workers["a"].held):
        assert dispatch.complete("a", item)
    assert dispatch.is_finished
