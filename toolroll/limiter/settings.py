"""Limits of a resource, as users write them in YAML and in Python.

limits:
  resource: judge                # default: the name of the tool or of the reward function
  limit: {min: 4, max: 256}      # concurrent uses: a number, or a range in which the limit adapts
  rpm: 600                       # requests per minute
  tpm: 200000                    # tokens per minute
  budget: {requests: 10000, usd: 20}
  cost: {tokens: 1200}           # estimated cost of one use, in addition to one request
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from toolroll.limiter.ledger.policy import REQUESTS, TOKENS, UNLIMITED, LimitPolicy, rename_calls


class LimitRange(BaseModel):
    """Range in which a limit of concurrent uses adapts to what the resource can do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(default=1, ge=1)
    """Minimum."""
    max: int = Field(ge=1)
    """Maximum."""
    adapt: bool = True
    """If False, the limit is `max`."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) exceeds max ({self.max})")
        return self


def _rename_calls(amounts: Any) -> Any:
    """Accept `calls` for `requests`."""
    return rename_calls(amounts) if isinstance(amounts, Mapping) else amounts


Amounts = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], BeforeValidator(_rename_calls)]
"""Positive amounts by unit. `calls` is another name of `requests`."""


class ResourceLimits(BaseModel):
    """Limits of a resource: concurrent uses, rates and budgets.

    Example:
        >>> limits = ResourceLimits(resource="judge", limit={"min": 4, "max": 64}, rpm=600, budget={"usd": 20})
        >>> limits.policy().rates
        {'requests': 10.0}
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    resource: str | None = None
    """Name of the resource. All users of the same name share the limits. Default: the name of the tool or function."""
    limit: Annotated[int, Field(ge=1)] | LimitRange | None = None
    """Maximum number of concurrent uses: a number, or a range in which the limit adapts. Default: unlimited."""
    rpm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum number of requests per minute."""
    tpm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum number of tokens per minute. The cost of each use states its tokens."""
    rates: Amounts = Field(default_factory=dict)
    """Maximum rate of further units, per second."""
    budget: Amounts = Field(default_factory=dict)
    """Total of each unit, after which uses are refused with `BudgetExhausted`."""
    cost: Amounts = Field(default_factory=dict)
    """Estimated cost of one use, by unit. Every use also costs one request."""

    @property
    def has_limits(self) -> bool:
        """Whether there is a limit of concurrent uses, a rate or a budget."""
        return any((self.limit, self.rpm, self.tpm, self.rates, self.budget))

    def policy(self) -> LimitPolicy:
        """Return the limits in the form that the ledger applies.

        Returns:
            The policy, with rates per second.
        """
        rates = dict(self.rates)
        for unit, per_minute in ((REQUESTS, self.rpm), (TOKENS, self.tpm)):
            if per_minute is not None:
                rates[unit] = per_minute / 60
        if isinstance(self.limit, LimitRange):
            minimum, limit = self.limit.min if self.limit.adapt else self.limit.max, self.limit.max
        else:
            minimum = limit = UNLIMITED if self.limit is None else self.limit
        return LimitPolicy(minimum, limit, rates, dict(self.budget), is_range=minimum < limit)
