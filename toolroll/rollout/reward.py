"""Composition of a trajectory's reward.

    total = steps · Σ step rewards + Σ weight(tool) · calc_reward(tool) + Σ weight(function) · function(trajectory)

A step reward is the sum of the rewards of the tool calls in one turn. If an infra fault occurred or a reward function
returned None, the total is None, never 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial

from toolroll.errors import BudgetExhausted, InfraFault, ToolContractError, UserCodeError
from toolroll.limiter.limited import blocks_for_slot, call_in_thread, within_deadline
from toolroll.rollout.trajectory import Rewards, Trajectory
from toolroll.tools.base_tool import as_reward

MAX_WAITING_REWARDS = 256
"""Maximum number of sync reward functions with limits that run or wait for a slot."""

RewardFunction = Callable[[Trajectory], float | Awaitable[float | None] | None]


@dataclass(frozen=True)
class RewardRule:
    """Weights of the parts of a trajectory's reward, and reward functions of the whole trajectory.

    Args:
        steps: Weight of the step rewards.
        tools: Weight of each tool's `calc_reward`, by tool name; 1 by default.
        functions: Reward functions by name. A function takes the trajectory, may be async, and returns a number, or
            None if it cannot score the trajectory. To limit its calls, decorate it with `limited`; a sync function with
            limits runs in a thread.
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
            BudgetExhausted: If the budget of a function with limits is spent.
            InfraFault: If a function fails, times out or returns something other than a finite number or None. This
                is not the model's fault.
        """
        scores: dict[str, float | None] = {}
        for name, function in self.functions.items():
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = await _call(function, trajectory, time.monotonic() + timeout_s)
                scores[name] = None if value is None else as_reward(name, value)
            except ToolContractError as error:  # the value is not a number
                raise UserCodeError(f"Reward function {name!r} failed: {error}") from error
            except BudgetExhausted:
                raise
            except InfraFault as error:
                raise InfraFault(f"Reward function {name!r} failed: {error}") from error
            except (SystemExit, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                    raise
                raise UserCodeError.because(f"Reward function {name!r}", error) from error
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    raise InfraFault(f"Reward function {name!r} failed: timed out after {timeout_s:g} s") from error
                raise UserCodeError.because(f"Reward function {name!r}", error) from error
        return scores


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that may wait for slots. Those of the event loop must remain free for others."""
    return ThreadPoolExecutor(MAX_WAITING_REWARDS, "toolroll-reward")


async def _call(function: RewardFunction, trajectory: Trajectory, deadline: float) -> float | None:
    with within_deadline(deadline):
        if blocks_for_slot(function):
            value = await call_in_thread(_threads(), partial(function, trajectory))
        else:
            value = function(trajectory)
        return await value if inspect.isawaitable(value) else value
