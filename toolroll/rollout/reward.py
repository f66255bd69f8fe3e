"""How a trajectory's reward is composed.

    total = steps · Σ step rewards + Σ weight(tool) · calc_reward(tool) + Σ weight(function) · function(trajectory)

A step's reward is the sum of what the calls of one turn earned. A weight that isn't named is 1. Where the
infrastructure failed, or a function gives None, there is no total: None, never 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from toolroll.errors import InfraFault
from toolroll.rollout.trajectory import Rewards, Trajectory
from toolroll.tools.base_tool import as_reward

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

    async def score(self, trajectory: Trajectory, seconds: float) -> dict[str, float | None]:
        """What the functions give, in so many seconds.

        One that fails, takes longer, or gives something that is no finite number, is the infrastructure's fault: the
        model wrote none of it.
        """
        given: dict[str, float | None] = {}
        for name, function in self.functions.items():
            try:
                async with asyncio.timeout(seconds) as limit:
                    value = function(trajectory)
                    value = await value if inspect.isawaitable(value) else value
                given[name] = None if value is None else as_reward(name, value)
            except InfraFault as error:
                raise InfraFault(f"The reward function {name!r} failed: {error}") from error
            except Exception as error:
                late = isinstance(error, TimeoutError) and limit.expired()
                said = f"it took longer than {seconds:g} s" if late else f"{type(error).__name__}: {error}"
                raise InfraFault(f"The reward function {name!r} failed: {said}") from error
        return given
