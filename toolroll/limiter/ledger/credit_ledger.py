"""The ledger's side of rates and budgets: accounts, whose credit is distributed among holders.

No clock and no I/O: the caller passes the time, in seconds. `credit.py` describes credit, and has the holders' side.

Invariants:

- **Rates.** In any time t, at most `rate · t` plus a burst plus refunds is spent, by the estimated costs. The burst is
  `BURST_S` seconds of the rate, or the cost of one use that waits if that is more. The refunds are those of this time
  and of a few seconds before it: they can be spent at once, and do not accumulate. Credit that a holder does not report
  on within `CREDIT_TTL_S` expires at the holder, and counts as spent.
- **Budgets.** The sum that all holders may have spent, dead ones included, never exceeds the total. Credit of a dead
  holder counts as spent. A holder gets at most `BUDGET_CHUNK` of the total at a time, so that little is lost.
- **Restart.** A checkpoint has the amount of each budget that may have been granted. A restored ledger has no credit
  of rates, and earns it from then on.
- **Correction.** The true cost may exceed the estimated one, and then also the credit. The excess is subtracted from
  the credit that is granted next, so that budgets are exceeded by at most the excess of the work in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from toolroll.limiter.ledger.credit import (
    BUDGET,
    EPSILON,
    RATE,
    Amounts,
    CreditLease,
    CreditReport,
    exceeds,
    unit_of,
)
from toolroll.limiter.ledger.policy import LimitPolicy

BURST_S = 0.4
"""Burst of a rate, in seconds of the rate."""

RATE_FRACTION = 0.975
"""Fraction of a rate that is granted. The rest allows for a burst and for requests that travel longer than others:
in any 10 seconds, the resource receives at most 1.05 times the rate."""

CREDIT_TTL_S = 1.0
"""Lifetime of the credit of a rate. That of a dead holder does not delay others for longer."""

RATE_INTERVAL_S = 0.05
"""Minimum interval at which the credit of rates is distributed, so that one answer has credit for several uses."""

MAX_DEBT_S = 10.0
"""Maximum time in which credit of a higher rate is earned back after the rate was lowered."""

MAX_RECIPIENTS = 50
"""Maximum number of holders that get credit of a rate at a time, so that the ledger can answer all of them."""

BUDGET_CHUNK = 0.0025
"""Maximum fraction of a budget that a holder gets at a time, unless a single use costs more."""

CHECKPOINT_CHUNK = 0.005
"""Fraction of a budget that is added to the checkpoint at a time."""


@dataclass(slots=True)
class _Account:
    """The ledger's state of a rate or a budget."""

    rate: float = 0.0
    """Amount that is granted per second; 0 for a budget."""
    level: float = 0.0
    """Amount that can be granted."""
    total: float = 0.0
    """Total of a budget; 0 for a rate."""
    committed: float = 0.0
    """Amount of a budget that may be granted before the checkpoint must be saved again."""
    refunded: float = 0.0
    """Refunds of a rate that may be unspent, which do not count towards the burst. Forgotten within seconds."""
    is_capped: bool = True
    """Whether the level cannot grow by time. Always true for a budget."""
    is_fresh: bool = True
    """True until credit of the rate is granted for the first time: the whole burst is available."""

    @property
    def handed_out(self) -> float:
        """Amount of a budget that holders have spent or may spend."""
        return self.total - self.level


@dataclass(slots=True, eq=False)
class _HolderCredit:
    """The ledger's state of a holder."""

    report: CreditReport
    reported_at: float
    expires_at: float
    """Time at which its credit of rates has expired."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Maximum that it may have spent until its next report, by account."""
    pending: dict[str, float] = field(default_factory=dict)
    """Credit that its next answer adds, by account."""
    gives_back: bool = False
    """Whether its next answer takes back the credit of budgets that it does not use."""
    turn: float = 0.0
    """Credit that it has received, relative to its demand. The lowest is served next."""
    granted_at: float = -inf
    """Time at which it received credit last. Decides between equal turns."""
    is_answered: bool = False
    """Whether its latest report is answered. It gets credit only in answer to a report."""
    has_slot: bool = True
    """Whether it has a free slot, by its latest report, so that it can spend credit at once."""

    def spent(self, account: str) -> float:
        return self.report.spent_of(account)

    def outstanding(self, account: str) -> float:
        return max(0.0, self.ceilings.get(account, 0.0) - self.spent(account))

    def left(self, account: str) -> float:
        return max(0.0, self.report.allowed.get(account, 0.0) - self.spent(account))

    def unspent(self, account: str) -> float:
        return self.outstanding(account) + self.pending.get(account, 0.0)


