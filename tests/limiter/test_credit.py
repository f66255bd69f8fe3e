"""Rates and budgets: what holders spend, in simulated time. `test_ledger.py` has the invariants under faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.limiter.ledger.credit_ledger import BURST_S, RATE_FRACTION
from toolroll.limiter.ledger.lease import LeasedSlots
from toolroll.limiter.ledger.ledger import LEASE_TTL_S, Checkpoint, Ledger
from toolroll.limiter.ledger.policy import UNLIMITED, LimitPolicy

STEP_S = 0.01

MAX_STEPS = 10
"""Maximum number of steps, each with a report, until a waiter is granted or refused."""


@dataclass
class Spender:
    """A process that spends credit as soon as it has some."""

    leased: LeasedSlots
    costs: deque[Mapping[str, float]] = field(default_factory=deque)
    """Costs of the waiters."""
    spent: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    refused: int = 0
    correction: Mapping[str, float] = field(default_factory=dict)
    """Difference between the true and the estimated cost of each use."""
    duration_s: float = 0.0
    """Duration of a use. Its cost is corrected when it ends."""
    running: deque[float] = field(default_factory=deque)
    """Times at which the running uses end."""
    is_answered: bool = True
    reported: Mapping[str, float] = field(default_factory=dict)
    """Cost of the first waiter in the latest report."""
    reported_in_use: int = 0

    def use_credit(self, now: float) -> None:
        while self.running and self.running[0] <= now:
            self.running.popleft()
            self.leased.credit.spend(self.correction)
        while self.costs:
            if self.leased.credit.exhausted(self.costs[0], now):
                self.costs.popleft()
                self.refused += 1
            elif len(self.running) < self.leased.usable(now) and self.leased.credit.suffices(self.costs[0], now):
                self.leased.credit.spend(self.costs[0])
                self.running.append(now + self.duration_s)
                self.spent.append((now, self.costs.popleft()))
            else:
                return

    def should_report(self, now: float) -> bool:
        if self.is_answered or bool(self.costs) != bool(self.reported) or self.leased.credit.has_unreported_refund:
            return True
        lease = self.leased.lease
        has_changed = len(self.running) != self.reported_in_use
        return lease.contended and has_changed and now >= self.leased.sent_at + lease.interval

    def total(self, unit: str) -> float:
        return sum(cost.get(unit, 0.0) for _, cost in self.spent)


class Market:
    """A ledger and processes that want credit, in steps of `STEP_S`."""

    def __init__(
        self, spenders: int, rates: Mapping[str, float], budgets: Mapping[str, float], limit: int = UNLIMITED
    ) -> None:
        self.ledger = Ledger(LimitPolicy(limit, limit, rates, budgets))
        self.spenders = [Spender(LeasedSlots(f"h{index}")) for index in range(spenders)]
        self.now = 50.0

    def want(self, count: int, **cost: float) -> None:
        """Add waiters to each process."""
        for spender in self.spenders:
            spender.costs += [{"requests": 1.0, **cost}] * count

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for spender in self.spenders:
                spender.use_credit(self.now)
                if spender.should_report(self.now):
                    self.report(spender)
            self.ledger.divide(self.now)
            for spender in self.spenders:
                name = spender.leased.holder
                due = self.now >= self.ledger.holders[name].reported_at + self.ledger.renewal_interval
                if not spender.is_answered and (lease := self.ledger.answer(name, due=due)):
                    spender.is_answered = spender.leased.apply(lease)

    def report(self, spender: Spender) -> None:
        credit, in_use, wants = spender.leased.credit, len(spender.running), len(spender.costs)
        first = credit.required(spender.costs[0]) if spender.costs and credit.has_accounts else {}
        wanted = {unit: wants * amount for unit, amount in first.items()}  # all costs are the same
        report = spender.leased.report(
            self.now,
            in_use=in_use,
            wants=in_use + wants,
            hold=1.0,
            first_cost=first,
            wanted_cost=credit.required(wanted),
        )
        self.ledger.report(report, self.now)
        spender.is_answered, spender.reported, spender.reported_in_use = False, first, in_use

    def total(self, unit: str) -> float:
        return sum(spender.total(unit) for spender in self.spenders)


@pytest.mark.parametrize("rate", [0.5, 3.0, 50.0, 500.0])
def test_rate_is_used_in_full(rate: float) -> None:
    market = Market(4, {"requests": rate}, {})
    market.want(round(rate * 40))
    market.run(30.0)
    assert RATE_FRACTION * rate * 29 - 2 <= market.total("requests") <= rate * 30 + 1


def test_both_rates_hold_and_the_scarcer_one_is_used_in_full() -> None:
    market = Market(4, {"requests": 100.0, "tokens": 6000.0}, {})
    market.want(2000, tokens=120.0)  # 50 requests per second
    market.run(30.0)
    assert 0.95 * 6000 * 30 <= market.total("tokens") <= 6000 * 30
    assert market.total("requests") == market.total("tokens") / 120


def test_use_that_costs_more_than_the_burst_waits_for_it() -> None:
    market = Market(2, {"tokens": 100.0}, {})
    market.want(10, tokens=500.0)
    market.run(31.0)
    assert 0.95 * 100 * 31 - 500 <= market.total("tokens") <= 100 * 31 + 500
    assert all(spender.spent for spender in market.spenders)


def test_shares_of_a_rate_are_proportional_to_demand() -> None:
    market = Market(2, {"requests": 50.0}, {})
    for spender, waiting in zip(market.spenders, (3000, 1000), strict=True):
        spender.costs = deque([{"requests": 1.0}] * waiting)
    market.run(20.0)
    large, small = (spender.total("requests") for spender in market.spenders)
    assert 2.2 <= large / small <= 3.8


@pytest.mark.parametrize(
    ("limit", "duration_s", "rate"), [(4, 1.0, 1000.0), (4, 1.0, 4.2), (4, 1.0, 8.0), (10, 1.0, 12.0), (6, 5.0, 1.5)]
)
def test_fewer_slots_than_processes_are_used_fairly(limit: int, duration_s: float, rate: float) -> None:
    market = Market(12, {"requests": rate}, {}, limit)
    for spender in market.spenders:
        spender.duration_s = duration_s
    market.want(1000)
    market.run(60.0)
    uses = [spender.total("requests") for spender in market.spenders]
    assert 0.9 * min(RATE_FRACTION * rate, limit / duration_s) * 60 <= sum(uses) <= rate * 60 + 1
    assert min(uses) >= 0.8 * max(uses)


def test_credit_of_a_rate_does_not_accumulate() -> None:
    market = Market(2, {"requests": 50.0}, {})
    market.run(60.0)
    market.want(1000)
    since = market.now
    market.run(1.0)
    burst = BURST_S * 50
    assert sum(at <= since + 0.1 for spender in market.spenders for at, _ in spender.spent) <= burst + 5


@given(total=st.integers(1, 100), spenders=st.integers(1, 5), cost=st.sampled_from([1.0, 3.0, 7.0]))
@settings(max_examples=scaled(30), deadline=None)
def test_budget_is_spent_to_the_last_use(total: int, spenders: int, cost: float) -> None:
    market = Market(spenders, {}, {"tokens": total})
    market.want(total + 1, tokens=cost)
    market.run(6.0)
    assert total - cost < market.total("tokens") <= total
    assert all(not spender.costs for spender in market.spenders), "the rest is refused"
    assert sum(spender.refused for spender in market.spenders) > 0


def test_budget_of_dead_processes_is_lost_in_small_parts() -> None:
    market = Market(4, {}, {"requests": 4000})
    market.want(10)
    market.run(0.5)
    victim = market.spenders.pop()
    market.ledger.mark_dead(victim.leased.holder, market.now)
    market.want(4000)
    market.run(20.0)
    spent = market.total("requests") + victim.total("requests")
    assert 0.9975 * 4000 <= spent <= 4000


def test_restarted_ledger_knows_what_is_spent() -> None:
    market = Market(3, {}, {"requests": 2000})
    market.want(200)
    market.run(1.0)
    saved = Checkpoint(*market.ledger.checkpoint())
    assert market.total("requests") == 600
    market.ledger = Ledger.restore(saved, market.now)
    for spender in market.spenders:
        spender.is_answered = True
    market.want(2000)
    market.run(30.0)
    assert 0.99 * 2000 <= market.total("requests") <= 2000


def test_unspent_budget_returns_when_a_process_stops() -> None:
    market = Market(2, {}, {"requests": 10_000})
    market.want(5)
    market.run(0.2)
    gone = market.spenders.pop()
    market.ledger.deregister(gone.leased.holder, market.now, gone.leased.credit.spent())
    assert market.ledger.credit.spent() == {"requests": 10.0}
    market.want(10_000)
    market.run(10.0)
    assert market.total("requests") == 9995


def test_true_cost_replaces_the_estimate() -> None:
    """Work whose cost is unknown before it ends is refused when the budget is spent."""
    market = Market(1, {}, {"usd": 1.0})
    [spender] = market.spenders
    for _ in range(40):
        before = len(spender.spent)
        market.want(1)
        market.run(0.1)
        spender.leased.credit.spend({"usd": 0.05 * (len(spender.spent) - before)})
    assert spender.refused == 40 - len(spender.spent)
    assert 20 <= len(spender.spent) <= 21


def test_budget_can_be_raised() -> None:
    market = Market(2, {}, {"requests": 10})
    market.want(20)
    market.run(3.0)
    assert market.total("requests") == 10
    market.ledger.set_policy(market.ledger.policy.changed(None, None, {}, {"requests": 30}), market.now)
    market.run(3.0)  # holders hear of it by the next renewal
    market.want(20)
    market.run(3.0)
    assert market.total("requests") == 30


def test_spent_budget_of_an_earlier_run_is_restored() -> None:
    market = Market(1, {}, {"requests": 10, "usd": 5})
    market.ledger.restore_spent({"requests": 8, "tokens": 100})
    market.ledger.restore_spent({"requests": 8})
    market.want(10)
    market.run(2.0)
    assert market.total("requests") == 2


@pytest.mark.parametrize("duration_s", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("estimate", [50.0, 500.0])
@pytest.mark.parametrize("spenders", [1, 4])
def test_too_high_estimates_do_not_stall_a_rate(spenders: int, estimate: float, duration_s: float) -> None:
    """The cost is corrected to a third, perhaps when the credit has expired."""
    market = Market(spenders, {"tokens": 100.0}, {})
    for spender in market.spenders:
        spender.correction, spender.duration_s = {"tokens": estimate / 3 - estimate}, duration_s
    market.want(400 // spenders, tokens=estimate)
    market.run(40.0)
    before = market.total("tokens")
    market.run(20.0)
    assert 0.9 * 100 * 20 <= (market.total("tokens") - before) / 3 <= 100 * 20 + estimate


def test_refunds_do_not_accumulate() -> None:
    market = Market(2, {"tokens": 100.0}, {})
    for spender in market.spenders:
        spender.correction, spender.duration_s = {"tokens": -90.0}, 10.0
    market.want(3, tokens=100.0)
    market.run(30.0)
    market.want(1000, tokens=1.0)
    before = market.total("tokens")
    market.run(0.1)
    assert market.total("tokens") - before <= BURST_S * 100 + 0.1 * 100


@pytest.mark.parametrize("rate", [1500.0, 500.0, 50.0])
def test_lowered_rate_holds_at_once(rate: float) -> None:
    """Requests are scarce at first, so that the processes have credit of tokens."""
    market = Market(4, {"requests": 45.0, "tokens": 4000.0}, {})
    for spender in market.spenders:
        spender.correction, spender.duration_s = {"tokens": -25.0}, 0.1
    market.want(1000, tokens=100.0)
    market.run(5.0)
    market.ledger.set_policy(market.ledger.policy.changed(None, None, {"tokens": rate}, {}), market.now)
    before = market.total("requests")
    market.run(10.0)
    assert 75.0 * (market.total("requests") - before) <= 1.05 * 10 * rate + 100
    market.run(10.0)
    before = market.total("requests")
    market.run(20.0)
    assert 0.95 * 20 * rate - 100 <= 75.0 * (market.total("requests") - before) <= 1.05 * 20 * rate + 100


def test_expensive_use_that_gives_up_leaves_no_burst() -> None:
    market = Market(2, {"tokens": 100.0}, {})
    costly, other = market.spenders
    other.costs = deque([{"tokens": 1.0}])  # the burst of the start is spent
    market.run(1.0)
    costly.costs = deque([{"tokens": 3000.0}])
    market.run(20.0)
    costly.costs.clear()
    other.costs = deque([{"tokens": 1.0}] * 3000)
    before = market.total("tokens")
    market.run(1.0)
    assert market.total("tokens") - before <= (BURST_S + 1.0) * 100 + 1


def test_too_high_estimates_do_not_hoard_a_budget() -> None:
    market = Market(2, {}, {"tokens": 1_000_000})
    idle, _ = market.spenders
    market.want(60, tokens=8000.0)
    market.run(3.0)
    for _ in idle.spent:
        idle.leased.credit.spend({"tokens": -7800.0})
    market.run(6.0)
    before = market.ledger.credit.spent()["tokens"]
    market.ledger.mark_dead(idle.leased.holder, market.now)
    market.spenders.remove(idle)
    assert market.ledger.credit.spent()["tokens"] - before <= 0.0025 * 1_000_000


@pytest.mark.parametrize("reported", [True, False])
def test_corrected_uses_do_not_exhaust_a_budget(reported: bool) -> None:
    """The only process had nearly the whole budget, by its estimates."""
    market = Market(1, {}, {"usd": 100.0})
    [spender] = market.spenders
    spender.correction, spender.duration_s = {"usd": -9.0}, 1.0
    market.want(10, usd=10.0)
    market.run(4.0 if reported else 1.5)
    market.want(3, usd=10.0)
    for _ in range(20):
        market.run(0.2)
        if not spender.costs:
            market.want(1, usd=10.0)
    assert spender.refused == 0
    assert len(spender.spent) > 15


def test_last_tokens_of_a_large_budget_are_refused() -> None:
    """Less is left than the sum of what was spent can be told from."""
    market = Market(1, {}, {"tokens": 5e9})
    [spender] = market.spenders
    market.run(0.1)
    spender.leased.credit.spend({"tokens": 5e9 - 3})
    market.want(1)
    market.run(0.2)
    assert spender.refused == 1


def test_restored_amount_is_in_the_checkpoint() -> None:
    ledger = Ledger(LimitPolicy.fixed(4)._replace(budgets={"usd": 10.0}))
    ledger.restore_spent({"usd": 8.0})
    assert Ledger.restore(ledger.checkpoint(), 0.0).credit.spent()["usd"] >= 8.0


def test_excess_of_a_process_that_stops_is_counted() -> None:
    market = Market(1, {}, {"usd": 10})
    market.want(1, usd=0.01)
    market.run(0.5)
    [spender] = market.spenders
    spender.leased.credit.spend({"usd": 4.99})
    market.ledger.deregister(spender.leased.holder, market.now, spender.leased.credit.spent())
    assert market.ledger.credit.spent() == {"usd": pytest.approx(5.0)}


@given(
    spenders=st.integers(1, 3),
    total=st.sampled_from([1.0, 0.7, 3.3, 1e6]),
    uses=st.integers(20, 300),
    corrections=st.lists(st.floats(-0.9, 0.5), min_size=1, max_size=5),
)
@example(spenders=1, total=1.0, uses=200, corrections=[-0.6, -0.3])
@settings(max_examples=scaled(60), deadline=None)
def test_waiter_is_granted_or_refused_soon(spenders: int, total: float, uses: int, corrections: list[float]) -> None:
    """Sums of corrected costs have errors, so that what is left may be nearly the cost of one use."""
    cost = total / uses
    market = Market(spenders, {}, {"usd": total})
    for number in range(12 * uses):
        for spender in market.spenders:
            spender.correction = {"usd": cost * corrections[number % len(corrections)]}
        market.want(1, usd=cost)
        for _ in range(MAX_STEPS):
            market.run(STEP_S)
            if not any(spender.costs for spender in market.spenders):
                break
        assert not any(spender.costs for spender in market.spenders), "neither granted nor refused"
        if all(spender.refused for spender in market.spenders):
            return
    raise AssertionError("the budget is not spent")


@pytest.mark.parametrize("is_restarted", [True, False])
def test_excess_of_a_silent_process_is_counted(is_restarted: bool) -> None:
    market = Market(1, {}, {"usd": 10})
    market.want(1, usd=0.01)
    market.run(0.5)
    [spender] = market.spenders
    if is_restarted:
        market.ledger = Ledger.restore(Checkpoint(*market.ledger.checkpoint()), market.now)
    else:
        market.now += LEASE_TTL_S
        market.ledger.divide(market.now)  # its credit counts as spent
        assert not market.ledger.holders
    spender.leased.credit.spend({"usd": 4.99})
    market.report(spender)
    assert 5.0 <= market.ledger.credit.spent()["usd"] <= 5.1


def test_overspent_budget_does_not_block_a_rate() -> None:
    """One process has credit of the budget, which another one has overspent."""
    market = Market(2, {"requests": 10.0}, {"usd": 10.0})
    market.want(1, usd=0.02)
    market.run(0.5)
    one, other = market.spenders
    one.leased.credit.spend({"usd": -0.015})
    other.leased.credit.spend({"usd": 20.0})
    market.run(3.0)  # the ledger hears of it by the next renewal
    assert one.leased.credit.left("budget:usd", market.now) == pytest.approx(0.015)
    one.costs.append({"requests": 1.0, "usd": 0.001})
    market.run(1.0)
    assert not one.costs
