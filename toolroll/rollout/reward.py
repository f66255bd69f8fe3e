"""Composition of a trajectory's reward.

    total = steps · Σ step rewards + Σ weight(tool) · calc_reward(tool) + Σ weight(function) · function(trajectory)

A step reward is the sum of the rewards of the tool calls in one turn. If an infra fault occurred or a reward function
returned None, the total is None, never 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from toolroll.errors import InfraFault, ToolContractError, UserCodeError
from toolroll.rollout.trajectory import Rewards, Trajectory
from toolroll.tools.base_tool import as_reward

RewardFunction = Callable[[Trajectory], float | Awaitable[float | None] | None]


@dataclass(frozen=True)
class RewardRule:
    """Weights of the parts of a trajectory's reward, and reward functions of the whole trajectory.

    Args:
        steps: Weight of the step rewards.
        tools: Weight of each tool's `calc_reward`, by tool name; 1 by default.
        functions: Reward functions by name. A function takes the trajectory, may be async, and returns a number, or
            None if it cannot score the trajectory.
        weights: Weight of each reward function, by name; 1 by default.

    Example:
        >>> def long_enough(trajectory: Trajectory) -> float:
        ...     return float(len(trajectory.messages) > 2)
        >>> rule = RewardRule(steps=0.1, functions={"long_enough": long_enough})
        >>> rule.total(Rewards(total=None, steps=(1.0, 2.0), functions={"long_enough": 1.0}))
        1.3
    """

    steps: float = 1.0
    tools: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def total(self, rewards: Rewards) -> float | None:
        """Return the weighted sum of rewards.

        Args:
            rewards: The rewards of the steps, tools and functions.

        Returns:
            The sum, or None if a reward function returned None.
        """
        if any(value is None for value in rewards.functions.values()):
            return None
        parts = [self.steps * value for value in rewards.steps]
        parts += [self.tools.get(name, 1.0) * value for name, value in rewards.tools.items()]
        parts += [self.weights.get(name, 1.0) * (value or 0.0) for name, value in rewards.functions.items()]
        return math.fsum(parts)

    async def score(self, trajectory: Trajectory, timeout_s: float) -> dict[str, float | None]:
        """Call the reward functions, one after another.

        Args:
            trajectory: The finished trajectory.
            timeout_s: Timeout for each function, in seconds.

        Returns:
            The result of each function, by name.

        Raises:
            InfraFault: If a function fails, times out or returns something other than a finite number or None. This
                is not the model's fault.
        """
        scores: dict[str, float | None] = {}
        for name, function in self.functions.items():
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = function(trajectory)
                    value = await value if inspect.isawaitable(value) else value
                scores[name] = None if value is None else as_reward(name, value)
            except ToolContractError as error:  # the value is not a number
                raise UserCodeError(f"Reward function {name!r} failed: {error}") from error
            except InfraFault as error:
                raise InfraFault(f"Reward function {name!r} failed: {error}") from error
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    raise InfraFault(f"Reward function {name!r} failed: timed out after {timeout_s:g} s") from error
                raise UserCodeError.because(f"Reward function {name!r}", error) from error
        return scores
