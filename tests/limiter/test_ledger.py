"""The ledger: whatever happens to messages and holders, no more slots may be used than the limit allows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toolroll.limiter.lease import Allowance, Lease, Report
from toolroll.limiter.ledger import LEASE_TTL, Ledger

HOLD = 3.0


@dataclass
class Process:
    """A holder as it really is: what it runs, and until when; what waits; and its side of the lease."""

    allowance: Allowance
    running: list[float] = field(default_factory=list)
    """When each thing that it runs ends by itself."""
    waiting: int = 0
    dead: bool = False


WHO = st.integers(0, 2)
"""Which of the processes alive; there are always three."""


class Cluster(RuleBasedStateMachine):
    """Holders and a ledger with a network between them that delays, doubles, reorders and loses messages."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.cut: set[str] = set()
        self.to_ledger: list[Report] = []
        self.to_holders: list[tuple[str, Lease]] = []
        self.parked: set[str] = set()

    @initialize(limit=st.integers(1, 12), waiting=st.tuples(*[st.integers(0, 15)] * 3))
    def begin(self, limit: int, waiting: tuple[int, ...]) -> None:
        self.ledger = Ledger(limit)
        self.limits = [(float("-inf"), limit)]
        for count in waiting:
            self.start(count)

    def start(self, waiting: int) -> None:
        name = f"p{len(self.processes)}"
        self.processes[name] = Process(Allowance(name), waiting=waiting)

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.dead]

    # What processes do

    @rule(who=WHO, waiting=st.integers(0, 15))
    def change_its_mind(self, who: int, waiting: int) -> None:
        self.alive[who].waiting = waiting

    @rule(who=WHO, hold=st.floats(0.1, HOLD))
    def run(self, who: int, hold: float) -> None:
        """Begin as much as the lease allows."""
        process = self.alive[who]
        allowance = process.allowance
        while process.waiting and len(process.running) < allowance.usable(self.now) and allowance.allows(hold):
            process.running.append(self.now + hold)
            process.waiting -= 1

    def report_of(self, process: Process, hold: float) -> Report:
        in_use = len(process.running)
        lasts = max([hold, *(end - self.now for end in process.running)])
        return process.allowance.report(self.now, in_use=in_use, wants=in_use + process.waiting, hold=lasts)

    @rule(who=WHO, hold=st.floats(0.1, HOLD))
    def send(self, who: int, hold: float) -> None:
        self.to_ledger.append(self.report_of(self.alive[who], hold))

    @rule(who=WHO, hold=st.floats(0.1, HOLD))
    def renew(self, who: int, hold: float) -> None:
        """What happens most of the time: a report arrives, is answered, and the answer arrives."""
        process = self.alive[who]
        name = process.allowance.holder
        if name not in self.cut and self.ledger.report(self.report_of(process, hold), self.now):
            self.ledger.divide(self.now)
            if lease := self.ledger.answer(name, self.now, due=True):
                process.allowance.apply(lease)

    @rule(who=WHO, seen=st.booleans(), waiting=st.integers(0, 15))
    def die(self, who: int, seen: bool, waiting: int) -> None:
        """What it ran goes on in the sandbox. Another process takes its place."""
        process = self.alive[who]
        process.dead, process.waiting = True, 0
        if seen:
            self.ledger.gone(process.allowance.holder, self.now)
        self.start(waiting)

    # What the network does

    @rule(who=WHO)
    def partition_or_heal(self, who: int) -> None:
        self.cut ^= {self.alive[who].allowance.holder}

    @rule(which=st.integers(0, 9), doubled=st.booleans(), lost=st.booleans())
    def deliver_report(self, which: int, doubled: bool, lost: bool) -> None:
        """Any message under way, not only the oldest: reordered. One from behind a cut waits for its healing."""
        reachable = [report for report in self.to_ledger if report.holder not in self.cut]
        if reachable:
            report = reachable[which % len(reachable)]
            if not doubled:
                self.to_ledger.remove(report)
            if not lost and self.ledger.report(report, self.now):
                self.parked.add(report.holder)

    @rule(which=st.integers(0, 9), doubled=st.booleans(), lost=st.booleans())
    def deliver_lease(self, which: int, doubled: bool, lost: bool) -> None:
        reachable = [item for item in self.to_holders if item[0] not in self.cut]
        if reachable:
            item = reachable[which % len(reachable)]
            if not doubled:
                self.to_holders.remove(item)
            if not lost:
                self.processes[item[0]].allowance.apply(item[1])

    # What the ledger does

    @rule(due=st.booleans())
    def tick(self, due: bool) -> None:
        self.ledger.divide(self.now)
        for name in sorted(self.parked & self.ledger.holders.keys()):
            if lease := self.ledger.answer(name, self.now, due=due):
                self.parked.remove(name)
                self.to_holders.append((name, lease))
        self.parked &= self.ledger.holders.keys()

    @rule(limit=st.integers(0, 20))
    def set_limit(self, limit: int) -> None:
        self.ledger.set_limit(limit)
        self.limits.append((self.now, limit))

    @rule()
    def restart(self) -> None:
        """The actor died: all that it knew is lost, but for what it was made with."""
        self.ledger = Ledger(self.limits[0][1], restarted=self.now)
        self.parked.clear()

    @rule(seconds=st.floats(0.01, 2.0) | st.just(LEASE_TTL))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes.values():
            process.running = [end for end in process.running if end > self.now]

    # What must hold

    @invariant()
    def never_more_usable_than_the_limit(self) -> None:
        """Against the largest limit of the time that the oldest work and the oldest lease may date from.

        A ledger that was restarted knows of a change only from the holders who heard of it: then any limit that was
        ever set may be the one that it goes by.
        """
        since = self.now - 2 * LEASE_TTL - HOLD
        recent = [limit for set_at, limit in self.limits if set_at >= since or self.ledger.restarted is not None]
        before = [limit for set_at, limit in self.limits if set_at < since][-1:]
        may_be_used = sum(
            max(len(process.running), 0 if process.dead else process.allowance.usable(self.now))
            for process in self.processes.values()
        )
        assert may_be_used <= max([*recent, *before])

    @invariant()
    def the_sum_is_right(self) -> None:
        held = sum(holder.reserved for holder in self.ledger.holders.values())
        assert self.ledger.reserved == held + self.ledger.quarantined

    @precondition(lambda self: self.ledger.limit > 0)
    @rule()
    def what_is_wanted_is_granted_within_one_lease(self) -> None:
        """From here on everything works and everybody reports: whatever came before, the limit is used in full."""
        self.cut.clear()
        self.to_ledger.clear()
        self.to_holders.clear()
        for process in self.alive:
            process.waiting += 20
        used: list[int] = []
        # What is left to learn, a silent holder's lease, the rest of its work; a second for the last slots to move.
        learning = max(0.0, (self.ledger.restarted or self.now) + LEASE_TTL - self.now)
        until = self.now + learning + LEASE_TTL + HOLD + 1.0
        while self.now < until:
            self.wait(0.25)
            for process in self.alive:
                self.ledger.report(self.report_of(process, HOLD), self.now)
            self.ledger.divide(self.now)
            for process in self.alive:
                if lease := self.ledger.answer(process.allowance.holder, self.now, due=True):
                    process.allowance.apply(lease)
            used.append(sum(process.allowance.usable(self.now) for process in self.alive))
        # Of the last steps the best: a slot that goes round is at nobody's disposal while it moves.
        assert max(used[-4:]) == self.ledger.limit


