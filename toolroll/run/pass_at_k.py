"""Estimate pass@k: the probability that at least one of k samples solves a prompt, averaged over the prompts.

For a prompt with c solved samples among s scored ones, the unbiased estimator is 1 − C(s−c, k) / C(s, k). Prompts with
s < k are left out. Samples without a reward (infra faults) are not scored, so they count neither for nor against the
model. Memory: the number of prompts for each pair (s, c), and three counts for each prompt with missing samples.
"""

from __future__ import annotations

from collections import Counter
from math import comb
from typing import Any, NamedTuple


class _PromptCounts(NamedTuple):
    """Numbers of samples of one prompt."""

    seen: int
    scored: int
    solved: int


class PassAtK:
    """Incremental pass@k for k = 1, 2, 4, … and n.

    Args:
        n: Number of samples per prompt.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompts: Counter[tuple[int, int]] = Counter()
        """Number of prompts by their numbers of scored and solved samples."""
        self._incomplete: dict[int, _PromptCounts] = {}

    def add(self, row: int, *, scored: bool, solved: bool) -> None:
        """Add one sample of the prompt in the given row."""
        self._add_counts(row, _PromptCounts(1, int(scored), int(solved)))

    def merge(self, other: PassAtK) -> None:
        """Add all samples of another instance."""
        self._prompts.update(other._prompts)
        for row, counts in other._incomplete.items():
            self._prompts[counts.scored, counts.solved] -= 1
            self._add_counts(row, counts)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of prompts with any and with missing samples, and pass@k by k, as a JSON object.

        Prompts with missing samples contribute those that are known.
        """
        estimates = {}
        for k in sorted({1 << power for power in range(self._n.bit_length())} | {self._n}):
            known = {counts: prompts for counts, prompts in self._prompts.items() if prompts and counts[0] >= k}
            if known:
                total = sum(prompts * pass_at_k(*counts, k) for counts, prompts in known.items())
                estimates[str(k)] = round(total / sum(known.values()), 6)
        return {"prompts": self._prompts.total(), "incomplete_prompts": len(self._incomplete), "pass_at_k": estimates}

    def state(self) -> dict[str, Any]:
        """Return the complete state as a JSON object."""
        return {
            "by_counts": list(self._prompts.items()),
            "open": [[row, *prompt] for row, prompt in self._incomplete.items()],
        }

    @classmethod
    def from_state(cls, n: int, state: dict[str, Any]) -> PassAtK:
        """Restore an instance from the result of `state()`."""
        restored = cls(n)
        restored._prompts.update({(scored, solved): prompts for (scored, solved), prompts in state["by_counts"]})
        restored._incomplete = {row: _PromptCounts(*counts) for row, *counts in state["open"]}
        return restored

    def _add_counts(self, row: int, added: _PromptCounts) -> None:
        before = self._incomplete.pop(row, None)
        if before is not None:
            self._prompts[before.scored, before.solved] -= 1
            added = _PromptCounts(*map(sum, zip(before, added, strict=True)))
        self._prompts[added.scored, added.solved] += 1
        if added.seen < self._n:
            self._incomplete[row] = added


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the estimated probability that at least one of k samples is solved.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4)
    (0.25, 1.0)
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)
