"""Alarms for shares of samples that jump: malformed calls, infra faults, truncated answers, re-rendered trajectories.

    alarms = RunAlarms(samples_per_prompt=8)
    alarms.add(counts_of_a_step)
    alarms.figures()["malformed"]              # {"share": 0.2, "baseline": 0.02, "alarm": True}

Each share is compared with its baseline, the same share in the steps before, whenever a step is added. Pure: no clock
and no I/O.

- The *window* are the last steps that have `WINDOW_SAMPLES` samples together, at least one step.
- The *baseline* are up to `BASELINE_STEPS` steps before the window, or more if they have less than `BASELINE_SAMPLES`
  samples. Steps with an alarm for the share do not enter its baseline, so an alarm does not become the norm. There are
  no alarms before the baseline has `MIN_BASELINE_SAMPLES` samples.
- An alarm starts if the share is `MIN_RISE` above the baseline, and a rise of this size had a probability of at most
  `MAX_P_VALUE` if both had the same true share (Fisher's exact test, one-sided). The samples of one prompt resemble
  each other, so the test counts only one in `SIMILAR_SAMPLES` of them, or one in two if a prompt has fewer than eight.
  With more samples per prompt, all numbers of samples above grow in proportion.
- It ends when the share is less than `MIN_RISE` above the baseline.

Fisher's test is conservative: with an unchanged share, an alarm starts with a probability of less than `MAX_P_VALUE`
per step and share, so less than once in 25,000 steps, for any share and any size of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, lgamma
from typing import Any

from toolroll.errors import Fault
from toolroll.records.record import Record
from toolroll.records.stats.alarm_messages import ALARM_LABELS, alarm_messages
from toolroll.rollout.trajectory import Fidelity, FinishReason

WINDOW_SAMPLES = 128
"""Minimum number of samples in the window."""
MIN_BASELINE_SAMPLES = 512
BASELINE_SAMPLES = 4096
BASELINE_STEPS = 50
MIN_RISE = 0.05
"""Minimum difference between a share and its baseline."""
MAX_P_VALUE = 1e-5
MIN_DESIGN_EFFECT = 2
"""Minimum factor by which the similarity of samples of one prompt is assumed to increase the variance of a share."""
SIMILAR_SAMPLES = 4
"""Number of samples of one prompt that have as much information as independent ones have in total."""


@dataclass(slots=True)
class AlarmCounts:
    """Number of samples, and of those of each kind that is watched."""

    samples: int = 0
    malformed: int = 0
    """Samples with a call that could not be read, of an unknown tool, or with invalid arguments."""
    infra: int = 0
    """Samples that an infra fault excludes from the loss."""
    truncated: int = 0
    """Samples that reached a limit of length."""
    rerendered: int = 0
    """Samples of which an earlier turn was rendered again."""

    def merge(self, other: AlarmCounts) -> None:
        """Add the counts of other samples."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def shares(self) -> dict[str, float | None]:
        """Return the share of each kind, None without samples."""
        return {name: getattr(self, name) / self.samples if self.samples else None for name in ALARM_LABELS}

    @classmethod
    def of_sample(
        cls, *, malformed: bool, outcome: str | None, finish_reason: str | None, fidelity: str | None
    ) -> AlarmCounts:
        """Return the counts of one sample with these fields."""
        return cls(
            samples=1,
            malformed=malformed,
            infra=outcome == "infra",
            truncated=finish_reason == FinishReason.LENGTH,
            rerendered=fidelity == Fidelity.RERENDERED,
        )

    @classmethod
    def of_record(cls, record: Record) -> AlarmCounts:
        """Return the counts of one recorded sample."""
        return cls.of_sample(
            malformed=any(is_malformed(call.get("metrics"), call.get("fault")) for call in record.calls),
            outcome=record.outcome,
            finish_reason=record.finish_reason,
            fidelity=record.fidelity,
        )


def is_malformed(metrics: Any, fault: Any) -> bool:
    """Return True if a call with these fields was not executed because of the way in which the model wrote it."""
    return fault == Fault.POLICY and isinstance(metrics, Mapping) and metrics.get("malformed") is True


