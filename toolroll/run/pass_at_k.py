"""PassAtK: the chance that one of k samples solves its problem, averaged over the prompts of a run. Pure.

By the unbiased estimator: of a prompt with c solved among s scored samples, 1 − C(s−c, k) / C(s, k), over the prompts
with s ≥ k. A sample without a reward, as the infrastructure failed, is no failure of the model's: it isn't among s.
Of a prompt three counts are kept, and those only until all of its samples are in.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import Any, NamedTuple


class _Prompt(NamedTuple):
    """The samples of a prompt so far."""

    seen: int = 0
    scored: int = 0
    solved: int = 0


class PassAtK:
    """For k = 1, 2, 4, … up to n, and n itself."""

    def __init__(self, n: int) -> None:
        self.prompts = 0
        """Of which there is a sample at least."""
        self._n = n
        self._sums: dict[int, float] = dict.fromkeys(sorted({1 << power for power in range(n.bit_length())} | {n}), 0.0)
        self._counts: dict[int, int] = dict.fromkeys(self._sums, 0)
        self._open: dict[int, _Prompt] = {}

    @property
    def incomplete(self) -> int:
        """Prompts of which samples are missing."""
        return len(self._open)

    def add(self, row: int, *, scored: bool, solved: bool) -> None:
        """One more sample of the prompt in this row."""
        self._put(row, _Prompt(1, int(scored), int(solved)))

    def merge(self, other: PassAtK) -> None:
        """What another one counted too."""
        self.prompts += other.prompts - len(other._open)
        for k in self._sums:
            self._sums[k] += other._sums[k]
            self._counts[k] += other._counts[k]
        for row, more in other._open.items():
            self._share(more, -1)
            self._put(row, more)

    def figures(self) -> dict[str, float]:
        """By k. Prompts of which samples are missing count with those that are in."""
        return {
            str(k): round(min(1.0, max(0.0, self._sums[k] / self._counts[k])), 6) for k in self._sums if self._counts[k]
        }

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "prompts": self.prompts,
            "sums": list(self._sums.values()),
            "counts": list(self._counts.values()),
            "open": [[row, *prompt] for row, prompt in self._open.items()],
        }

    @classmethod
    def of_state(cls, n: int, state: dict[str, Any]) -> PassAtK:
        """What gave this state."""
        made = cls(n)
        made.prompts = state["prompts"]
        made._sums = dict(zip(made._sums, state["sums"], strict=True))
        made._counts = dict(zip(made._sums, state["counts"], strict=True))
        made._open = {row: _Prompt(*counts) for row, *counts in state["open"]}
        return made

    def _put(self, row: int, more: _Prompt) -> None:
        """Add samples of a prompt: its new share of the averages takes the place of the one that it had."""
        before = self._open.pop(row, _Prompt())
        after = _Prompt(before.seen + more.seen, before.scored + more.scored, before.solved + more.solved)
        self._share(before, -1)
        self._share(after, +1)
        self.prompts += not before.seen
        if after.seen < self._n:
            self._open[row] = after

    def _share(self, prompt: _Prompt, sign: int) -> None:
        for k in self._sums:
            if k > prompt.scored:
                break
            self._sums[k] += sign * pass_at_k(prompt.scored, prompt.solved, k)
            self._counts[k] += sign


@lru_cache(maxsize=4096)
def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The chance that one of k samples solves it, estimated from more of them.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4)
    (0.25, 1.0)
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)
