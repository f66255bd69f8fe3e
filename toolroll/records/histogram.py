"""Histogram: how numbers are distributed, in bounded memory however many they are.

Each number is counted in a bucket whose borders are 4 % apart, so that a quantile is right to within 2 %. Count, mean,
least and most are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

BASE = 1.04
SMALLEST = 1e-9
"""What is nearer to nothing counts as nothing."""


class Histogram:
    """Of numbers that aren't negative, such as seconds."""

    __slots__ = ("_buckets", "count", "most", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._buckets: Counter[int | None] = Counter()

    def add(self, value: float) -> None:
        """Count a number. What is no finite number, or negative, counts as 0."""
        value = value if math.isfinite(value) and value > 0 else 0.0
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        self._buckets[None if value < SMALLEST else math.ceil(math.log(value, BASE))] += 1

    def merge(self, other: Histogram) -> None:
        """Count all that another has counted."""
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        """The mean; None of nothing."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """What so large a share of the numbers is no larger than; None of nothing."""
        if not self.count:
            return None
        left = share * self.count - self._buckets[None]
        if left <= 0 and self._buckets[None]:
            return 0.0
        for bucket in sorted(bucket for bucket in self._buckets if bucket is not None):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(math.pow(BASE, bucket - 0.5), self.most)
        return self.most

    def as_dict(self) -> dict[str, float | None]:
        """For programs."""
        most = self.most if self.count else None
        return {"mean": self.mean, "p50": self.quantile(0.5), "p99": self.quantile(0.99), "max": most}

    def state(self) -> list[Any]:
        """All of it, as JSON has it."""
        return [self.count, self.total, self.most, list(self._buckets.items())]

    @classmethod
    def of_state(cls, state: list[Any]) -> Histogram:
        """What gave this state."""
        made = cls()
        made.count, made.total, made.most, buckets = state
        made._buckets.update(dict(buckets))
        return made
