"""Credit for rates and budgets that holders lease and spend.

No clock and no I/O: the caller passes the time, in seconds.

A resource has accounts: one for each rate and one for each budget. A lease states for each account how much a holder
may have spent in total, since its start. The holder spends credit locally, and reports how much it has spent. The
difference is its *outstanding* credit. As all amounts are totals, lost, repeated and reordered messages do no harm.

If work costs less than estimated, the difference is *refunded*. A refund of a budget is outstanding credit of the
holder again. Credit of a rate may have expired meanwhile, so its refunds go to the ledger: the holder reports their
total.

This module has the messages and the holders' side; `credit_ledger.py` has the ledger's side, and the invariants.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

EPSILON = 1e-12
"""Relative error of sums. For a budget, relative to its total."""

MIN_COST, MIN_COST_FRACTION = 1e-6, 1e-9
"""Minimum credit to start work of unknown cost: an amount, and a fraction of the spent amount and of the budget,
because smaller amounts vanish in their sums."""

Amounts = Mapping[str, float]
"""Amounts by unit, or by account."""

NO_AMOUNTS: Amounts = {}

RATE, BUDGET = "rate:", "budget:"
"""Prefixes of the names of accounts. The rest is the unit."""


def unit_of(account: str) -> str:
    """Return the unit of an account."""
    return account.split(":", 1)[1]


def exceeds(needed: float, available: float, total: float) -> bool:
    """Return True if an amount exceeds the available one by more than the error of sums.

    The ledger and the holders use it for all decisions about a budget, so that work is either granted or refused.

    Args:
        needed: Amount that work needs.
        available: Amount that is available.
        total: Total of the budget, to which the error is relative.
    """
    return needed > available + EPSILON * total


class CreditReport(NamedTuple):
    """A holder's credit and its demand. Sent as a plain tuple."""

    allowed: Amounts = NO_AMOUNTS
    """Total that it may have spent by its current lease, by account."""
    spent: Amounts = NO_AMOUNTS
    """Total that it has spent, by unit."""
    first: Amounts = NO_AMOUNTS
    """Cost of its first waiter, by unit."""
    wanted: Amounts = NO_AMOUNTS
    """Cost of all waiters, by unit."""
    refunded: Amounts = NO_AMOUNTS
    """Total of all refunds, which `spent` does not include, by unit."""

    def spent_of(self, account: str) -> float:
        """Return the total that the holder has spent of an account. That of a rate includes what was refunded."""
        unit = unit_of(account)
        refunded = self.refunded.get(unit, 0.0) if account.startswith(RATE) else 0.0
        return self.spent.get(unit, 0.0) + refunded


class CreditLease(NamedTuple):
    """Credit of a holder. Sent as a plain tuple."""

    allowed: Amounts = NO_AMOUNTS
    """Total that the holder may have spent, by account."""
    obtainable: Amounts = NO_AMOUNTS
    """Amount of each budget that it could get beyond that, by account, if all other holders returned theirs."""
    ttl: float = 0.0
    """Lifetime of the credit of rates, starting when the report was sent."""
    spent: Amounts = NO_AMOUNTS
    """Total that all holders have spent of each budget, by unit, by their latest reports."""


