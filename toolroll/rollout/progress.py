"""What the running and finished trajectories of a rollout have done so far, for displays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from toolroll.rollout.trajectory import TurnRecord


@dataclass
class RolloutProgress:
    """Counts since the start, including those of trajectories that are running."""

    turns: int = 0
    tokens: int = 0
    """Number of sampled tokens."""
    calls: int = 0
    """Number of tool calls that have ended."""
    unreachable: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a service has not answered, by its name: "engine" or the name of a tool."""

    def add_turns(self, turns: Iterable[TurnRecord]) -> None:
        """Add the responses of the engine."""
        for turn in turns:
            self.turns += 1
            self.tokens += turn.tokens

    def merged(self, other: RolloutProgress) -> RolloutProgress:
        """Return the sum with another rollout. A service is unreachable for as long as for one of them."""
        names = {*self.unreachable, *other.unreachable}
        return RolloutProgress(
            turns=self.turns + other.turns,
            tokens=self.tokens + other.tokens,
            calls=self.calls + other.calls,
            unreachable={name: max(self.unreachable.get(name, 0), other.unreachable.get(name, 0)) for name in names},
        )