class ShareAlarm:
    """Watches one share.

    Args:
        name: Field of `AlarmCounts`.
        samples_per_prompt: Number of samples per prompt.

    Attributes:
        active: Whether there is an alarm.
        share: The share in the window; None without samples.
        baseline: The share in the baseline; None without samples.
    """

    def __init__(self, name: str, samples_per_prompt: int = 1) -> None:
        self._name = name
        self._design_effect = max(MIN_DESIGN_EFFECT, samples_per_prompt // SIMILAR_SAMPLES)
        self._scale = self._design_effect // MIN_DESIGN_EFFECT
        self.active = False
        self.share: float | None = None
        self.baseline: float | None = None
        self._window: deque[tuple[int, int]] = deque()
        self._before: deque[tuple[int, int]] = deque()

    def add(self, counts: AlarmCounts) -> None:
        """Add a step."""
        if not counts.samples:
            return
        self._window.append((getattr(counts, self._name), counts.samples))
        while _sum(self._window)[1] - self._window[0][1] >= WINDOW_SAMPLES * self._scale:
            step = self._window.popleft()
            if not self.active:
                self._before.append(step)
        baseline_samples = BASELINE_SAMPLES * self._scale
        while len(self._before) > BASELINE_STEPS and _sum(self._before)[1] - self._before[0][1] >= baseline_samples:
            self._before.popleft()
        self._compare()

    def _compare(self) -> None:
        hits, samples = _sum(self._window)
        hits_before, samples_before = _sum(self._before)
        self.share = hits / samples
        self.baseline = hits_before / samples_before if samples_before else None
        if self.baseline is None or samples < WINDOW_SAMPLES * self._scale:
            return
        if samples_before < MIN_BASELINE_SAMPLES * self._scale:
            return
        if self.share - self.baseline < MIN_RISE:
            self.active = False
        elif not self.active:
            hits_before += self._design_effect - 1  # rounded up, which makes an alarm less likely
            effective = [count // self._design_effect for count in (hits, samples, hits_before, samples_before)]
            self.active = rise_probability(*effective) <= MAX_P_VALUE


class RunAlarms:
    """Watches all shares of a run.

    Args:
        samples_per_prompt: Number of samples per prompt.

    Example:
        >>> alarms = RunAlarms()
        >>> for malformed in (5, 5, 5, 51):
        ...     alarms.add(AlarmCounts(samples=256, malformed=malformed))
        >>> alarms.messages()["malformed"]
        '19.9 % samples with malformed tool calls, 2.0 % before'
    """

    def __init__(self, samples_per_prompt: int = 1) -> None:
        self._shares = {name: ShareAlarm(name, samples_per_prompt) for name in ALARM_LABELS}

    def add(self, counts: AlarmCounts) -> None:
        """Add a step."""
        for share in self._shares.values():
            share.add(counts)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the share in the window, the baseline and whether there is an alarm, by name, as JSON."""
        return {
            name: {"share": share.share, "baseline": share.baseline, "alarm": share.active}
            for name, share in self._shares.items()
        }

    def messages(self) -> dict[str, str]:
        """Return a message for each active alarm, by the name of the share."""
        return alarm_messages(self.figures())


def rise_probability(hits: int, samples: int, hits_before: int, samples_before: int) -> float:
    """Return the p-value of Fisher's exact test, one-sided.

    Args:
        hits: Samples of a kind in the window.
        samples: All samples in the window.
        hits_before: Samples of this kind in the baseline.
        samples_before: All samples in the baseline.

    Returns:
        The probability that at least `hits` of `hits + hits_before` are in the window, if they are distributed at
        random over all samples.
    """
    total = hits + hits_before
    everything = _log_choose(samples + samples_before, total)
    tail = range(hits, min(total, samples) + 1)
    return min(
        1.0, sum(exp(_log_choose(samples, k) + _log_choose(samples_before, total - k) - everything) for k in tail)
    )


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _sum(steps: deque[tuple[int, int]]) -> tuple[int, int]:
    return sum(hits for hits, _ in steps), sum(samples for _, samples in steps)
