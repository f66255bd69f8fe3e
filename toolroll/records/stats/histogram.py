"""Histogram of any number of values in bounded memory.

The bounds of a bucket differ by 2 %, so quantiles are accurate to 2 %. Count, mean and maximum are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BUCKET_RATIO = 1.02
"""Ratio between the bounds of a bucket."""
ZERO_THRESHOLD = 1e-9
"""Smaller values count as 0."""


@dataclass(slots=True)
class Histogram:
    """Histogram of values that are not negative, for example durations."""

    count: int = 0
    total: float = 0.0
    max: float = 0.0
    _buckets: Counter[int | None] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        """Add a value. Negative values and values that are not finite count as 0."""
        value = value if math.isfinite(value) and value > 0 else 0.0
        self.count += 1
        self.total += value
        self.max = max(self.max, value)
        self._buckets[None if value < ZERO_THRESHOLD else math.ceil(math.log(value, BUCKET_RATIO))] += 1

    def merge(self, other: Histogram) -> None:
        """Add all values of another histogram."""
        self.count += other.count
        self.total += other.total
        self.max = max(self.max, other.max)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        """Mean of the values; None if there are none."""
        return self.total / self.count if self.count else None

    def quantile(self, fraction: float) -> float | None:
        """Return a quantile, for example the median for 0.5; None if there are no values."""
        if not self.count:
            return None
        remaining = fraction * self.count - self._buckets[None]
        if remaining <= 0 and self._buckets[None]:
            return 0.0
        for bucket in sorted(bucket for bucket in self._buckets if bucket is not None):
            remaining -= self._buckets[bucket]
            if remaining <= 0:
                middle, upper = math.pow(BUCKET_RATIO, bucket - 0.5), math.pow(BUCKET_RATIO, bucket)
                mean = self.total / self.count
                # Values that hardly differ share a bucket. Its middle may be below their mean, which would look wrong.
                return min(mean if fraction > 0.5 and middle < mean <= upper * (1 + 1e-9) else middle, self.max)
        return self.max

    def as_dict(self) -> dict[str, float | None]:
        """Return mean, quantiles and maximum as JSON."""
        maximum = self.max if self.count else None
        return {"mean": self.mean, "p50": self.quantile(0.5), "p99": self.quantile(0.99), "max": maximum}

    def state(self) -> list[Any]:
        """Return the complete state as JSON."""
        return [self.count, self.total, self.max, list(self._buckets.items())]

    @classmethod
    def from_state(cls, state: list[Any]) -> Histogram:
        """Restore a histogram from its `state()`."""
        count, total, maximum, buckets = state
        return cls(count, total, maximum, Counter(dict(buckets)))