Cluster.TestCase.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


class Network:
    """Holders that report at once and are answered at once: for tests of how slots are divided."""

    def __init__(self, limit: int, wants: list[int], **kwargs: float) -> None:
        self.ledger = Ledger(limit, **kwargs)  # type: ignore[arg-type]
        self.now = 0.0
        self.holders = [Allowance(f"h{number}") for number in range(len(wants))]
        self.wants = wants

    def step(self, seconds: float = 0.05) -> list[int]:
        self.now += seconds
        for holder, wants in zip(self.holders, self.wants, strict=True):
            in_use = min(wants, holder.usable(self.now))
            self.ledger.report(holder.report(self.now, in_use=in_use, wants=wants, hold=1.0), self.now)
        self.ledger.divide(self.now)
        for holder in self.holders:
            if lease := self.ledger.answer(holder.holder, self.now, due=True):
                holder.apply(lease)
        return [holder.usable(self.now) for holder in self.holders]

    def settle(self) -> list[int]:
        for _ in range(10):
            shares = self.step()
        return shares


def test_shares_are_in_proportion_to_what_is_wanted() -> None:
    assert Network(32, [64, 64, 64, 64]).settle() == [8, 8, 8, 8]
    assert Network(27, [8, 16, 64, 128]).settle() == [1, 2, 8, 16]


def test_enough_for_all_is_given_with_some_to_spare_and_kept() -> None:
    network = Network(100, [5, 10])
    shares = network.settle()
    assert 5 <= shares[0] <= 10
    assert 10 <= shares[1] <= 20
    network.wants = [7, 3]
    assert network.settle() == shares, "what nobody else wants is left where it is"


