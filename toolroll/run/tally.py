"""Tally: what came of many trajectories, in bounded memory however many they are. Pure.

Each trajectory is told in an Outcome, which is small enough to be sent about. Tallies of parts are merged to that of
the whole, and can be written down as JSON: a few kilobytes, and a few bytes for each prompt that has samples missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from toolroll.errors import Fault
from toolroll.records.histogram import Histogram
from toolroll.records.record import Record, number
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.pass_at_k import PassAtK

LONGEST_ERROR = 160
"""Characters of an error that are kept."""
ERRORS = 16
"""Different errors that are told apart."""
OTHERS = "others"
COUNTED = ("finish_reasons", "outcomes", "fidelity", "faults", "errors")
SPREAD = ("seconds", "tool_seconds", "queue_wait")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Outcome(NamedTuple):
    """One trajectory, in short."""

    row: int
    sample: int
    reward: float | None
    outcome: str
    finish_reason: str
    turns: int
    sampled: int
    """Tokens that the engine sampled."""
    tokens: int
    """All tokens of it; 0 where the engine gives text."""
    calls: int
    policy_faults: int
    infra_faults: int
    seconds: float
    tool_seconds: float
    """Of its calls, added up."""
    queue_wait: float
    """Of its calls, for a slot."""
    fidelity: str
    error: str | None = None
    """What failed, where it ended so."""

    @classmethod
    def of(cls, trajectory: Trajectory, row: int) -> Outcome:
        """What is told of a trajectory."""
        calls = trajectory.calls
        return cls(
            row=row,
            sample=trajectory.sample,
            reward=trajectory.rewards.total,
            outcome=trajectory.outcome,
            finish_reason=str(trajectory.finish_reason),
            turns=len({turn.turn for turn in trajectory.turns}),
            sampled=sum(turn.tokens for turn in trajectory.turns),
            tokens=len(trajectory.tokens),
            calls=len(calls),
            policy_faults=sum(call.fault is Fault.POLICY for call in calls),
            infra_faults=sum(call.fault is Fault.INFRA for call in calls),
            seconds=trajectory.seconds,
            tool_seconds=sum(call.seconds for call in calls),
            queue_wait=sum(_queue_wait(call.metrics) for call in calls),
            fidelity=str(trajectory.fidelity),
            error=_short(trajectory.error) if trajectory.outcome == "infra" else None,
        )

    @classmethod
    def of_record(cls, record: Record, row: int) -> Outcome:
        """The same of a line that an earlier run wrote. Where it wrote no tokens, none are counted."""
        summary = record.summary()
        return cls(
            row=row,
            sample=record.sample or 0,
            reward=record.score,
            outcome=record.outcome or "ok",
            finish_reason=record.finish_reason or "",
            turns=summary.turns,
            sampled=int(sum(number(turn.get("tokens")) or 0 for turn in record.turns)),
            tokens=summary.tokens or 0,
            calls=summary.calls,
            policy_faults=summary.policy_faults,
            infra_faults=summary.infra_faults,
            seconds=record.seconds or 0.0,
            tool_seconds=sum(number(call.get("seconds")) or 0.0 for call in record.calls),
            queue_wait=sum(_queue_wait(call.get("metrics")) for call in record.calls),
            fidelity=record.fidelity or "",
            error=_short(record.error) if record.outcome == "infra" else None,
        )


class Tally:
    """What came of a run so far.

    Args:
        n: Samples per prompt.
        solved_at: A trajectory with this reward has solved its problem.
    """

    def __init__(self, n: int = 1, solved_at: float = 1.0) -> None:
        self._n = n
        self._solved_at = solved_at
        self._sums: Counter[str] = Counter()
        """Of trajectories, scored, solved, turns, sampled_tokens, tokens, calls."""
        self._reward = 0.0
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTED}
        self._spread: dict[str, Histogram] = {name: Histogram() for name in SPREAD}
        self._pass = PassAtK(n)

    @property
    def done(self) -> int:
        """Trajectories."""
        return self._sums["trajectories"]

    @property
    def sampled(self) -> int:
        """Tokens that the engine sampled."""
        return self._sums["sampled_tokens"]

    @property
    def calls(self) -> int:
        """Of tools."""
        return self._sums["calls"]

    def add(self, one: Outcome) -> None:
        """One more trajectory."""
        reward = one.reward if one.reward is not None and isfinite(one.reward) else None
        solved = reward is not None and reward >= self._solved_at
        self._reward += reward or 0.0
        sums, faults = self._sums, self._counts["faults"]
        sums["trajectories"] += 1
        sums["scored"] += reward is not None
        sums["solved"] += solved
        sums["turns"] += one.turns
        sums["sampled_tokens"] += one.sampled
        sums["tokens"] += one.tokens
        sums["calls"] += one.calls
        faults["policy"] += one.policy_faults
        faults["infra"] += one.infra_faults
        self._counts["finish_reasons"][one.finish_reason] += 1
        self._counts["outcomes"][one.outcome] += 1
        self._counts["fidelity"][one.fidelity] += 1
        if one.error is not None:
            self._add_error(one.error, 1)
        self._spread["seconds"].add(one.seconds)
        if one.calls:  # a trajectory without calls says nothing about how long they take
            self._spread["tool_seconds"].add(one.tool_seconds)
            self._spread["queue_wait"].add(one.queue_wait)
        self._pass.add(one.row, scored=reward is not None, solved=solved)

    def merge(self, other: Tally) -> None:
        """What another one counted too."""
        self._reward += other._reward
        self._sums.update(other._sums)
        for name, counts in other._counts.items():
            if name == "errors":
                for error, count in counts.items():
                    self._add_error(error, count)
            else:
                self._counts[name].update(counts)
        for name, spread in other._spread.items():
            self._spread[name].merge(spread)
        self._pass.merge(other._pass)

    def figures(self) -> dict[str, Any]:
        """Everything, for people and programs. Prompts of which samples are missing count with those that are in."""
        sums = {name: self._sums[name] for name in ("turns", "sampled_tokens", "tokens", "calls")}
        return {
            "trajectories": self.done,
            "prompts": self._pass.prompts,
            "incomplete_prompts": self._pass.incomplete,
            "scored": self._sums["scored"],
            "solved": self._sums["solved"],
            "mean_reward": round(self._reward / self._sums["scored"], 6) if self._sums["scored"] else None,
            "pass_at_k": self._pass.figures(),
            **{name: dict(counts.most_common()) for name, counts in self._counts.items()},
            **sums,
            **{name: _figures(spread) for name, spread in self._spread.items()},
        }

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "n": self._n,
            "solved_at": self._solved_at,
            "sums": dict(self._sums),
            "reward": self._reward,
            "counts": {name: dict(counts) for name, counts in self._counts.items()},
            "spread": {name: spread.state() for name, spread in self._spread.items()},
            "pass_at_k": self._pass.state(),
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Tally:
        """What gave this state. Raises LookupError, TypeError or ValueError where nothing did."""
        made = cls(state["n"], state["solved_at"])
        made._sums.update(state["sums"])
        made._reward = state["reward"]
        for name in COUNTED:
            made._counts[name].update(state["counts"][name])
        made._spread = {name: Histogram.of_state(state["spread"][name]) for name in SPREAD}
        made._pass = PassAtK.of_state(made._n, state["pass_at_k"])
        return made

    def _add_error(self, error: str, count: int) -> None:
        errors = self._counts["errors"]
        errors[error if error in errors or len(errors) < ERRORS else OTHERS] += count


def _queue_wait(metrics: Any) -> float:
    value = metrics.get("queue_wait") if isinstance(metrics, Mapping) else None
    return number(value) or 0.0


def _short(error: str | None) -> str:
    """The first line of an error, and no more of that than is needed to know it again."""
    line = next(iter((error or "").splitlines()), "") or "unknown"
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def _figures(spread: Histogram) -> dict[str, float]:
    quantiles = {name: spread.quantile(share) for name, share in QUANTILES.items()}
    found = {"mean": spread.mean, **quantiles, "max": spread.most}
    return {name: float(f"{value or 0.0:.4g}") for name, value in found.items()}
