"""Adapter for verl 0.8 and 0.9: toolroll's rollouts as an agent loop, and advantage estimators for excluded samples.

    actor_rollout_ref.model.external_lib=toolroll.integrations.verl
    actor_rollout_ref.rollout.agent.default_agent_loop=toolroll

Importing this package registers the agent loop `toolroll` and the advantage estimators `toolroll_grpo` etc. with verl.

Invariants:

- A sample with an infra fault contributes neither to the loss nor to a baseline. verl's trainers on TransferQueue do
  not receive it. Trainers that need a row for each sample receive a masked row, which the estimators of this package
  exclude; with another group-based estimator the run does not start.
- Trajectories are the same as those of `toolroll.Rollout`.
"""

from importlib.util import find_spec
from typing import Any

__all__ = ["ToolrollAgentLoop"]

if find_spec("verl") is not None:
    from toolroll.integrations.verl.advantage import register_estimators
    from toolroll.integrations.verl.agent_loop import ToolrollAgentLoop

    register_estimators()


def __getattr__(name: str) -> Any:
    if name == "ToolrollAgentLoop":
        from toolroll.errors import MissingExtra

        raise MissingExtra("verl", "verl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
