"""Ledger: slots in use never exceed the limit, whatever happens to messages and holders."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import scaled

from toolroll.errors import ConfigError
from toolroll.limiter.ledger.credit_ledger import BURST_S, CREDIT_TTL_S
from toolroll.limiter.ledger.lease import HolderReport, Lease, LeasedSlots
from toolroll.limiter.ledger.ledger import CONTENDED_TICK_INTERVAL_S, LEASE_TTL_S, Checkpoint, Ledger
from toolroll.limiter.ledger.policy import LimitPolicy

HOLD_S = 3.0


@dataclass(eq=False)
class Work:
    """Work in one slot."""

    lease: int
    """Number of the lease by which the slot was granted."""
    epoch: int
    """Epoch of an adaptive limit in which it was granted."""
    expires_at: float
    ends_at: float | None = None
    """End of the work; None if the process has not sent it to the sandbox yet."""


@dataclass
class Process:
    """A simulated holder: its work, its waiters, and its side of the lease. The sandbox may reject its work."""

    leased: LeasedSlots
    work: list[Work] = field(default_factory=list)
    waiting: int = 0
    dead: bool = False
    spent: dict[str, float] = field(default_factory=dict)
    """Cost of its work by the estimates, minus the amounts that corrections returned."""
    fence: int = 0
    """Number of the lease up to which the sandbox rejects work that has not started."""

    def may_run(self, now: float) -> list[Work]:
        """Return the work that runs in the sandbox, or that the sandbox would accept."""
        return [
            work
            for work in self.work
            if work.ends_at is not None or not (self.dead or work.lease <= self.fence or now >= work.expires_at)
        ]


UNITS = ("requests", "tokens")
MAX_TOKENS = 5
RATES = st.fixed_dictionaries({}, optional={unit: st.floats(0.5, 50.0) for unit in UNITS})
BUDGETS = st.fixed_dictionaries({}, optional={unit: st.integers(1, 100) for unit in UNITS})
REFUND_S = 5 * CREDIT_TTL_S
"""Time after which a refund is forgotten, except for 1 %."""
WINDOWS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Windows in which the rates are checked."""

INDEX = st.integers(0, 2)
"""Index of a live process; there are always three."""


