"""Quantiles: how numbers are spread, in bounded memory however many they are.

A number is counted in a bin of those that differ from it by 1 % at most, so what is said of a quantile is within 1 % of
the number that is there. Bins grow with the numbers: from a microsecond to thirty years there are under 2,000.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

GROWTH = 1.02
"""Each bin's end by the one before it. A bin's middle is within 1 % of all that is in it."""
LOG = math.log(GROWTH)
LEAST = 1e-6
"""Numbers below it count as 0."""


class Quantiles:
    """Of numbers that aren't negative.

    >>> some = Quantiles()
    >>> for number in (1.0, 2.0, 3.0):
    ...     some.add(number)
    >>> round(some.quantile(0.5), 1), some.mean
    (2.0, 2.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._bins: Counter[int] = Counter()
        self._zeros = 0

    def add(self, number: float) -> None:
        """One more. What is no finite number, or negative, counts as 0."""
        if not math.isfinite(number) or number < LEAST:
            number = 0.0
            self._zeros += 1
        else:
            self._bins[math.ceil(math.log(number) / LOG)] += 1
        self.count += 1
        self.total += number
        self.most = max(self.most, number)

    def merge(self, other: Quantiles) -> None:
        """What another one counted too."""
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self._bins.update(other._bins)
        self._zeros += other._zeros

    @property
    def mean(self) -> float:
        """Of all; 0 where there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """The number that this part of all doesn't exceed, to 1 %; 0 where there are none."""
        wanted = max(1, math.ceil(part * self.count))
        seen = self._zeros
        if wanted <= seen:
            return 0.0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= wanted:
                return min(self.most, GROWTH**place * 2 / (1 + GROWTH))
        return self.most

    def figures(self) -> dict[str, float]:
        """For people and programs."""
        parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        found = {"mean": self.mean, **{name: self.quantile(part) for name, part in parts.items()}, "max": self.most}
        return {name: _short(value) for name, value in found.items()}

    def state(self) -> list[Any]:
        """All of it, as JSON has it."""
        return [self.count, self.total, self.most, self._zeros, sorted(self._bins.items())]

    @classmethod
    def of_state(cls, state: list[Any]) -> Quantiles:
        """What gave this state."""
        made = cls()
        made.count, made.total, made.most, made._zeros, bins = state
        made._bins.update(dict(bins))
        return made


def _short(value: float) -> float:
    return float(f"{value:.4g}")
