"""Gsm8kTool: the model submits an answer to a GSM8K question and is told how it did.

One instance is one question. A call whose answer does better than the one before it earns 0.0, any other −0.05, so that
the model doesn't submit the same thing again. `calc_reward` is the score of the last answer submitted, and 0.0 before
any was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from toolroll.rewards import gsm8k
from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings

NOT_BETTER = -0.05
"""The reward of a call that does no better than the one before it."""


@dataclass
class Gsm8kState:
    """One question: its true answer, what was submitted last, and the score of that."""

    ground_truth: str
    response: str = ""
    reward: float = 0.0


class Gsm8kTool(BaseTool[Gsm8kState]):
    """Scores an answer. Each trajectory is created with its `ground_truth`."""

    default_schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Check an answer to the GSM8K math problem.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer to the problem, a number."}},
                "required": ["answer"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        ToolSettings.read(self.config)

    def new_state(self, ground_truth: str | float) -> Gsm8kState:
        return Gsm8kState(gsm8k.parse_ground_truth(ground_truth))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        state = self.state(instance_id)
        answer = str(parameters.get("answer", ""))
        state.response = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        improved = reward > state.reward
        state.reward = reward
        return ToolResult(ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if improved else NOT_BETTER, {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self.state(instance_id)
        return gsm8k.compute_score(state.response, state.ground_truth, method="flexible")
