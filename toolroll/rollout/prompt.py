"""Prompt: what a trajectory begins with, out of a text, messages, or a row of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from toolroll.errors import ConfigError, did_you_mean, explain
from toolroll.schemas import Message

KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class Prompt(BaseModel):
    """What a trajectory begins with. Other keys of a row are carried along, as `extra` of its trajectories.

    >>> Prompt.model_validate({"prompt": "What is 6 times 7?", "ground_truth": "42"}).extra
    {'ground_truth': '42'}
    """

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1)
    """Or `prompt`: the same, or a text, which is a user's message."""
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    group: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, given: Any) -> Any:
        row = (
            {"prompt": given} if isinstance(given, str | list) else dict(given) if isinstance(given, Mapping) else given
        )
        if isinstance(row, dict) and "messages" not in row and "prompt" in row:
            prompt = row.pop("prompt")
            row["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(row, dict):  # columns of a table have a value in every row, and every tool in every struct
            given_kwargs = row.get("tools_kwargs") or {}
            row["tools_kwargs"] = {tool: _there(kwargs or {}) for tool, kwargs in dict(given_kwargs).items()}
            row["sampling_params"] = row.get("sampling_params") or {}
            row["group"] = str(row["group"]) if isinstance(row.get("group"), int) else row.get("group")
        return row

    @field_validator("tools_kwargs")
    @classmethod
    def _known_keys(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for tool, kwargs in given.items():
            for key in kwargs:
                if key not in KWARGS:
                    raise ValueError(f"{tool} has {key!r}{did_you_mean(key, KWARGS)}; there are {', '.join(KWARGS)}")
        return given

    @classmethod
    def read(cls, given: Any, group: str) -> Prompt:
        """A prompt out of whatever was given for one. It is of this group, unless it says another."""
        try:
            prompt = given if isinstance(given, Prompt) else cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"Prompt {group} can't be used: {explain(error)}.") from error
        return prompt if prompt.group is not None else prompt.model_copy(update={"group": group})

    @property
    def extra(self) -> dict[str, Any]:
        """The other keys of the row."""
        return dict(self.model_extra or {})


def _there(kwargs: Any) -> Any:
    return {key: value for key, value in kwargs.items() if value is not None} if isinstance(kwargs, dict) else kwargs
