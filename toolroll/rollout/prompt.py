"""The start of a trajectory, read from a text, a list of messages or a row of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from toolroll.errors import did_you_mean, validate
from toolroll.schemas import Message

TOOL_KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class Prompt(BaseModel):
    """The start of a trajectory.

    A prompt is validated from a text, a list of messages, or a row with `prompt` (a text or messages) or `messages`.
    Other keys of the row are kept in `extra` and copied to the trajectories.

    Raises:
        pydantic.ValidationError: If `messages` is empty or `tools_kwargs` has an unknown key.

    Example:
        >>> Prompt.model_validate({"prompt": "What is 6 times 7?", "ground_truth": "42"}).extra
        {'ground_truth': '42'}
    """

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1)
    """The first messages of the conversation."""
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keyword arguments by tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters of this prompt. They override those of the rollout."""
    group: str | None = None
    """Id that all samples of the prompt share; by default its position among the prompts."""

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, value: Any) -> Any:
        if isinstance(value, str | list):
            value = {"prompt": value}
        if not isinstance(value, Mapping):
            return value
        row = dict(value)
        if "messages" not in row and "prompt" in row:
            prompt = row.pop("prompt")
            row["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # A table has every column in every row and every tool in every struct, with None for missing values.
        tools_kwargs = dict(row.get("tools_kwargs") or {})
        row["tools_kwargs"] = {tool: _without_none(kwargs or {}) for tool, kwargs in tools_kwargs.items()}
        row["sampling_params"] = row.get("sampling_params") or {}
        row["group"] = str(row["group"]) if isinstance(row.get("group"), int) else row.get("group")
        return row

    @field_validator("tools_kwargs")
    @classmethod
    def _check_keys(cls, tools_kwargs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for tool, kwargs in tools_kwargs.items():
            for key in kwargs:
                if key not in TOOL_KWARGS_KEYS:
                    raise ValueError(f"unknown key {key!r} for tool {tool!r}{did_you_mean(key, TOOL_KWARGS_KEYS)}")
        return tools_kwargs

    @classmethod
    def read(cls, value: Any, group: str) -> Prompt:
        """Validate a prompt.

        Args:
            value: A Prompt, a text, messages, or a row.
            group: Group of the prompt if it names none.

        Returns:
            The prompt, with a group.

        Raises:
            ConfigError: If the value is not a valid prompt.
        """
        prompt = validate(cls, value, f"Invalid prompt {group}")
        return prompt if prompt.group is not None else prompt.model_copy(update={"group": group})

    @property
    def extra(self) -> dict[str, Any]:
        """The other keys of the row."""
        return dict(self.model_extra or {})


def _without_none(kwargs: Any) -> Any:
    return {key: value for key, value in kwargs.items() if value is not None} if isinstance(kwargs, dict) else kwargs
