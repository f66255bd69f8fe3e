"""How a trajectory's reward is composed.

    total = steps · Σ step rewards + Σ weight(tool) · calc_reward(tool) + Σ weight(function) · function(trajectory)

A step's reward is the sum of what the calls of one turn earned. A weight that isn't named is 1. Where the
infrastructure failed, or a function gives None, there is no total: None, never 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from toolroll.errors import InfraFault
from toolroll.rollout.trajectory import Rewards, Trajectory

RewardFunction = Callable[[Trajectory], float | Awaitable[float | None] | None]


@dataclass(frozen=True)
class RewardRule:
    """Weights, and functions of the whole trajectory."""

    steps: float = 1.0
    tools: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the functions."""

    def total(self, rewards: Rewards) -> float | None:
        """The sum. Pure."""
        if any(value is None for value in rewards.functions.values()):
            return None
        parts = [self.steps * value for value in rewards.steps]
        parts += [self.tools.get(name, 1.0) * value for name, value in rewards.tools.items()]
        parts += [self.weights.get(name, 1.0) * (value or 0.0) for name, value in rewards.functions.items()]
        return math.fsum(parts)

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        """What the functions give. A function that raises is the infrastructure's fault: the model wrote none of it."""
        given: dict[str, float | None] = {}
        for name, function in self.functions.items():
            try:
                value = function(trajectory)
                given[name] = await value if inspect.isawaitable(value) else value
            except InfraFault:
                given[name] = None
            except Exception as error:
                raise InfraFault(f"The reward function {name!r} failed: {type(error).__name__}: {error}") from error
        return given