class LeasedCredit:
    """A holder's credit."""

    def __init__(self) -> None:
        self.lease = CreditLease()
        self._budgets: Amounts = NO_AMOUNTS
        """Total of each budget, by unit."""
        self._spent: dict[str, float] = {}
        self._refunded: dict[str, float] = {}
        self._totals = CreditReport(spent=self._spent, refunded=self._refunded)
        self._reported = CreditReport()
        """The latest report."""
        self._confirmed = CreditReport()
        """The report that the lease answers."""
        self._rates_expire_at = -inf

    @property
    def has_accounts(self) -> bool:
        """Whether the resource has rates or budgets."""
        return bool(self.lease.allowed)

    @property
    def has_unreported_refund(self) -> bool:
        """Whether the latest report lacks a refund that other work may wait for.

        A refund of a budget matters if less is spent than reported. While uses start, more is spent.
        """
        reported = self._reported
        return any(
            self._refunded.get(unit_of(account)) != reported.refunded.get(unit_of(account))
            if account.startswith(RATE)
            else self._spent.get(unit_of(account), 0.0) < reported.spent.get(unit_of(account), 0.0)
            for account in self.lease.allowed
        )

    def required(self, cost: Amounts) -> Amounts:
        """Return the credit that work needs to start, by unit, given its estimated cost."""
        return {unit: self._required(unit, cost) for unit in map(unit_of, self.lease.allowed)}

    def suffices(self, cost: Amounts, now: float) -> bool:
        """Return True if work of this cost may start."""
        return all(self._covers(account, cost, now) for account in self.lease.allowed)

    def missing(self, cost: Amounts, now: float) -> Amounts:
        """Return the cost in each account whose credit does not suffice for it."""
        accounts = (account for account in self.lease.allowed if not self._covers(account, cost, now))
        return {account: cost.get(unit_of(account), 0.0) for account in accounts}

    def left(self, account: str, now: float) -> float:
        """Return the credit of an account that is left."""
        if account.startswith(RATE) and now >= self._rates_expire_at:
            return 0.0
        return self.lease.allowed[account] - self._totals.spent_of(account)

    def is_low(self, now: float) -> bool:
        """Return True if half of an account's credit is spent, and the ledger does not know it."""
        if self._spent == self._reported.spent and self._refunded == self._reported.refunded:
            return False
        return any(
            self.left(account, now) < (allowed - self._confirmed.spent_of(account)) / 2
            for account, allowed in self.lease.allowed.items()
        )

    def exhausted(self, cost: Amounts, now: float) -> tuple[str, float] | None:
        """Return the unit and remaining amount of a budget that cannot cover the cost, or None."""
        for account, obtainable in self.lease.obtainable.items():
            unit, left = unit_of(account), max(0.0, self.left(account, now)) + obtainable
            if exceeds(self._required(unit, cost), left, self._budgets.get(unit, 0.0)):
                return unit, left
        return None

    def spent(self) -> dict[str, float]:
        """Return the total that the holder has spent, by unit."""
        return dict(self._spent)

    def spent_by_all(self) -> dict[str, float]:
        """Return the amount of each budget that all holders have spent, by unit, including the latest of this one."""
        return {
            unit: amount + self._spent.get(unit, 0.0) - self._confirmed.spent.get(unit, 0.0)
            for unit, amount in self.lease.spent.items()
        }

    def spend(self, cost: Amounts) -> None:
        """Subtract the cost of work that starts, or the difference to its true cost."""
        for unit, amount in cost.items():
            self._spent[unit] = self._spent.get(unit, 0.0) + amount
            if amount < 0:
                self._refunded[unit] = self._refunded.get(unit, 0.0) - amount

    def report(self, first: Amounts, wanted: Amounts, now: float) -> CreditReport:
        """Return the state to report."""
        is_expired = now >= self._rates_expire_at
        allowed = {
            account: self._totals.spent_of(account) if is_expired and account.startswith(RATE) else amount
            for account, amount in self.lease.allowed.items()
        }
        self._reported = CreditReport(allowed, dict(self._spent), first, wanted, dict(self._refunded))
        return self._reported

    def apply(self, lease: CreditLease, budgets: Amounts, sent_at: float, usable_fraction: float) -> None:
        """Replace the credit by that of a lease which answers a report, and the totals of the budgets."""
        self.lease, self._budgets = lease, budgets
        self._rates_expire_at = sent_at + usable_fraction * lease.ttl
        self._confirmed = self._reported

    def _covers(self, account: str, cost: Amounts, now: float) -> bool:
        unit = unit_of(account)
        amount, left = cost.get(unit, 0.0), self.left(account, now)
        if not amount:
            return left > 0
        total = self._budgets.get(unit, 0.0) if account.startswith(BUDGET) else abs(self.lease.allowed[account])
        return not exceeds(amount, left, total)

    def _required(self, unit: str, cost: Amounts) -> float:
        total = max(self._spent.get(unit, 0.0) + self._refunded.get(unit, 0.0), self._budgets.get(unit, 0.0))
        return max(cost.get(unit, 0.0), MIN_COST, MIN_COST_FRACTION * total)
