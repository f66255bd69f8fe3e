"""Limits of a resource, as the ledger applies them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from toolroll.errors import ConfigError

REQUESTS, TOKENS = "requests", "tokens"
"""Units of `rpm` and `tpm`. Every use costs one request."""

UNLIMITED = 1_000_000
"""Number of slots of a resource without a limit of concurrent uses."""

CALLS = "calls"
"""Another name of `REQUESTS`."""

_NONE: Mapping[str, float] = {}


def checked_cost(resource: str, cost: Mapping[str, float]) -> dict[str, float]:
    """Return the cost of work by unit, as floats: numbers of other libraries cannot be saved or added to these.

    Args:
        resource: Name of the resource, for messages.
        cost: Amounts by unit. `calls` are `requests`.

    Raises:
        ValueError: If an amount is negative or not finite.
    """
    for unit, amount in cost.items():
        if not 0 <= amount < inf:
            raise ValueError(f"Invalid cost of {resource!r}: {amount} {unit}. Expected at least 0.")
    return rename_calls({unit: float(amount) for unit, amount in cost.items()})


def rename_calls(amounts: Mapping[str, float]) -> dict[str, float]:
    """Return amounts by unit, with `requests` for `calls`."""
    return {REQUESTS if unit == CALLS else unit: amount for unit, amount in amounts.items()}


class LimitPolicy(NamedTuple):
    """Limits of a resource, as the ledger applies them. Sent and saved as a plain tuple."""

    min: int
    """Minimum of the limit of concurrent uses. The limit adapts while it is less than `max`."""
    max: int
    """Maximum of the limit of concurrent uses."""
    rates: Mapping[str, float] = _NONE
    """Maximum rate of each unit, per second."""
    budgets: Mapping[str, float] = _NONE
    """Total of each unit."""
    is_range: bool = True
    """Whether `min` stays as it is if `max` changes. Otherwise it changes with `max`, so that the limit is fixed."""

    @classmethod
    def fixed(cls, limit: int) -> LimitPolicy:
        """Return the policy of a fixed limit of concurrent uses."""
        return cls(limit, limit, is_range=False)

    def changed(
        self, limit: int | None, minimum: int | None, rates: Mapping[str, float], budgets: Mapping[str, float]
    ) -> LimitPolicy:
        """Return the policy with a new limit or range, and with some rates and budgets added or replaced.

        Args:
            limit: New limit, or maximum of a limit that adapts; None to keep it.
            minimum: New minimum of a limit that adapts; None to keep it. At the maximum, the limit becomes fixed.
            rates: New rates per second, by unit.
            budgets: New totals, by unit.

        Raises:
            ConfigError: If the new minimum exceeds the maximum.
        """
        maximum = self.max if limit is None else limit
        is_range = self.is_range if minimum is None else minimum < maximum
        if minimum is None:
            minimum = self.min if is_range else maximum
        elif minimum > maximum:
            raise ConfigError(f"Invalid minimum {minimum}: it exceeds the maximum {maximum}. Raise the limit as well.")
        return LimitPolicy(minimum, maximum, {**self.rates, **rates}, {**self.budgets, **budgets}, is_range)

    def __str__(self) -> str:
        limit = f"{self.min} to {self.max}" if self.adapts else str(self.max)
        parts = [] if self.max == UNLIMITED else [f"limit={limit}"]
        parts += [f"{rate * 60:.15g} {unit} per minute" for unit, rate in self.rates.items()]
        parts += [f"budget of {total:.15g} {unit}" for unit, total in self.budgets.items()]
        return ", ".join(parts) or "no limit"

    def command_to_replace(self, current: LimitPolicy, resource: str) -> str:
        """Return the command that replaces the current limits of a resource by these.

        Args:
            current: The limits that the cluster uses.
            resource: Name of the resource.
        """
        if not (current.rates.keys() <= self.rates.keys() and current.budgets.keys() <= self.budgets.keys()):
            return f"toolroll limiter remove {resource!r}"  # `set` cannot remove a rate or a budget
        is_same_limit = (current.min, current.max, current.is_range) == (self.min, self.max, self.is_range)
        options = [] if is_same_limit else [str(self.max)]
        options += [f"--min {self.min}"] if not is_same_limit and (self.is_range or current.is_range) else []
        options += [f"--rate {unit}={_exact(rate)}" for unit, rate in self.rates.items()]
        options += [f"--budget {unit}={_exact(total)}" for unit, total in self.budgets.items()]
        return " ".join(["toolroll limiter set", repr(resource), *options])

    @property
    def has_limits(self) -> bool:
        """Whether there is a limit of concurrent uses, a rate or a budget."""
        return bool(self.max != UNLIMITED or self.rates or self.budgets)

    @property
    def adapts(self) -> bool:
        """Whether the limit of concurrent uses adapts."""
        return self.is_range and self.min < self.max

    @property
    def is_fixed(self) -> bool:
        """Whether there is only a fixed limit of concurrent uses."""
        return not (self.adapts or self.rates or self.budgets)


def _exact(amount: float) -> str:
    """Return a number without rounding it, so that the limits which a command sets are equal to these."""
    return repr(amount).removesuffix(".0")