class CreditLedger:
    """Distributes the credit of a resource's rates and budgets among holders.

    Args:
        policy: Limits of the resource.
        committed: Amounts of budgets that may have been granted before a restart, by unit; None if there was none.
    """

    def __init__(self, policy: LimitPolicy, committed: Amounts | None = None) -> None:
        self._accounts: dict[str, _Account] = {}
        self._holders: dict[str, _HolderCredit] = {}
        self._unspent: dict[str, float] = {}
        """Credit that holders have and have not spent, including that of their next answers, by account."""
        self._now = -inf
        """Time of the latest distribution."""
        self._granted_at = -inf
        """Time at which credit was granted last."""
        self._turn = 0.0
        """Turn of the holder that was served last."""
        self.set_policy(policy)
        for account in self._accounts.values() if committed is not None else ():
            account.is_fresh = False
        for unit, amount in (committed or {}).items():
            if budget := self._accounts.get(BUDGET + unit):
                budget.level -= amount
                budget.committed = amount

    def set_policy(self, policy: LimitPolicy) -> None:
        """Change rates and budgets. The spent amount of a budget remains spent."""
        before, self._accounts = self._accounts, {}
        for unit, rate in policy.rates.items():
            account = self._accounts[RATE + unit] = before.get(RATE + unit, _Account())
            new_rate = rate * RATE_FRACTION
            if new_rate < account.rate:
                # Credit that holders still have from the higher rate is earned back by the lower one.
                room = BURST_S * new_rate - self._usable(RATE + unit)
                account.level = min(account.level, max(room, -MAX_DEBT_S * new_rate))
                account.refunded = 0.0
            account.rate = new_rate
        for unit, total in policy.budgets.items():
            account = self._accounts[BUDGET + unit] = before.get(BUDGET + unit, _Account())
            account.level += total - account.total
            account.total = total
        self._unspent = {name: self._unspent.get(name, 0.0) for name in self._accounts}
        for holder in self._holders.values():
            holder.ceilings = {name: amount for name, amount in holder.ceilings.items() if name in self._accounts}
            self._open_accounts(holder)

    @property
    def has_accounts(self) -> bool:
        """Whether the resource has rates or budgets."""
        return bool(self._accounts)

    def committed(self) -> dict[str, float]:
        """Return the amounts of budgets that the checkpoint must have, by unit."""
        return {unit_of(name): account.committed for name, account in self._accounts.items() if not account.rate}

    def restore_spent(self, spent: Amounts) -> None:
        """Make sure that at least these amounts of budgets count as spent, by unit."""
        known = self.spent()
        for unit, amount in spent.items():
            if unit in known:
                self._accounts[BUDGET + unit].level -= max(0.0, amount - known[unit])
        self._commit()

    def report(self, name: str, report: CreditReport, now: float, *, has_slot: bool = True) -> None:
        """Record a report of a holder. The caller ignores late and repeated ones.

        Args:
            name: Name of the holder.
            report: Its credit and its demand.
            now: Current time.
            has_slot: Whether it has a free slot.
        """
        if not self._accounts:
            return
        holder = self._holders.get(name)
        if holder is None:
            # Also a holder that returns: the credit that it had was counted as spent, or was granted before a
            # restart of the ledger.
            expires_at = now + CREDIT_TTL_S
            self._holders[name] = holder = _HolderCredit(report, now, expires_at, turn=self._turn, has_slot=has_slot)
            self._open_accounts(holder)
            return
        was_waiting = bool(holder.report.first) and now < holder.reported_at + CREDIT_TTL_S
        with self._changing(holder):
            for account_name, account in self._accounts.items():
                spent = report.spent_of(account_name)
                ceiling = max(report.allowed.get(account_name, spent), spent)
                change = holder.ceilings[account_name] - ceiling
                if account.rate and now >= holder.expires_at:  # the credit has expired, and was counted as spent
                    ceiling, change = spent, min(0.0, holder.ceilings[account_name] - spent)
                account.level += change
                holder.ceilings[account_name] = ceiling
                if account.rate:
                    unit = unit_of(account_name)
                    refunded = report.refunded.get(unit, 0.0) - holder.report.refunded.get(unit, 0.0)
                    account.level += refunded
                    account.refunded += refunded
            holder.report, holder.reported_at, holder.has_slot = report, now, has_slot
            holder.is_answered = holder.gives_back = False
            if not report.first:
                self._return_pending(holder)
        if report.first and not was_waiting:  # it does not make up for the time without demand, or of silence
            holder.turn = max(holder.turn, self._turn)

    def forget(self, name: str) -> None:
        """Remove a dead or silent holder. Its credit counts as spent."""
        if holder := self._holders.pop(name, None):
            for account_name in self._accounts:
                self._unspent[account_name] -= holder.unspent(account_name)
            self._return_pending(holder)

    def settle(self, name: str, spent: Amounts) -> None:
        """Remove a holder that has stopped, and take back its unspent credit."""
        if holder := self._holders.get(name):
            with self._changing(holder):
                holder.report = holder.report._replace(spent=spent)
            for account_name, account in self._accounts.items():
                if not account.rate or self._now < holder.expires_at:
                    account.level += holder.ceilings[account_name] - holder.spent(account_name)
            self.forget(name)

    def distribute(self, now: float) -> bool:
        """Give credit to the holders that want it. Return True if the checkpoint must be saved before they get it."""
        if not self._accounts:
            return False
        self._refill(now)
        waiting = [holder for holder in self._holders.values() if holder.report.first and not holder.is_answered]
        self._take_back(waiting)
        has_rates = any(account.rate for account in self._accounts.values())
        if waiting and not (has_rates and now < self._granted_at + RATE_INTERVAL_S):
            self._granted_at = now
            waiting.sort(key=lambda holder: (not holder.has_slot, holder.turn, holder.granted_at))
            for holder in waiting[: MAX_RECIPIENTS if has_rates else None]:
                if not self._grant(holder, waiting):
                    break
        return self._commit()

    def is_starving(self, name: str) -> bool:
        """Return True if a holder's first waiter needs credit that it does not have."""
        holder = self._holders.get(name)
        return holder is not None and any(self._shortages(holder, holder.report.first).values())

    @property
    def has_demand(self) -> bool:
        """Whether a holder waits for credit."""
        return bool(self._accounts) and any(map(self.is_starving, self._holders))

    def has_news(self, name: str) -> bool:
        """Return True if a holder should get an answer: credit, a request to return some, or that there is none."""
        holder = self._holders.get(name)
        if holder is None or not self._accounts:
            return False
        if any(holder.pending.values()) or holder.gives_back:
            return True
        if holder.report.allowed.keys() != self._accounts.keys():
            return True
        return not holder.is_answered and self._is_exhausted(holder)

    def answer(self, name: str) -> CreditLease:
        """Return the credit of a holder, in answer to its latest report."""
        holder = self._holders.get(name)
        if holder is None or not self._accounts:
            return CreditLease()
        allowed = {}
        with self._changing(holder):
            for account_name, account in self._accounts.items():
                spent = holder.spent(account_name)
                is_expired = account.rate and self._now >= holder.expires_at
                has = spent if is_expired else max(spent, holder.report.allowed.get(account_name, spent))
                keeps = spent if holder.gives_back else has
                if not account.rate:  # estimates that were too high must not leave it with a large part of the budget
                    first = holder.report.first.get(unit_of(account_name), 0.0)
                    keeps = min(keeps, spent + max(BUDGET_CHUNK * account.total, first))
                allowed[account_name] = keeps + holder.pending.pop(account_name, 0.0)
                holder.ceilings[account_name] = max(has, allowed[account_name])
        holder.is_answered = True
        # The lifetime starts when the report was sent, which may be long ago.
        ttl = self._now - holder.reported_at + CREDIT_TTL_S
        holder.expires_at = self._now + CREDIT_TTL_S
        obtainable = {  # also what this answer takes back
            name: self._obtainable(holder, name) + holder.ceilings[name] - allowed[name]
            for name, account in self._accounts.items()
            if not account.rate
        }
        return CreditLease(allowed, obtainable, ttl, self.spent())

    def spent(self) -> dict[str, float]:
        """Return the amount of each budget that holders have spent, by unit. Credit of dead holders counts as spent."""
        return {
            unit_of(name): max(0.0, account.handed_out - self._unspent[name])
            for name, account in self._accounts.items()
            if name.startswith(BUDGET)
        }

    def levels(self) -> dict[str, float]:
        """Return the credit that can be granted, by account."""
        return {name: account.level for name, account in self._accounts.items()}

    @contextmanager
    def _changing(self, holder: _HolderCredit) -> Iterator[None]:
        """Keep the sums of unspent credit up to date while a holder's credit changes."""
        for name in self._accounts:
            self._unspent[name] -= holder.unspent(name)
        yield
        for name in self._accounts:
            self._unspent[name] += holder.unspent(name)

    def _open_accounts(self, holder: _HolderCredit) -> None:
        """Give a holder an entry in each account.

        Amounts that it has spent before do not count, as they were granted. What it has spent of a budget beyond its
        credit is subtracted now.
        """
        for name, account in self._accounts.items():
            if name not in holder.ceilings:
                spent = holder.spent(name)
                allowed = holder.report.allowed.get(name, spent)
                holder.ceilings[name] = max(spent, allowed)
                if not account.rate:
                    account.level -= max(0.0, spent - allowed)
                self._unspent[name] = self._unspent.get(name, 0.0) + holder.unspent(name)

    def _refill(self, now: float) -> None:
        """Raise the level of rates by the credit of the elapsed time, up to the burst."""
        elapsed = 0.0 if self._now == -inf else now - self._now
        self._now = now
        for name, account in self._accounts.items():
            if not account.rate:
                continue
            unit = unit_of(name)
            available = account.level + self._usable(name)
            account.refunded = min(account.refunded * max(0.0, 1.0 - elapsed / CREDIT_TTL_S), max(0.0, available))
            costs = (holder.report.first.get(unit, 0.0) for holder in self._holders.values())
            most = max(BURST_S * account.rate, *costs, 0.0) + account.refunded
            room = max(0.0, most - available)
            account.level = min(account.level, most)  # a use that costs more may have given up
            account.is_capped = room <= EPSILON * most
            account.level += room if account.is_fresh else min(room, account.rate * elapsed)

    def _usable(self, name: str) -> float:
        """Return the credit of a rate that holders have or will get, and that has not expired."""
        expired = sum(holder.outstanding(name) for holder in self._holders.values() if self._now >= holder.expires_at)
        return self._unspent[name] - expired

    def _shortages(self, holder: _HolderCredit, cost: Amounts) -> dict[str, float]:
        """Return the credit that a holder lacks for work of a cost, by account."""
        return {
            name: max(
                0.0,
                cost.get(unit_of(name), 0.0)
                - (0.0 if account.rate and self._now >= holder.expires_at else holder.left(name))
                - holder.pending.get(name, 0.0),
            )
            for name, account in self._accounts.items()
        }

    def _grant(self, holder: _HolderCredit, waiting: list[_HolderCredit]) -> bool:
        """Give credit to a holder. Return False if it must get credit of a rate before all others."""
        first = self._shortages(holder, holder.report.first)
        # Without a free slot, credit for one use, if others can spend more at once.
        is_blocked = not holder.has_slot and any(other.has_slot for other in waiting)
        wanted = first if is_blocked else self._shortages(holder, holder.report.wanted)
        for name, needed in first.items():
            account = self._accounts[name]
            if needed and exceeds(needed, account.level, account.total or account.level):
                return not account.rate
        # The same fraction of all accounts, so that no credit is useless because that of another account is missing.
        portion = 1.0
        for name, amount in wanted.items():
            if amount > 0:
                portion = min(portion, self._share(name, holder, waiting) / amount)
        for name, account in self._accounts.items():
            more = max(0.0, portion * wanted[name] - first[name])
            if account.rate and portion < 1.0:  # for whole uses, as the rest might expire
                more -= more % holder.report.first.get(unit_of(name), inf)
            granted = min(first[name] + more, max(0.0, account.level))
            if granted > 0:
                account.level -= granted
                account.is_fresh, holder.granted_at = False, self._now
                holder.pending[name] = holder.pending.get(name, 0.0) + granted
                self._unspent[name] += granted
                if account.rate:
                    self._turn = max(self._turn, holder.turn)
                    holder.turn += granted / max(EPSILON, holder.report.wanted.get(unit_of(name), 0.0))
        return True

    def _share(self, name: str, holder: _HolderCredit, waiting: list[_HolderCredit]) -> float:
        """Return the maximum credit of an account that a holder may get at a time."""
        account, unit = self._accounts[name], unit_of(name)
        if not account.rate:
            return max(0.0, BUDGET_CHUNK * account.total - holder.unspent(name))
        total = sum(other.report.wanted.get(unit, 0.0) for other in waiting)
        return account.level * holder.report.wanted.get(unit, 0.0) / total if total else account.level

    def _take_back(self, waiting: list[_HolderCredit]) -> None:
        """If credit does not suffice for one use, let holders return what they cannot use, so that one can use it.

        A holder cannot use credit that is less than the cost of its first waiter. If another holder has a free slot
        and waits for credit only, neither can one whose slots are in use, or that lacks credit of another account.
        """
        for name, account in self._accounts.items():
            if not account.is_capped:
                continue
            needy = [holder for holder in waiting if self._shortages(holder, holder.report.first)[name] > account.level]
            if not needy:
                continue
            first = min(needy, key=lambda holder: (not holder.has_slot, holder.turn, holder.granted_at))
            for holder in self._holders.values():
                cost, has = holder.report.first.get(unit_of(name), inf), holder.outstanding(name)
                if holder is not first and has > 0:
                    is_blocked = first.has_slot and not self._can_start(holder)
                    holder.gives_back = holder.gives_back or has < cost or is_blocked

    def _can_start(self, holder: _HolderCredit) -> bool:
        return holder.has_slot and not any(self._shortages(holder, holder.report.first).values())

    def _commit(self) -> bool:
        """Change the committed amounts if more was granted, or much was returned. Return True if so."""
        changed = False
        for account in self._accounts.values():
            chunk = CHECKPOINT_CHUNK * account.total
            if not account.rate and not 0 <= account.committed - account.handed_out <= 2 * chunk:
                # The true cost of work may exceed the total.
                account.committed = max(account.handed_out, min(account.total, account.handed_out + chunk))
                changed = True
        return changed

    def _is_exhausted(self, holder: _HolderCredit) -> bool:
        shortages = self._shortages(holder, holder.report.first)
        return any(
            exceeds(shortages[name], self._obtainable(holder, name), account.total)
            for name, account in self._accounts.items()
            if not account.rate
        )

    def _obtainable(self, holder: _HolderCredit, name: str) -> float:
        return max(0.0, self._accounts[name].level + self._unspent[name] - holder.unspent(name))

    def _return_pending(self, holder: _HolderCredit) -> None:
        for name, amount in holder.pending.items():
            if name in self._accounts:
                self._accounts[name].level += amount
        holder.pending.clear()
