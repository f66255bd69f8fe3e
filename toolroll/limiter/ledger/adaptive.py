"""Adaptation of a limit to what a resource can do. No clock and no I/O: the caller passes the time, in seconds.

The limit is raised while all slots are in use and the resource accepts everything, and lowered when it rejects requests
or slows down:

- **Probes.** Once a whole round of requests has succeeded at a limit, a higher one is tried. The steps grow from 1 to a
  quarter of the limit. If requests are rejected, the limit returns to the last one that was sustained. Further probes
  bisect the interval between the two. When no limit is left between them, the lowest rejected one is tried again at
  intervals at which probes cause about `PROBE_COST` of all requests to be rejected.
- **Decrease.** If requests are rejected at a limit that was sustained before, the resource can do less than it could.
  The limit is multiplied by `DECREASE_FACTORS`, by a smaller one each time in a row. If it had been rejected before it
  was sustained, it first returns to the limit from which it was tried.
- **Latency.** If the mean duration exceeds the lowest of the recent past by `MAX_INFLATION`, requests wait inside the
  resource, and the limit is lowered as well. If that does not help, requests take longer for another reason, and the
  new duration is the normal one.
- **Circuit breaker.** If nothing succeeds any more, at most one request per second is sent, until one succeeds.

Each change of the limit starts an epoch. Only the outcomes of requests that were granted in the current epoch tell
something about the current limit. Rejections of earlier requests do not lower it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from toolroll.limiter.ledger.feedback import Feedback

DECREASE_FACTORS = (0.85, 0.7, 0.5)
"""Factors of the first, second and all further decreases in a row."""

MAX_STEP_FRACTION = 0.25
"""Maximum step of an increase, as a fraction of the limit."""

PROBE_COST = 0.01
"""Fraction of all requests that probes of a known limit may cause to be rejected."""

MIN_PROBE_INTERVAL_S = 1.0
"""Minimum time between a rejection and the next probe of a limit that was rejected before."""

MAX_PROBE_INTERVAL_S = 10.0
"""Maximum time between them, if the resource does not ask for more. For resources with few requests."""

MAX_INFLATION = 2.0
"""Ratio of the mean duration to the lowest of the recent past above which the limit is lowered."""

MAX_GROWTH_INFLATION = 1.5
"""The same ratio above which the limit is not raised."""

MIN_IMPROVEMENT = 0.9
"""A decrease did not help if the mean duration after it is more than this fraction of the mean before it."""

MIN_LATENCY_SAMPLES = 20
"""Minimum number of requests whose mean duration is compared."""

LATENCY_MEMORY_S = 600.0
"""Time in which the lowest duration of the past is doubled, so that requests may become longer in the long run."""

MAX_DOUBLINGS = 64.0
"""Maximum number of these doublings between two measurements, after which the lowest duration hardly matters."""

FRUITLESS_DECREASES = 3
"""Number of decreases in a row without a single success after which the circuit breaker opens."""

BREAKER_INTERVAL_S = 1.1
"""Minimum interval between the requests that are sent while the circuit breaker is open. More than a second, so that at
most one per second arrives even if one travels longer than the next."""

LOST_PROBE_S = 10.0
"""Time after which a request without an outcome does not delay the next one while the circuit breaker is open."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Pause of a process whose request was rejected at the minimum of the limit. Doubled from the first to the second."""