def test_slack_goes_to_whoever_wants_it() -> None:
    network = Network(32, [30, 0])
    assert network.settle()[0] >= 30
    network.wants = [2, 30]
    assert network.settle() == [2, 30]
    network.wants = [0, 64]
    assert network.settle() == [0, 32]


def test_nobody_starves_where_slots_are_fewer_than_holders() -> None:
    network = Network(3, [1] * 10)
    turns = [0] * 10
    for _ in range(400):
        shares = network.step()
        assert sum(shares) <= 3
        turns = [turn + share for turn, share in zip(turns, shares, strict=True)]
    assert min(turns) > 0.5 * max(turns)


def test_a_quiet_division_changes_nothing() -> None:
    network = Network(32, [20, 21, 19, 20])
    before = network.settle()
    noise = random.Random(0)
    changes = 0
    for _ in range(100):
        network.wants = [wants + noise.choice((-1, 0, 1)) for wants in (20, 21, 19, 20)]
        shares = network.step()
        changes += sum(now != then for now, then in zip(shares, before, strict=True))
        before = shares
    assert changes <= 20, "small changes of what is wanted must not make slots jump about"


def test_a_dead_holders_slots_stay_in_quarantine_until_its_work_must_have_ended() -> None:
    network = Network(10, [10, 10])
    assert network.settle() == [5, 5]
    network.ledger.gone("h0", network.now)
    survivor = network.holders.pop()
    network.holders, network.wants = [survivor], [10]
    assert network.step(0.5) == [5]
    assert network.ledger.standing(network.now).quarantined == 5
    assert network.step(0.6) == [10]
    assert network.ledger.standing(network.now).quarantined == 0


def test_the_last_messages_of_a_dead_holder_take_nothing() -> None:
    ledger = Ledger(4)
    dead = Allowance("dead")
    late = dead.report(0.0, in_use=0, wants=4, hold=1.0)
    ledger.gone("dead", 0.0)
    assert not ledger.report(late, 0.1)
    assert ledger.reserved == 0


def test_who_leaves_gives_back_at_once() -> None:
    network = Network(10, [10, 10])
    network.settle()
    network.ledger.leave("h0", network.now)
    network.holders, network.wants = network.holders[1:], [10]
    assert network.step() == [10]


def test_a_lower_limit_is_reached_as_work_ends_and_a_higher_one_at_once() -> None:
    network = Network(32, [64, 64])
    assert network.settle() == [16, 16]
    network.ledger.set_limit(8)
    assert network.settle() == [4, 4]
    network.ledger.set_limit(64)
    assert network.settle() == [32, 32]
    assert {(holder.limit, holder.version) for holder in network.holders} == {(64, 2)}


def test_a_restarted_ledger_confirms_and_learns_the_limit_and_gives_nothing_new() -> None:
    network = Network(32, [16, 16, 0])
    assert network.settle()[:2] == [16, 16]
    network.ledger.set_limit(40)
    network.settle()
    network.ledger = Ledger(32, restarted=network.now)
    network.wants = [16, 30, 8]
    held = network.step()
    assert sum(held) <= 40
    assert held[2] == 0, "a newcomer waits until all have been heard"
    assert network.ledger.limit == 40
    network.now += LEASE_TTL
    assert sum(network.settle()) == 40


def test_leases_last_longer_where_holders_are_many() -> None:
    network = Network(10_000, [1] * 4000)
    network.step()
    assert network.ledger.renewal * 500 >= 4000
    assert network.ledger.interval * 1000 >= 4000
    assert network.ledger.ttl >= 3 * network.ledger.renewal


def test_a_report_that_comes_late_or_twice_is_void() -> None:
    ledger, holder = Ledger(8), Allowance("h")
    early = holder.report(0.0, in_use=0, wants=0, hold=1.0)
    latest = holder.report(0.1, in_use=6, wants=6, hold=1.0)
    assert ledger.report(latest, 0.2)
    assert not ledger.report(early, 0.3)
    assert not ledger.report(latest, 0.4)
    assert (ledger.reserved, ledger.holders["h"].heard) == (6, 0.2)


@pytest.mark.parametrize("late", [True, False])
def test_only_the_answer_to_the_latest_report_renews(late: bool) -> None:
    ledger, holder = Ledger(8), Allowance("h")
    first = holder.report(0.0, in_use=0, wants=8, hold=1.0)
    ledger.report(first, 0.1)
    ledger.divide(0.1)
    answer = ledger.answer("h", 0.1, due=True)
    assert answer is not None
    if late:
        holder.report(5.0, in_use=0, wants=8, hold=1.0)
    assert holder.apply(answer) is not late
    assert holder.usable(5.1) == (0 if late else 8)
    assert holder.usable(0.9 * LEASE_TTL) == 0