class Cluster(RuleBasedStateMachine):
    """Holders and a ledger, with a network that delays, duplicates, reorders and loses messages.

    The limit may adapt, and there may be rates and budgets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.cut: set[str] = set()
        self.to_ledger: list[HolderReport] = []
        self.to_holders: list[tuple[str, Lease]] = []
        self.to_fence: list[tuple[str, int, int]] = []
        """Confirmed fences in transit: holder, number of the lease, work that runs."""
        self.parked: set[str] = set()
        self.spends: list[tuple[float, str, float]] = []
        """Time, unit and amount that holders have spent, by the estimates."""
        self.returns: list[tuple[float, str, float]] = []
        """Time, unit and amount that corrections have returned."""
        self.refunds: list[tuple[float, str, float]] = []
        """Time, unit and amount of the refunds that the ledger has learned of."""
        self.first_costs: list[tuple[float, str, float]] = []
        """Time, unit and cost of the costliest first waiter that the ledger knows."""
        self.reports: dict[str, HolderReport] = {}
        """Latest report of each holder that the ledger has received."""
        self.excess: dict[str, float] = dict.fromkeys(UNITS, 0.0)
        """Amounts by which work has cost more than estimated, by unit."""
        self.restarts: list[float] = []

    @initialize(
        limit=st.integers(1, 12),
        minimum=st.none() | st.integers(1, 12),
        rates=RATES,
        budgets=BUDGETS,
        waiting=st.tuples(*[st.integers(0, 15)] * 3),
    )
    def start_cluster(
        self,
        limit: int,
        minimum: int | None,
        rates: dict[str, float],
        budgets: dict[str, float],
        waiting: tuple[int, ...],
    ) -> None:
        self.ledger = Ledger(LimitPolicy(min(limit, minimum or limit), limit, rates, budgets))
        self.rates = [(float("-inf"), rates)]
        self.save()
        self.limits = [(float("-inf"), self.ledger.limit)]
        for count in waiting:
            self.start_process(count)

    def divide(self) -> None:
        self.ledger.divide(self.now)
        self.limits.append((self.now, self.ledger.limit))
        for unit in UNITS:
            costs = (self.reports[name].credit.first.get(unit, 0.0) for name in self.ledger.holders)
            self.first_costs.append((self.now, unit, max(costs, default=0.0)))

    def receive(self, report: HolderReport) -> bool:
        """Pass a report to the ledger. Return False if it was ignored."""
        is_new = self.ledger.report(report, self.now)
        if is_new:
            self.add_refunds(report.holder, report.credit.refunded)
            self.reports[report.holder] = report
        return is_new

    def add_refunds(self, name: str, total: Mapping[str, float]) -> None:
        before = self.reports[name].credit.refunded if name in self.reports else {}
        self.refunds += [(self.now, unit, amount - before.get(unit, 0.0)) for unit, amount in total.items()]

    def start_process(self, waiting: int) -> None:
        name = f"p{len(self.processes)}"
        self.processes[name] = Process(LeasedSlots(name), waiting=waiting)

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.dead]

    # Processes

    @rule(index=INDEX, waiting=st.integers(0, 15))
    def change_demand(self, index: int, waiting: int) -> None:
        self.alive[index].waiting = waiting

    @rule(index=INDEX, hold=st.floats(0.1, HOLD_S), tokens=st.integers(0, MAX_TOKENS))
    def run(self, index: int, hold: float, tokens: int) -> None:
        """Grant as many slots as the lease and the credit allow."""
        process, cost = self.alive[index], {"requests": 1.0, "tokens": float(tokens)}
        leased = process.leased
        while (
            process.waiting
            and len(process.work) < leased.usable(self.now)
            and leased.allows(hold)
            and not leased.is_paused
            and leased.credit.suffices(cost, self.now)
        ):
            process.work.append(Work(leased.lease.seq, leased.outcomes.epoch, self.now + hold))
            process.waiting -= 1
            leased.credit.spend(cost)
            self.spends += [(self.now, unit, amount) for unit, amount in cost.items()]
            process.spent = {unit: process.spent.get(unit, 0.0) + amount for unit, amount in cost.items()}

    @rule(index=INDEX, unit=st.sampled_from(UNITS), fraction=st.floats(0.1, 1.0))
    def correct(self, index: int, unit: str, fraction: float) -> None:
        """Some work costs less than estimated."""
        process = self.alive[index]
        if amount := fraction * process.spent.get(unit, 0.0):
            process.spent[unit] -= amount
            process.leased.credit.spend({unit: -amount})
            self.returns.append((self.now, unit, amount))

    @rule(index=INDEX, unit=st.sampled_from(UNITS), amount=st.integers(1, 2 * MAX_TOKENS))
    def exceed_estimate(self, index: int, unit: str, amount: int) -> None:
        """Some work costs more than estimated."""
        self.alive[index].leased.credit.spend({unit: amount})
        self.excess[unit] += amount

    @rule(index=INDEX, rejected=st.integers(0, 3), retry_after=st.sampled_from([0.0, 0.0, 3.0]))
    def end_work(self, index: int, rejected: int, retry_after: float) -> None:
        """Some work is rejected by the sandbox, and the rest succeeds."""
        process = self.alive[index]
        for number, work in enumerate(process.work):
            if number < rejected:
                process.leased.reject(work.epoch, self.now + retry_after)
            else:
                process.leased.outcomes.succeed(work.epoch, 0.1)
        process.work = []

    @rule(index=INDEX)
    def send_work(self, index: int) -> None:
        """Send the work of all slots to the sandbox, perhaps long after the grant. It runs until they expire."""
        process = self.alive[index]
        process.work = process.may_run(self.now)  # the sandbox rejected the rest, so that its slots were released
        for work in process.work:
            work.ends_at = work.expires_at

    def report_of(self, process: Process, hold: float, tokens: int) -> HolderReport:
        in_use = len(process.work)
        lasts = max([hold, *(work.expires_at - self.now for work in process.work)])
        has_demand = process.waiting and process.leased.credit.has_accounts
        first = process.leased.credit.required({"requests": 1.0, "tokens": tokens}) if has_demand else {}
        return process.leased.report(
            self.now,
            in_use=in_use,
            wants=in_use + process.waiting,
            hold=lasts,
            first_cost=first,
            wanted_cost={unit: process.waiting * amount for unit, amount in first.items()},
        )

    @rule(index=INDEX, hold=st.floats(0.1, HOLD_S), tokens=st.integers(0, MAX_TOKENS))
    def send(self, index: int, hold: float, tokens: int) -> None:
        self.to_ledger.append(self.report_of(self.alive[index], hold, tokens))

    @rule(index=INDEX, hold=st.floats(0.1, HOLD_S), tokens=st.integers(0, MAX_TOKENS))
    def renew(self, index: int, hold: float, tokens: int) -> None:
        """The usual case: a report arrives, is answered, and the answer arrives."""
        process = self.alive[index]
        name = process.leased.holder
        if name not in self.cut and self.receive(self.report_of(process, hold, tokens)):
            self.divide()
            self.save()
            if lease := self.ledger.answer(name, due=True):
                process.leased.apply(lease)

    @rule(index=INDEX, seen=st.booleans(), waiting=st.integers(0, 15))
    def die(self, index: int, seen: bool, waiting: int) -> None:
        """Kill a process. Its work still runs in the sandbox, and another process takes its place."""
        process = self.alive[index]
        process.dead, process.waiting = True, 0
        if seen:
            self.ledger.mark_dead(process.leased.holder, self.now)
        self.start_process(waiting)

    @rule(index=INDEX, waiting=st.integers(0, 15))
    def stop(self, index: int, waiting: int) -> None:
        """Stop a process normally. Its reports may still be in transit."""
        process = self.alive[index]
        if not process.may_run(self.now):
            process.dead, process.waiting, process.work = True, 0, []
            process.leased.terminate()
            credit = process.leased.credit
            self.ledger.deregister(process.leased.holder, self.now, credit.spent())
            self.add_refunds(process.leased.holder, credit.report({}, {}, self.now).refunded)
            self.start_process(waiting)

    @rule()
    def fence(self) -> None:
        """The sandbox rejects the work of holders whose leases have ended, and confirms it."""
        for name, lease in self.ledger.fences().items():
            process = self.processes[name]
            process.fence = max(process.fence, lease)
            running = sum(work.lease <= lease and work.ends_at is not None for work in process.work)
            self.to_fence.append((name, lease, running))

    @rule(which=st.integers(0, 9))
    def deliver_fence(self, which: int) -> None:
        if self.to_fence:
            self.ledger.confirm_fence(*self.to_fence.pop(which % len(self.to_fence)))

    # Network

    @rule(index=INDEX)
    def partition_or_heal(self, index: int) -> None:
        self.cut ^= {self.alive[index].leased.holder}

    @rule(which=st.integers(0, 9), duplicated=st.booleans(), lost=st.booleans())
    def deliver_report(self, which: int, duplicated: bool, lost: bool) -> None:
        """Deliver any message in transit, not only the oldest. Messages of a partitioned process wait."""
        reachable = [report for report in self.to_ledger if report.holder not in self.cut]
        if reachable:
            report = reachable[which % len(reachable)]
            if not duplicated:
                self.to_ledger.remove(report)
            if not lost and self.receive(report):
                self.parked.add(report.holder)

    @rule(which=st.integers(0, 9), duplicated=st.booleans(), lost=st.booleans())
    def deliver_lease(self, which: int, duplicated: bool, lost: bool) -> None:
        reachable = [item for item in self.to_holders if item[0] not in self.cut]
        if reachable:
            item = reachable[which % len(reachable)]
            if not duplicated:
                self.to_holders.remove(item)
            if not lost:
                self.processes[item[0]].leased.apply(item[1])

    # Ledger

    @rule(due=st.booleans())
    def tick(self, due: bool) -> None:
        self.divide()
        for name in sorted(self.parked & self.ledger.holders.keys()):
            is_saved = self.ledger.required_revision(name) <= self.saved_revision
            if is_saved and (lease := self.ledger.answer(name, due=due)):
                self.parked.remove(name)
                self.to_holders.append((name, lease))
        self.parked &= self.ledger.holders.keys()

    @rule(limit=st.integers(0, 20), minimum=st.none() | st.integers(1, 20))
    def set_limit(self, limit: int, minimum: int | None) -> None:
        minimum = minimum and min(minimum, limit)
        self.ledger.set_policy(self.ledger.policy.changed(limit, minimum, {}, {}), self.now)
        self.save()
        self.limits.append((self.now, self.ledger.limit))

    @rule(factor=st.floats(0.5, 2.0))
    def set_rates(self, factor: float) -> None:
        rates = {unit: factor * rate for unit, rate in self.ledger.policy.rates.items()}
        self.ledger.set_policy(self.ledger.policy.changed(None, None, rates, {}), self.now)
        self.save()
        self.rates.append((self.now, rates))

    @rule(added=st.integers(1, 50))
    def raise_budgets(self, added: int) -> None:
        budgets = {unit: total + added for unit, total in self.ledger.policy.budgets.items()}
        self.ledger.set_policy(self.ledger.policy.changed(None, None, {}, budgets), self.now)
        self.save()

    @rule()
    def save(self) -> None:
        self.saved, self.saved_revision = self.ledger.checkpoint(), self.ledger.revision

    @rule()
    def restart(self) -> None:
        """Restart the actor: its state is lost, except for the last checkpoint."""
        self.ledger = Ledger.restore(Checkpoint(*json.loads(json.dumps(self.saved))), self.now)
        self.restarts.append(self.now)
        self.limits.append((self.now, self.ledger.limit))
        self.save()
        self.parked.clear()

    @rule(seconds=st.floats(0.01, 2.0) | st.just(LEASE_TTL_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes.values():
            process.work = [work for work in process.work if work.ends_at is None or work.ends_at > self.now]

    # Invariants

    @invariant()
    def usable_slots_never_exceed_limit(self) -> None:
        """Compare with the largest limit since the oldest work and the oldest lease may have started."""
        since = self.now - 2 * LEASE_TTL_S - HOLD_S
        recent = [limit for set_at, limit in self.limits if set_at >= since]
        before = [limit for set_at, limit in self.limits if set_at < since][-1:]
        may_be_used = sum(
            max(len(process.may_run(self.now)), 0 if process.dead else process.leased.usable(self.now))
            for process in self.processes.values()
        )
        assert may_be_used <= max([*recent, *before])

    @invariant()
    def reserved_is_sum_of_parts(self) -> None:
        held = sum(holder.reserved for holder in self.ledger.holders.values())
        assert self.ledger.reserved == held + self.ledger.quarantined

    @invariant()
    def rates_hold_in_all_windows(self) -> None:
        for length in WINDOWS_S:
            since = self.now - length
            before, recent = (
                [rates for at, rates in self.rates if (at < since) is is_before] for is_before in (True, False)
            )
            # What a restarted ledger does not know is spent in addition to what it hands out.
            bursts = 2 + sum(at >= since - CREDIT_TTL_S for at in self.restarts)
            for unit in self.ledger.policy.rates:
                rate = max(rates[unit] for rates in [*before[-1:], *recent])
                spent = sum(amount for at, one, amount in self.spends if at > since and one == unit)
                refunded = sum(amount for at, one, amount in self.refunds if at >= since - REFUND_S and one == unit)
                costs = (cost for at, one, cost in self.first_costs if at >= since - CREDIT_TTL_S and one == unit)
                assert spent <= 1.01 * refunded + rate * length + bursts * max([BURST_S * rate, *costs]) + 1e-6

    @invariant()
    def budgets_are_not_exceeded(self) -> None:
        for unit, total in self.ledger.policy.budgets.items():
            spent, returned = (
                sum(amount for _, one, amount in amounts if one == unit) for amounts in (self.spends, self.returns)
            )
            assert spent - returned <= total + self.excess[unit] + 1e-6

    @invariant()
    def adaptive_limit_is_in_range(self) -> None:
        policy = self.ledger.policy
        if self.ledger.adaptive:
            assert policy.min <= self.ledger.adaptive.limit <= policy.max

    @precondition(lambda self: self.ledger.limit > 0 and not self.ledger.policy.adapts)
    @rule()
    def limit_is_used_in_full_after_recovery(self) -> None:
        """Without further faults, and with demand everywhere, the whole limit is in use after a bounded time."""
        self.cut.clear()
        self.to_ledger.clear()
        self.to_holders.clear()
        for process in self.alive:
            process.waiting += 20
            process.work = []
        used: list[int] = []
        # The rest of the learning phase or a silent holder's lease, its work, and a second for the last slots to move.
        until = self.now + LEASE_TTL_S + HOLD_S + 1.0
        while self.now < until:
            self.wait(0.25)
            for process in self.alive:
                self.receive(self.report_of(process, HOLD_S, MAX_TOKENS))
            self.divide()
            self.save()
            for process in self.alive:
                if lease := self.ledger.answer(process.leased.holder, due=True):
                    process.leased.apply(lease)
            used.append(sum(process.leased.usable(self.now) for process in self.alive))
        # The maximum of several steps, as a rotating slot is unused while it moves.
        assert max(used[-4:]) == self.ledger.limit

    @precondition(lambda self: self.ledger.limit >= 3 and not self.ledger.policy.adapts)
    @precondition(lambda self: self.ledger.policy.rates and not self.ledger.policy.budgets)
    @rule()
    def rates_are_used_in_full_after_recovery(self) -> None:
        """Without further faults, and with demand everywhere, as much work starts as the lowest rate allows."""
        self.cut.clear()
        self.to_ledger.clear()
        self.to_holders.clear()
        step_s, recovery_s, measured_s = 0.05, LEASE_TTL_S + HOLD_S + 1.0, 5.0
        for process in self.alive:
            process.waiting, process.work = 10_000, []
        self.now += recovery_s  # corrections may have to be earned back, by the slowest rate
        self.now += max(self.excess[unit] / rate for unit, rate in self.ledger.policy.rates.items())
        measured_from = self.now + recovery_s
        while self.now < measured_from + measured_s:
            self.wait(step_s)
            for index, process in enumerate(self.alive):
                self.run(index, 1.0, tokens=1)
                process.work = []
                self.receive(self.report_of(process, HOLD_S, tokens=1))
            self.divide()
            self.save()
            for process in self.alive:
                if lease := self.ledger.answer(process.leased.holder, due=True):
                    process.leased.apply(lease)
        uses = sum(amount for at, unit, amount in self.spends if at > measured_from and unit == "requests")
        slots_per_s = 2 / step_s  # one per process and step, or fewer if one moves
        assert uses >= 0.9 * measured_s * min([*self.ledger.policy.rates.values(), slots_per_s]) - 1


Cluster.TestCase.settings = settings(max_examples=scaled(200), stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


class Network:
    """Holders whose reports are answered at once, for tests of the division."""

    def __init__(self, limit: int, wants: list[int], **kwargs: float) -> None:
        self.ledger = Ledger(LimitPolicy.fixed(limit), **kwargs)  # type: ignore[arg-type]
        self.now = 0.0
        self.holders = [LeasedSlots(f"h{number}") for number in range(len(wants))]
        self.wants = wants

    def step(self, seconds: float = 0.05) -> list[int]:
        self.now += seconds
        for holder, wants in zip(self.holders, self.wants, strict=True):
            in_use = min(wants, holder.usable(self.now))
            self.ledger.report(holder.report(self.now, in_use=in_use, wants=wants, hold=1.0), self.now)
        self.ledger.divide(self.now)
        for holder in self.holders:
            if lease := self.ledger.answer(holder.holder, due=True):
                holder.apply(lease)
        return [holder.usable(self.now) for holder in self.holders]

    def settle(self) -> list[int]:
        for _ in range(10):
            shares = self.step()
        return shares


def test_shares_are_proportional_to_demand() -> None:
    assert Network(32, [64, 64, 64, 64]).settle() == [8, 8, 8, 8]
    assert Network(27, [8, 16, 64, 128]).settle() == [1, 2, 8, 16]


def test_uncontended_holders_keep_spare_slots() -> None:
    network = Network(100, [5, 10])
    shares = network.settle()
    assert 5 <= shares[0] <= 10
    assert 10 <= shares[1] <= 20
    network.wants = [7, 3]
    assert network.settle() == shares, "slots that no other holder wants stay where they are"


def test_spare_slots_move_to_demand() -> None:
    network = Network(32, [30, 0])
    assert network.settle()[0] >= 30
    network.wants = [2, 30]
    assert network.settle() == [2, 30]
    network.wants = [0, 64]
    assert network.settle() == [0, 32]


def test_no_holder_starves_with_fewer_slots() -> None:
    network = Network(3, [1] * 10)
    turns = [0] * 10
    for _ in range(400):
        shares = network.step()
        assert sum(shares) <= 3
        turns = [turn + share for turn, share in zip(turns, shares, strict=True)]
    assert min(turns) > 0.5 * max(turns)


def test_small_demand_changes_move_few_slots() -> None:
    network = Network(32, [20, 21, 19, 20])
    before = network.settle()
    noise = random.Random(0)
    changes = 0
    for _ in range(100):
        network.wants = [wants + noise.choice((-1, 0, 1)) for wants in (20, 21, 19, 20)]
        shares = network.step()
        changes += sum(now != then for now, then in zip(shares, before, strict=True))
        before = shares
    assert changes <= 20, "small changes of demand must not move slots"


def test_slots_of_dead_holder_stay_in_quarantine() -> None:
    network = Network(10, [10, 10])
    assert network.settle() == [5, 5]
    network.ledger.mark_dead("h0", network.now)
    survivor = network.holders.pop()
    network.holders, network.wants = [survivor], [10]
    assert network.step(0.5) == [5]
    assert network.ledger.status().quarantined == 5
    assert network.step(0.6) == [10]
    assert network.ledger.status().quarantined == 0


def test_late_report_of_dead_holder_is_ignored() -> None:
    ledger = Ledger(LimitPolicy.fixed(4))
    dead = LeasedSlots("dead")
    late = dead.report(0.0, in_use=0, wants=4, hold=1.0)
    ledger.mark_dead("dead", 0.0)
    assert not ledger.report(late, 0.1)
    assert ledger.reserved == 0


def test_deregistered_slots_are_free_at_once() -> None:
    network = Network(10, [10, 10])
    network.settle()
    network.ledger.deregister("h0", network.now)
    network.holders, network.wants = network.holders[1:], [10]
    assert network.step() == [10]


def test_limit_can_be_lowered_and_raised() -> None:
    network = Network(32, [64, 64])
    assert network.settle() == [16, 16]
    network.ledger.set_policy(LimitPolicy.fixed(8), 0.0)
    assert network.settle() == [4, 4]
    network.ledger.set_policy(LimitPolicy.fixed(64), 0.0)
    assert network.settle() == [32, 32]
    assert {(holder.lease.limit, holder.lease.version) for holder in network.holders} == {(64, 2)}


def test_limit_keeps_its_range_when_the_maximum_changes() -> None:
    adapts, fixed = LimitPolicy(4, 64), LimitPolicy.fixed(4)
    for maximum in (4, 3, 0):
        lowered = adapts.changed(maximum, None, {}, {})
        assert not lowered.adapts
        assert lowered.changed(64, None, {}, {}) == adapts
        assert not fixed.changed(maximum, None, {}, {}).changed(64, None, {}, {}).adapts
    made_fixed = adapts.changed(None, 64, {}, {})
    assert not made_fixed.changed(128, None, {}, {}).adapts
    assert made_fixed.changed(128, 64, {}, {}).adapts
    with pytest.raises(ConfigError, match="minimum 100: it exceeds the maximum 64"):
        adapts.changed(None, 100, {}, {})


def test_restarted_ledger_learns_before_it_grants() -> None:
    network = Network(32, [16, 16])
    assert network.settle() == [16, 16]
    network.ledger.set_policy(LimitPolicy.fixed(40), 0.0)
    network.settle()
    network.ledger = Ledger.restore(network.ledger.checkpoint(), network.now)
    silent, network.holders, network.wants = network.holders[0], [network.holders[1], LeasedSlots("new")], [40, 8]
    held = [network.step() for _ in range(10)][-1]
    assert sum(held) <= 40 - 16
    assert held[1] == 0, "a new holder waits until the ledger knows all leases"
    assert network.ledger.limit == 40
    network.holders, network.wants = [*network.holders, silent], [30, 8, 16]
    assert sum(network.settle()) == 40, "the last holder has reported, so that learning is over"
    assert not network.ledger.learning


def test_restarted_ledger_waits_for_work_of_dead_holder() -> None:
    """The work of the dead holder lasts longer than any work that the other holders have announced."""
    ledger, victim = Ledger(LimitPolicy.fixed(32)), LeasedSlots("victim")
    ledger.report(victim.report(0.0, in_use=32, wants=32, hold=60.0), 0.0)
    ledger.mark_dead("victim", 0.1)
    restored = Network(32, [32])
    restored.ledger, restored.now = Ledger.restore(ledger.checkpoint(), 0.6), 0.6
    for _ in range(1100):
        if restored.now < 60.0:
            assert restored.step() == [0], "the victim's work still runs"
        else:
            restored.step()
    restored.now = 0.6 + LEASE_TTL_S + 60.0
    assert restored.settle() == [32]


def test_fenced_slots_are_free_at_once() -> None:
    network = Network(10, [10, 10])
    assert network.settle() == [5, 5]
    network.ledger.mark_dead("h0", network.now)
    network.holders, network.wants = network.holders[1:], [10]
    ((name, lease),) = network.ledger.fences().items()
    network.ledger.confirm_fence(name, lease, running=2)
    assert network.step() == [8], "two programs of the dead holder still run"
    network.ledger.confirm_fence(name, lease, running=0)
    assert network.step() == [10]


def test_fence_of_returned_holder_is_ignored() -> None:
    ledger, holder = Ledger(LimitPolicy.fixed(4)), LeasedSlots("h")
    ledger.report(holder.report(0.0, in_use=4, wants=4, hold=30.0), 0.0)
    ledger.divide(LEASE_TTL_S)
    ((name, lease),) = ledger.fences().items()
    assert ledger.report(holder.report(LEASE_TTL_S, in_use=4, wants=4, hold=30.0), LEASE_TTL_S)
    ledger.confirm_fence(name, lease, running=0)
    assert ledger.reserved == 4
    ledger.divide(2 * LEASE_TTL_S)
    assert ledger.fences()[name] > lease, "silent again, with a later lease"
    ledger.confirm_fence(name, lease, running=0)
    assert ledger.reserved == 4


def test_returned_holder_gets_only_free_slots() -> None:
    """A holder was suspended and its slots moved. When it returns, its requests have been rejected but not ended."""
    ledger, suspended, other = Ledger(LimitPolicy.fixed(10)), LeasedSlots("suspended"), LeasedSlots("other")
    ledger.report(suspended.report(0.0, in_use=10, wants=10, hold=60.0), 0.0)
    ledger.divide(LEASE_TTL_S)
    ledger.confirm_fence("suspended", ledger.fences()["suspended"], running=0)
    ledger.report(other.report(11.0, in_use=0, wants=10, hold=1.0), 11.0)
    ledger.divide(11.0)
    lease = ledger.answer("other", due=True)
    assert lease
    other.apply(lease)
    assert other.usable(11.0) == 10
    ledger.report(suspended.report(12.0, in_use=10, wants=10, hold=60.0), 12.0)
    ledger.divide(12.0)
    lease = ledger.answer("suspended", due=True)
    assert lease
    suspended.apply(lease)
    assert suspended.usable(12.0) == 0


def test_delayed_report_does_not_revive_expired_lease() -> None:
    """The report was sent before the lease expired and arrives when another holder has got the slots."""
    ledger, late, other = Ledger(LimitPolicy.fixed(10)), LeasedSlots("late"), LeasedSlots("other")
    ledger.report(late.report(0.0, in_use=0, wants=10, hold=0.1), 0.0)
    ledger.divide(0.0)
    lease = ledger.answer("late", due=True)
    assert lease
    late.apply(lease)
    delayed = late.report(8.9, in_use=0, wants=10, hold=0.1)
    for now in (10.0, 10.2, 10.3):  # the lease expires, the quarantine ends, the other holder gets the slots
        ledger.report(other.report(now, in_use=other.usable(now), wants=10, hold=0.1), now)
        ledger.divide(now)
        lease = ledger.answer("other", due=True)
        assert lease
        other.apply(lease)
    assert other.usable(10.4) == 10
    ledger.report(delayed, 10.4)
    ledger.divide(10.4)
    lease = ledger.answer("late", due=True)
    assert lease
    late.apply(lease)
    assert late.usable(10.4) + other.usable(10.4) <= 10


def test_checkpoint_is_saved_before_longer_hold_is_confirmed() -> None:
    ledger, holder = Ledger(LimitPolicy.fixed(4)), LeasedSlots("h")
    ledger.report(holder.report(0.0, in_use=0, wants=4, hold=1.0), 0.0)
    first = ledger.holders["h"].revision
    ledger.report(holder.report(0.1, in_use=0, wants=4, hold=1.0), 0.1)
    assert ledger.holders["h"].revision == first, "a renewal needs no new checkpoint"
    ledger.report(holder.report(0.2, in_use=0, wants=4, hold=2.0), 0.2)
    assert ledger.holders["h"].revision > first
    assert ledger.checkpoint() == Checkpoint(LimitPolicy.fixed(4), 0, LEASE_TTL_S, {"h": (2.0, None)}, 4, 0)


@pytest.mark.parametrize("crossing", [True, False])
def test_longer_hold_is_confirmed_even_if_it_is_reported_twice(crossing: bool) -> None:
    """A new waiter makes the holder report again before it has the answer, which it then ignores."""
    ledger, holder = Ledger(LimitPolicy.fixed(4)), LeasedSlots("h")

    def report(now: float, hold: float) -> Lease | None:
        ledger.report(holder.report(now, in_use=0, wants=4, hold=hold), now)
        ledger.divide(now)
        return ledger.answer("h", due=False)

    first = report(0.0, hold=1.0)
    assert first is not None
    assert holder.apply(first)
    assert report(0.1, hold=1.0) is None, "a renewal is answered when it is due"
    ledger.report(holder.report(0.2, in_use=0, wants=4, hold=2.0), 0.2)
    if crossing:
        assert ledger.answer("h", due=False) is not None
    answer = report(0.3, hold=2.0)
    assert answer is not None
    assert holder.apply(answer)
    assert holder.allows(2.0)


def test_leases_last_longer_with_many_holders() -> None:
    network = Network(10_000, [1] * 4000)
    network.step()
    assert network.ledger.renewal_interval * 500 >= 4000
    assert network.ledger.report_interval * 1000 >= 4000
    assert network.ledger.ttl >= 3 * network.ledger.renewal_interval


def test_late_or_duplicate_report_is_ignored() -> None:
    ledger, holder = Ledger(LimitPolicy.fixed(8)), LeasedSlots("h")
    early = holder.report(0.0, in_use=0, wants=0, hold=1.0)
    latest = holder.report(0.1, in_use=6, wants=6, hold=1.0)
    assert ledger.report(latest, 0.2)
    assert not ledger.report(early, 0.3)
    assert not ledger.report(latest, 0.4)
    assert (ledger.reserved, ledger.holders["h"].reported_at) == (6, 0.2)


@pytest.mark.parametrize("late", [True, False])
def test_only_answer_to_latest_report_renews(late: bool) -> None:
    ledger, holder = Ledger(LimitPolicy.fixed(8)), LeasedSlots("h")
    first = holder.report(0.0, in_use=0, wants=8, hold=1.0)
    ledger.report(first, 0.1)
    ledger.divide(0.1)
    answer = ledger.answer("h", due=True)
    assert answer is not None
    if late:
        holder.report(5.0, in_use=0, wants=8, hold=1.0)
    assert holder.apply(answer) is not late
    assert holder.usable(5.1) == (0 if late else 8)
    assert holder.usable(0.9 * LEASE_TTL_S) == 0


def test_ledger_without_demand_needs_few_ticks() -> None:
    assert Ledger(LimitPolicy.fixed(10)).max_tick_interval is None
    network = Network(10, [10, 10])
    network.settle()
    assert network.ledger.max_tick_interval == CONTENDED_TICK_INTERVAL_S
    network.wants = [5, 5]
    network.settle()
    assert network.ledger.max_tick_interval == network.ledger.renewal_interval / 5
    network.ledger.mark_dead("h0", network.now)
    assert network.ledger.max_tick_interval == CONTENDED_TICK_INTERVAL_S, "its slots return after a while"
    network.ledger.deregister("h1", network.now)
    network.ledger.divide(network.now + 10)
    assert network.ledger.max_tick_interval is None