@dataclass
class AdaptiveLimit:
    """The limit of one resource, between `min` and `max`."""

    min: int
    max: int
    limit: int = 0
    """The current limit."""
    epoch: int = 1
    """Number of the current epoch."""
    sustained: int = 0
    """Highest limit at which a whole round of requests succeeded, since the last decrease."""
    refused_at: int | None = None
    """Lowest limit above it at which requests were rejected; None if none is known."""
    is_open: bool = False
    """Whether the circuit breaker is open: only single requests are sent."""
    reason: str = "initial limit"
    """Why the limit changed last."""
    changed_at: float = 0.0
    resume_at: float = 0.0
    """Time before which processes whose requests were rejected start no work."""
    _step: int = 1
    _succeeded: int = 0
    """Successes since the last decrease."""
    _epoch_succeeded: int = 0
    _epoch_rejected: int = 0
    _failed: int = 0
    """Unsuccessful uses of all epochs since the last request of an open breaker."""
    _failures: int = 0
    """Decreases in a row."""
    _before_failures: int = 0
    """Limit that was sustained before them."""
    _accepted_before: int = 0
    """Sustained limit to return to if a limit that was rejected, and later accepted, is rejected again; 0 if unset."""
    _fruitless: int = 0
    """Decreases in a row without a single success in between."""
    _pause_s: float = MIN_PAUSE_S
    _probe_at: float = 0.0
    """Earliest time of the next attempt with a rejected limit or, while the breaker is open, of the next request."""
    _probe_by: float = 0.0
    _probe_after: int = 0
    """Number of successes required before the next attempt with a rejected limit."""
    _breaker_limit: int | None = None
    """Limit while a request is sent by an open breaker."""
    _in_use_before: int = 0
    """Slots that were in use without this request."""
    _retry_at: float = 0.0
    """Time until which the resource asked to wait."""
    _is_settling: bool = False
    """Whether requests of a higher limit may still run, so their durations must not be attributed to this limit."""
    _slow_mean: float | None = None
    """Mean duration at which the limit was lowered last."""
    _slow_limit: int = 0
    """The limit before."""
    _latency: _MeanLatency = field(default_factory=lambda: _MeanLatency())

    def __post_init__(self) -> None:
        self.limit = min(max(self.limit, self.min), self.max)
        self.sustained = self.sustained or self.limit

    def set_range(self, minimum: int, maximum: int, now: float) -> None:
        """Change the range of the limit."""
        self.min, self.max = minimum, maximum
        self._change(min(max(self.limit, minimum), maximum), "range changed", now)
        self.sustained = min(max(self.sustained, minimum), self.limit)

    def observe(self, before: Feedback, after: Feedback, now: float) -> None:
        """Record the difference between two reports of a holder."""
        succeeded = after.succeeded - before.succeeded
        self._succeeded += succeeded
        self._latency.add(succeeded, after.busy_s - before.busy_s)
        self._failed += after.failed - before.failed
        self._retry_at = max(self._retry_at, now + after.retry_after)
        if after.epoch == self.epoch:
            known = before if before.epoch == after.epoch else Feedback()
            self._epoch_succeeded += after.epoch_succeeded - known.epoch_succeeded
            self._epoch_rejected += after.epoch_rejected - known.epoch_rejected

    def update(self, now: float, *, in_use: int, is_saturated: bool, min_epoch_s: float) -> None:
        """Change the limit if the outcomes ask for it.

        Args:
            now: Current time.
            in_use: Slots that are in use, or were offered and may be.
            is_saturated: Whether more slots are wanted than the limit allows.
            min_epoch_s: Minimum time between two increases.
        """
        if self.is_open:
            self._update_open(now)
        elif self._epoch_rejected:
            if self.is_draining(in_use + self._epoch_rejected):
                self._epoch_rejected = 0  # work of a higher limit still runs: this limit has not been tried yet
            else:
                self._decrease(now, in_use)
        else:
            if self._is_settling and self._epoch_succeeded >= self.limit:
                self._is_settling = False
                self._latency.restart()
            samples = inf if self._is_settling else max(MIN_LATENCY_SAMPLES, self.limit)
            inflation = self._latency.inflation(now, samples)
            if self._latency.is_measured and inflation <= MAX_INFLATION:
                self._slow_mean = None  # the last decrease helped
            if inflation > MAX_INFLATION:
                self._slow_down(now, inflation)
            elif is_saturated and self._epoch_succeeded >= self.limit and now >= self.changed_at + min_epoch_s:
                self._complete_round(now, inflation)

    def open_breaker(self, now: float) -> None:
        """Send at most one request per second until one succeeds."""
        self.is_open, self._breaker_limit = True, None
        self._probe_at = now + BREAKER_INTERVAL_S
        self._change(self.min, "everything is rejected: one request per second is sent", now)

    def is_draining(self, in_use: int) -> bool:
        """Return True if more slots are in use than the limit allows, because it was lowered."""
        return in_use > self.limit

    def effective(self, now: float, reserved: int, in_use: int) -> int:
        """Return the number of slots that may be in use.

        Args:
            now: Current time.
            reserved: Slots that may be in use at the moment.
            in_use: Slots that are in use by the latest reports, or in quarantine.
        """
        if not self.is_open:
            return self.limit
        if now < max(self._probe_at, self._retry_at):
            return 0
        if self._breaker_limit is None or now >= self._probe_by:
            # One more than now. More than the minimum, if so many requests hang.
            self._breaker_limit = min(self.max, reserved + 1)
            self._failed = 0
            self._in_use_before, self._probe_by = in_use, now + LOST_PROBE_S
        elif in_use <= self._in_use_before:  # the request has not started, so that it cannot be lost
            self._in_use_before, self._probe_by = in_use, now + LOST_PROBE_S
        return self._breaker_limit

    def _complete_round(self, now: float, inflation: float) -> None:
        """Raise the limit after a round of requests that all succeeded, if it is time."""
        self._failures, self._pause_s = 0, MIN_PAUSE_S
        if self.refused_at is not None and self.limit >= self.refused_at:
            self._accepted_before, self.refused_at = self.sustained, None  # it is accepted now
        if self.limit > self.sustained:
            self._step *= 2
        self.sustained = self.limit
        if self.limit >= self.max or inflation > MAX_GROWTH_INFLATION or now < self._retry_at:
            return
        if self.refused_at is None:
            self._step = max(1, min(self._step, int(self.limit * MAX_STEP_FRACTION)))
            target = self.limit + self._step
        else:
            target = max(self.limit + 1, (self.limit + self.refused_at) // 2)
            is_known = target >= self.refused_at
            if is_known and (now < self._probe_at or (self._succeeded < self._probe_after and now < self._probe_by)):
                return
            self._step = 1
        self._change(min(target, self.max), f"{self._epoch_succeeded} successes in a row", now)

    def _decrease(self, now: float, in_use: int) -> None:
        rejected = self._epoch_rejected
        self._fruitless = 0 if self._succeeded else self._fruitless + 1
        self._wait_before_probe(now, rejected)
        self.refused_at = self.limit
        # At the minimum, a resource that asks to wait for long would get requests in the meantime.
        must_wait = self.limit == self.min and self._fruitless and self._retry_at > now + MAX_PAUSE_S
        if (self._fruitless >= FRUITLESS_DECREASES or must_wait) and in_use <= self.limit:
            self.open_breaker(now)
        elif self.limit > self.sustained:
            self._change(self.sustained, f"{rejected} rejected", now)
        elif self._is_doubtful(in_use):
            self._change(self._accepted_before, f"{rejected} rejected", now)
            self.sustained, self._accepted_before = self._accepted_before, 0
        else:
            if not self._failures:
                self._before_failures = self.sustained
            factor = DECREASE_FACTORS[min(self._failures, len(DECREASE_FACTORS) - 1)]
            self._failures += 1
            if self.limit == self.min:
                self.resume_at = min(max(now + self._pause_s, self._retry_at), now + MAX_PAUSE_S)
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            # Requests that are in use are accepted, so that this is what the resource can do at most.
            lowered = max(self.min, min(int(self.limit * factor), self.limit - 1, in_use))
            self._change(lowered, f"{rejected} rejected", now)
            self.sustained = lowered
        self._succeeded = 0

    def _is_doubtful(self, in_use: int) -> bool:
        """Return True if the limit was perhaps accepted only because a process stalled and did not use its slots."""
        at_least = max(self.min, DECREASE_FACTORS[0] * self.limit)
        return at_least <= self._accepted_before < self.limit and self._accepted_before <= in_use

    def _slow_down(self, now: float, inflation: float) -> None:
        """Lower the limit, unless that did not help the last time: then requests take longer for another reason."""
        mean, before = self._latency.mean, self._slow_mean
        if self.limit == self.min or (before and self.limit < self._slow_limit and mean > MIN_IMPROVEMENT * before):
            self._latency.rebase()
            self._slow_mean = None
            return
        self._slow_mean, self._slow_limit = mean, self.limit
        lowered = max(self.min, int(self.limit * max(0.5, 1 / inflation)))
        self._wait_before_probe(now, 1)
        self.refused_at = self.limit
        self._change(lowered, f"requests take {inflation:.1f} times as long as before", now)
        self.sustained, self._succeeded = lowered, 0

    def _update_open(self, now: float) -> None:
        if self._epoch_succeeded:  # not one that was accepted before the breaker opened, and took longer
            self.is_open, self._breaker_limit, self._fruitless, self._failures = False, None, 0, 0
            self.refused_at = None
            self._change(max(self.min, min(self.max, self._before_failures // 2)), "a request was accepted again", now)
            self.sustained = self.limit
        elif self._breaker_limit is not None and self._failed:
            self._breaker_limit = None
            self._probe_at = now + BREAKER_INTERVAL_S

    def _wait_before_probe(self, now: float, rejected: int) -> None:
        self._probe_at, self._probe_by = now + MIN_PROBE_INTERVAL_S, now + MAX_PROBE_INTERVAL_S
        self._probe_after = int(rejected / PROBE_COST)
        self._step = 1

    def _change(self, limit: int, reason: str, now: float) -> None:
        if limit != self.limit:
            verb = "raised" if limit > self.limit else "lowered"
            if limit < self.limit:
                self._is_settling = True
                self._latency.restart()
            reason = f"{verb} from {self.limit} to {limit}: {reason}"
        self.limit, self.reason, self.changed_at = limit, reason, now
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.epoch += 1
        self._epoch_succeeded = self._epoch_rejected = 0


class _MeanLatency:
    """Mean duration of requests, relative to the lowest of the recent past.

    Of two successive measurements, the lower one counts. A process that stalls for a moment raises a single one, as the
    requests that end meanwhile seem to take longer.
    """

    def __init__(self) -> None:
        self._lowest = inf
        self._measured_at = 0.0
        self._count, self._sum = 0, 0.0
        self._inflation = 1.0
        self._last_mean = 0.0
        """Mean duration by the last measurement; 0 if there was none since the last restart."""
        self.mean = 0.0
        """Lower mean duration of the last two measurements."""
        self.is_measured = False
        """Whether there were two measurements since the last restart."""

    def add(self, count: int, seconds: float) -> None:
        """Add the durations of requests."""
        self._count += count
        self._sum += seconds

    def restart(self) -> None:
        """Forget the last measurement, which belongs to a higher limit."""
        self._count, self._sum, self._inflation, self._last_mean, self.is_measured = 0, 0.0, 1.0, 0.0, False

    def rebase(self) -> None:
        """Take the last measurement for the lowest, because requests have become longer."""
        self._lowest, self._inflation = self.mean, 1.0

    def inflation(self, now: float, samples: float) -> float:
        """Return the last ratio, measured again if there are enough samples."""
        if self._count >= samples and self._sum > 0:
            mean, last = self._sum / self._count, self._last_mean
            drift = 2 ** min(MAX_DOUBLINGS, (now - self._measured_at) / LATENCY_MEMORY_S)
            self._lowest, self._measured_at = min(mean, self._lowest * drift), now
            self._count, self._sum, self._last_mean = 0, 0.0, mean
            if last:
                self.mean, self.is_measured = min(mean, last), True
                self._inflation = self.mean / self._lowest
        return self._inflation
