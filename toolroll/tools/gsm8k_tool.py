"""Gsm8kTool: the model submits answers to a GSM8K question and receives their score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from toolroll.rewards import gsm8k
from toolroll.schemas import ToolResponse, text_function_schema
from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings

NO_IMPROVEMENT_REWARD = -0.05
"""Reward of a call whose score is not higher than that of the previous call."""


@dataclass
class Gsm8kState:
    """State of one question."""

    ground_truth: str
    response: str = ""
    """Last submitted answer."""
    reward: float = 0.0
    """Score of the last submitted answer."""


class Gsm8kTool(BaseTool[Gsm8kState]):
    """Scores answers to a GSM8K question.

    Each trajectory passes its `ground_truth` in `create_kwargs`. A call earns 0.0 if its score is higher than that of
    the previous call, and `NO_IMPROVEMENT_REWARD` otherwise, which discourages repeating an answer. `calc_reward`
    returns the score of the last answer, or 0.0 if none was submitted.

    Args:
        config: Settings under `config` in the tool config file. The tool has no settings besides `type`.
        tool_schema: Schema of the tool. By default, a function `calc_gsm8k_reward` with the parameter `answer`.

    Raises:
        ConfigError: If `config` has an unknown key or the schema is invalid.

    Example:
        >>> Gsm8kTool().name
        'calc_gsm8k_reward'
    """

    default_schema: ClassVar = text_function_schema(
        "calc_gsm8k_reward", "Check an answer to the GSM8K math problem.", answer="The answer to the problem, a number."
    )

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        ToolSettings.read(self.config)

    def new_state(self, ground_truth: str | float) -> Gsm8kState:
        """Return the state of a new question.

        Args:
            ground_truth: Correct answer, or a GSM8K solution that contains it after `####`.

        Returns:
            The state, without a submitted answer.

        Raises:
            ValueError: If the ground truth is not a number.
        """
        return Gsm8kState(gsm8k.parse_ground_truth(ground_truth))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Score an answer.

        Args:
            instance_id: Id of the instance.
            parameters: The `answer`.
            **kwargs: Ignored.

        Returns:
            The parsed answer and its score as text, and the reward of this step.
        """
        state = self.state(instance_id)
        answer = str(parameters.get("answer", ""))
        state.response = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state.reward else NO_IMPROVEMENT_REWARD
        state.reward = reward
        return ToolResult(ToolResponse(text=f"Current parsed {answer=} {reward=}"), step_reward, {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last submitted answer.

        Args:
            instance_id: Id of the instance.
            **kwargs: Ignored.

        Returns:
            1.0 if the answer is correct, otherwise 0.0.
        """
        state = self.state(instance_id)
        return gsm8k.compute_score(state.response, state.ground_truth, method="flexible")
