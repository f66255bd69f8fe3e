"""Save the spent amounts of budgets in a file, so that a resumed job does not start with full budgets again.

The file `budgets.json` in the job's directory has amounts by resource and unit.

- Without a cluster, the file is written before credit is granted: it has the reserved amount,
  which is the spent amount and about 1 % of the budget. `close` replaces it by the spent amount.
- The limiter of a Ray cluster outlives the job, so the file has the spent amount, and the caller saves it at intervals.

Invariants:

- Amounts of earlier processes never decrease.
- Without a cluster, the amount in the file covers all work that has started, by its estimated cost. If the process is
  killed, a resumed job counts all of it as spent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from toolroll.errors import ConfigError
from toolroll.limiter.leased_limiter import LocalLedgerLimiter, SaveBudgets
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.settings import ResourceLimits

logger = logging.getLogger(__name__)

BUDGETS_FILE = "budgets.json"
BUDGET_SAVE_INTERVAL_S = 1.0
"""Interval at which the spent budgets of a cluster are saved."""

SpentBudgets = dict[str, dict[str, float]]
"""Spent amounts by resource and unit."""


class BudgetFile:
    """The file with the spent budgets of a job. Call `restore` before the job starts, and `close` when it has ended.

    Args:
        directory: Directory of the job, which no other process uses.

    Raises:
        ConfigError: If the file exists and is invalid.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / BUDGETS_FILE
        self._earlier = _read(self._path)
        """Amounts that earlier processes have spent."""
        self._written = self._earlier
        self._limits: Mapping[str, ResourceLimits] = {}
        self._spent_before: SpentBudgets = {}
        """Amounts that this process had spent before the job, perhaps on something else."""
        self._spent: SpentBudgets = {}
        """Amounts that had been spent when the file was saved last."""
        self._reserved: SpentBudgets = {}
        """Amounts that this process may spend before it writes the file again."""
        self._savers: list[tuple[LocalLedgerLimiter, SaveBudgets]] = []
        """Limiters of this process, with the function of each that writes this file before credit is granted."""
        self._is_closed = False
        self._lock = threading.Lock()

    def restore(self, limits: Mapping[str, ResourceLimits]) -> None:
        """Pass the saved amounts to the limiters.

        Args:
            limits: Limits with a budget, by resource.
        """
        self._limits = limits
        self._spent_before = self.spent()
        for resource, limit in limits.items():
            limiter = get_limiter(resource, limit)
            if isinstance(limiter, LocalLedgerLimiter):
                self._savers.append((limiter, partial(self._reserve, resource)))
                limiter.add_budget_saver(self._savers[-1][1])
            elif resource not in self._earlier:
                continue
            limiter.restore_spent(self._earlier.get(resource, {}))

    def spent(self) -> SpentBudgets:
        """Return the spent amount of each budget, as last known."""
        return {
            resource: {unit: limiter_spent.get(unit, 0.0) for unit in limits.budget}
            for resource, limits in self._limits.items()
            if (limiter_spent := get_limiter(resource, limits).fetch_spent())
        }

    def save(self) -> None:
        """Write the file if an amount has changed. Does nothing after `close`. An error is logged."""
        spent = self.spent()
        with self._lock:
            if not self._is_closed:  # otherwise these amounts may be older than those in the file
                self._write_spent(spent)

    def close(self) -> None:
        """Write the spent amounts, without those that may still be spent. The file is not changed afterwards.

        An error is logged.
        """
        for limiter, save in self._savers:
            limiter.remove_budget_saver(save)
        self._savers.clear()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._reserved.clear()
                self._write_spent(self.spent())

    def _write_spent(self, spent: SpentBudgets) -> None:
        """Write spent amounts. The caller holds the lock."""
        self._spent = {
            resource: amounts
            for resource, amounts in spent.items()
            if amounts != self._spent_before.get(resource, dict.fromkeys(amounts, 0.0))
        }
        self._write()

    def _reserve(self, resource: str, amounts: Mapping[str, float]) -> None:
        """Write the amounts of a resource that may be spent from now on."""
        with self._lock:
            if not self._is_closed:
                units = self._limits[resource].budget
                self._reserved[resource] = {unit: amount for unit, amount in amounts.items() if unit in units}
                self._write()

    def _write(self) -> None:
        """Write the file if an amount has changed. The caller holds the lock."""
        saved = {resource: dict(amounts) for resource, amounts in self._earlier.items()}
        for resource, amounts in (*self._spent.items(), *self._reserved.items()):
            if any(amounts.values()):
                known = saved.setdefault(resource, {})
                known.update({unit: max(amount, known.get(unit, 0.0)) for unit, amount in amounts.items()})
        if saved == self._written:
            return
        written = self._path.with_name(f".{self._path.name}.new")
        try:
            written.write_bytes(orjson.dumps(saved, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            written.replace(self._path)
        except OSError as error:
            logger.warning("Cannot write %s: %s.", self._path, error.strerror)
        else:
            self._written = saved


@asynccontextmanager
async def saved_budgets(directory: Path, limits: Mapping[str, ResourceLimits]) -> AsyncIterator[None]:
    """Count the amounts of budgets that earlier processes have spent, and save those that the block spends.

    Args:
        directory: Directory with the file, which no other process uses.
        limits: Limits of all resources that the block may use. Those without a budget are ignored.

    Raises:
        ConfigError: On entering, if the file exists and is invalid.
    """
    budgets = {resource: one for resource, one in limits.items() if one.budget}
    if not budgets:
        yield
        return
    file = BudgetFile(directory)
    saving: asyncio.Task[None] | None = None
    try:
        await asyncio.to_thread(file.restore, budgets)
        saving = asyncio.create_task(_save_at_intervals(file))
        yield
    finally:
        if saving is not None:
            saving.cancel()
        await asyncio.to_thread(file.close)


async def _save_at_intervals(file: BudgetFile) -> None:
    while True:
        await asyncio.sleep(BUDGET_SAVE_INTERVAL_S)
        await asyncio.to_thread(file.save)


def _read(path: Path) -> SpentBudgets:
    try:
        content: Any = orjson.loads(path.read_bytes())
        return {
            str(resource): {str(unit): float(amount) for unit, amount in amounts.items()}
            for resource, amounts in content.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"Cannot read the spent budgets in {path}: {error}."
        raise ConfigError(f"{problem} Correct the file, or delete it to start with full budgets.") from error
