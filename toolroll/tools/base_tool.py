"""BaseTool: what a model can call, with a life of its own in every trajectory.

A tool is one object per process; an *instance* of it is one trajectory's share, known by its `instance_id`. The life of
an instance is create → execute (any number of times, also at once) → calc_reward → release. All that a trajectory
changes belongs to its instance, never to the tool, so that many trajectories use one tool side by side.

The signatures are verl's, so that one class serves in both places. Nobody calls the four methods by hand in pairs:
`ToolInstance` keeps the promise that what is created is released.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from toolroll.errors import ConfigError, DuplicateInstance, ToolContractError, explain
from toolroll.schemas import OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.arguments import ArgumentChecker

State = TypeVar("State")
"""What one instance of a tool remembers between calls."""


class ToolResult(NamedTuple):
    """What one call of a tool gave."""

    response: ToolResponse
    """Shown to the model."""
    reward: float | None
    """The reward of this step; None where the tool gives none."""
    metrics: dict[str, Any]
    """For the records; never shown to the model."""


class ToolSettings(BaseModel):
    """Base for the settings that a tool reads from its `config`: a key that isn't declared is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["native"] = "native"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """The settings in `config`, or ConfigError that says which key is wrong."""
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            raise ConfigError(f"config: {explain(error, cls.model_fields)}.") from error


class BaseTool(ABC, Generic[State]):
    """A tool. Implement `execute`; add `new_state`, `calc_reward` and `release` where the tool needs them.

        class Countdown(BaseTool[list[int]]):
            def new_state(self, start: int = 3) -> list[int]:
                return [start]

            async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
                left = self.state(instance_id)
                left[0] -= 1
                return ToolResult(ToolResponse(text=f"{left[0]} left"), None, {})

    `new_state` gets the trajectory's `create_kwargs`. A tool whose start or end is more than that (a connection to
    open, a session to close) overrides `create` and `release`. `release` may be called for an instance whose `create`
    failed half-way; it must then clean up what there is.
    """

    default_schema: ClassVar[OpenAIFunctionToolSchema | Mapping[str, Any] | None] = None
    """The schema of a tool that brings its own; the one in the config goes before it."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        """Make the tool.

        Args:
            config: The settings under `config` in the YAML file.
            tool_schema: An OpenAIFunctionToolSchema, a mapping, or verl's schema object. None takes the class's own.
        """
        self.config = dict(config or {})
        self.tool_schema = self._read_schema(tool_schema)
        self.name = self.tool_schema.function.name
        self.arguments = ArgumentChecker(self.name, self.tool_schema.function.parameters.model_dump())
        """Checks what the model wrote as arguments: `tool.arguments.parse(text)`."""
        self.instances: dict[str, State] = {}
        """The state of every live instance, by its id."""

    def _read_schema(self, given: Any) -> OpenAIFunctionToolSchema:
        if given is None:
            given = self.default_schema
        if given is None and type(self).get_openai_tool_schema is not BaseTool.get_openai_tool_schema:
            given = self.get_openai_tool_schema()  # how classes written for verl bring theirs
        if given is None:
            raise ConfigError(
                f"{type(self).__name__} has no schema: give one under tool_schema, or as default_schema in the class."
            )
        if isinstance(given, OpenAIFunctionToolSchema):
            return given.model_copy(deep=True)
        try:
            return OpenAIFunctionToolSchema.model_validate(
                given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given
            )
        except ValidationError as error:
            raise ConfigError(f"The tool_schema of {type(self).__name__} is not usable: {explain(error)}") from error

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema that the model sees."""
        return self.tool_schema

    def new_state(self, *_: Any, **create_kwargs: Any) -> State:
        """What a new instance remembers. Called once per instance, with the trajectory's `create_kwargs`."""
        return cast("State", None)

    def state(self, instance_id: str) -> State:
        """What the instance remembers."""
        try:
            return self.instances[instance_id]
        except KeyError:
            raise ToolContractError(
                f"Tool {self.name!r} has no instance {instance_id!r}: it was never created, or is released already."
            ) from None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an instance. Its arguments come flat, or in one `create_kwargs=` as verl passes them."""
        instance_id = instance_id or str(uuid4())
        if instance_id in self.instances:
            raise DuplicateInstance(f"Tool {self.name!r} has an instance {instance_id!r} already: ids must differ.")
        create_kwargs = (kwargs.pop("create_kwargs", None) or {}) | kwargs
        self.instances[instance_id] = self.new_state(**create_kwargs)
        return instance_id, ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Carry out one call: what the model is shown, the step's reward, and metrics.

        Raise PolicyFault to tell the model what it did wrong, InfraFault where something that it can't influence is
        broken.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the whole trajectory as this tool sees it, beyond the rewards of its steps."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance. Never fails for one that isn't there."""
        self.instances.pop(instance_id, None)


def as_result(tool_name: str, value: Any) -> ToolResult:
    """What a tool's `execute` returned, checked.

    Tools that we never saw return what they like: text instead of a ToolResponse is taken.
    """
    if not (isinstance(value, tuple) and len(value) == 3):
        raise ToolContractError(
            f"execute of tool {tool_name!r} returned {type(value).__name__}: return (response, reward, metrics)."
        )
    response, reward, metrics = value
    if not isinstance(metrics, dict | None):
        raise ToolContractError(
            f"execute of tool {tool_name!r} returned metrics of type {type(metrics).__name__}: return a dict."
        )
    return ToolResult(
        _as_response(tool_name, response), None if reward is None else as_reward(tool_name, reward), metrics or {}
    )


def _as_response(tool_name: str, value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if value is None or isinstance(value, str):
        return ToolResponse(text=value)
    if not isinstance(value, dict):  # another library's ToolResponse, such as verl's
        value = {part: getattr(value, part) for part in ToolResponse.model_fields if hasattr(value, part)} or value
    try:
        return ToolResponse.model_validate(value)
    except ValidationError as error:
        raise ToolContractError(
            f"execute of tool {tool_name!r} returned a response of type {type(value).__name__}: "
            "return a ToolResponse or a str."
        ) from error


def as_reward(tool_name: str, value: Any) -> float:
    """A reward as a finite float. A NaN would spoil the whole batch, so it stops here."""
    try:
        reward = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise ToolContractError(
            f"Tool {tool_name!r} gave the reward {value!r:.80}: "
            "a reward is a finite number, or None for a step without one."
        )
    return reward
