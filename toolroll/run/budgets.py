"""Find the budgets of a run."""

from __future__ import annotations

import contextlib

from toolroll.errors import ConfigError
from toolroll.limiter.limited import declared_limits
from toolroll.limiter.settings import ResourceLimits
from toolroll.run.config import FunctionConfig, RunConfig
from toolroll.run.sample_worker import engine_limits, load_reward_function, load_tools


def budget_limits(config: RunConfig) -> dict[str, ResourceLimits]:
    """Return the limits with a budget that a run uses, by resource: of its engine, tools and functions with `limited`.

    Args:
        config: Configuration of the run.
    """
    for name, function in config.rewards.functions.items():
        with contextlib.suppress(ConfigError):  # it may be importable on the nodes of the workers only
            load_reward_function(name, function)  # for its functions with `limited`
    found = list(declared_limits().items())
    functions = [(name, one) for name, one in config.rewards.functions.items() if isinstance(one, FunctionConfig)]
    found += [(name, function.limits) for name, function in functions if function.limits is not None]
    found += [(tool.name, tool.limits) for tool in load_tools(config) if isinstance(tool.limits, ResourceLimits)]
    if (limits := engine_limits(config.engine)) is not None:
        found.append((str(limits.resource), limits))
    return {limits.resource or name: limits for name, limits in found if limits.budget}
