"""verl: our rollout loop as an agent loop of its, and what its trainer needs to leave a damaged sample out.

    actor_rollout_ref.model.external_lib=toolroll.integrations.verl
    actor_rollout_ref.rollout.agent.default_agent_loop=toolroll

Importing this registers the agent loop `toolroll` (agent_loop.py) and the advantage estimators `toolroll_grpo` and so
on (advantage.py) with verl. It promises:

- A sample that the infrastructure damaged adds nothing to the loss, nor to any baseline. Where verl's trainer can do
  without it (those on TransferQueue), it isn't there. Where the trainer needs a row for each sample, the row is masked,
  and the estimators here set it aside; with another estimator of a group's the run ends before it begins.
- All else is as in our own rollouts: the loop is the same one (toolroll/rollout/loop.py).

verl 0.8 and 0.9.
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
