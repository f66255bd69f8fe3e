"""BaseTool: the base class of all tools.

There is one tool object per process and one *instance* of it per trajectory, identified by an `instance_id`. An
instance goes through create → execute (any number of times, possibly concurrently) → calc_reward → release. Mutable
state belongs to the instance and not to the tool, so any number of trajectories can share a tool.

The method signatures are those of verl, so one class works in both frameworks. Use `ToolInstance` instead of calling
the four methods directly: it guarantees that every instance is released.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from toolroll._internal.canonical import NotCanonical, hash_of
from toolroll.errors import ConfigError, DuplicateInstance, ToolContractError, validate
from toolroll.limiter.settings import ResourceLimits
from toolroll.schemas import OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.arguments import ArgumentValidator
from toolroll.tools.cache_settings import CacheSettings

State = TypeVar("State")
"""Type of the state that a tool keeps per instance."""


FINGERPRINT_CHARS = 16


class ToolResult(NamedTuple):
    """Result of one tool call.

    Example:
        >>> ToolResult(ToolResponse(text="72"), reward=1.0, metrics={}).reward
        1.0
    """

    response: ToolResponse
    """Response that the model reads."""
    reward: float | None
    """Reward of this step, or None if the tool does not reward steps."""
    metrics: dict[str, Any]
    """Metrics for the records. The model does not see them."""


class ToolSettings(BaseModel):
    """Base class for the settings that a tool reads from its `config`. Unknown keys are errors.

    Example:
        >>> class SearchSettings(ToolSettings):
        ...     top_k: int = 3
        >>> SearchSettings.read({"type": "native", "top_k": 5}).top_k
        5
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["native"] = "native"
    """Kind of tool, as verl's config files state it."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Validate the settings of a tool.

        Args:
            config: The mapping under `config` in the tool config file.

        Returns:
            The validated settings.

        Raises:
            ConfigError: If a key is unknown or missing, or a value is invalid.
        """
        return validate(cls, config, "config")


class BaseTool(ABC, Generic[State]):
    """Base class of tools.

    Subclasses implement `execute`, and override `new_state`, `calc_reward` and `release` as needed. A tool that has to
    do more than create a state when an instance starts, such as opening a connection, overrides `create` and `release`.
    `release` is also called for an instance whose `create` failed, and must then clean up whatever exists.

    Args:
        config: Settings under `config` in the tool config file.
        tool_schema: An OpenAIFunctionToolSchema, a mapping, or verl's schema object. By default, `default_schema`.

    Raises:
        ConfigError: If the tool has no schema or an invalid one.

    Example:
        >>> class Countdown(BaseTool[list[int]]):
        ...     default_schema = {"type": "function", "function": {"name": "countdown", "description": "Count down."}}
        ...
        ...     def new_state(self, start: int = 3) -> list[int]:
        ...         return [start]
        ...
        ...     async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        ...         remaining = self.state(instance_id)
        ...         remaining[0] -= 1
        ...         return ToolResult(ToolResponse(text=f"{remaining[0]} left"), None, {})
        >>> Countdown().name
        'countdown'
    """

    default_schema: ClassVar[OpenAIFunctionToolSchema | Mapping[str, Any] | None] = None
    """Schema that is used if the config file does not contain one."""
    returns_images: bool = False
    """True if responses may contain images. A model that cannot see them is then refused at the start."""
    limits: ResourceLimits | None = None
    """Limits of the calls, which `ToolInstance` applies. `limits` in a config file overrides them. The default name of
    the resource is the name of the tool."""
    service_settings: frozenset[str] = frozenset()
    """Names of settings that do not change results, such as the address of a service. They are no part of the
    `fingerprint`."""
    pure: bool = False
    """True if the result of a call depends on nothing but its arguments, the hidden arguments and the settings, so that
    results can be cached. `ToolInstance` then makes equal calls only once."""
    version: str | None = None
    """Version of the tool's behaviour. Change it when results change, so that earlier results are not used any more."""
    cache: CacheSettings | None = None
    """Settings of the cache. `cache` in a config file overrides them. By default, those of `CacheSettings` if the tool
    is pure; else there is no cache."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.config = dict(config or {})
        self.tool_schema = self._read_schema(tool_schema)
        self.name = self.tool_schema.function.name
        self.arguments = ArgumentValidator(self.name, self.tool_schema.function.parameters.model_dump())
        """Validator for the model's arguments: `tool.arguments.parse(text)`."""
        self.instances: dict[str, State] = {}
        """States of the live instances by id."""

    def _read_schema(self, schema: Any) -> OpenAIFunctionToolSchema:
        if schema is None:
            schema = self.default_schema
        if schema is None and type(self).get_openai_tool_schema is not BaseTool.get_openai_tool_schema:
            schema = self.get_openai_tool_schema()  # classes written for verl define their schema here
        if schema is None:
            remedy = "Add tool_schema to the config, or default_schema to the class."
            raise ConfigError(f"{type(self).__name__} has no schema. {remedy}")
        if isinstance(schema, OpenAIFunctionToolSchema):
            return schema.model_copy(deep=True)
        if isinstance(schema, BaseModel):
            schema = schema.model_dump(exclude_unset=True)
        return validate(OpenAIFunctionToolSchema, schema, f"The tool_schema of {type(self).__name__} is invalid")

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of the class or function, `version`, the settings and the schema.

        Recorded and cached results are used only for a tool with the same one. None if the settings contain objects
        that cannot be compared.
        """
        version = self.version if isinstance(self.version, str) else None
        settings = {name: value for name, value in self.config.items() if name not in self.service_settings}
        with suppress(NotCanonical):
            parts = self._implementation(), version, settings, self.tool_schema.model_dump()
            return hash_of(*parts)[:FINGERPRINT_CHARS]
        return None

    def _implementation(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @property
    def keeps_state(self) -> bool:
        """True if results may depend on the trajectory, so that a cache for the tool is an error.

        By default, True if the class creates a state or has a `calc_reward`, unless it declares itself as `pure`.
        """
        methods = ("create", "new_state", "calc_reward")
        overrides = any(getattr(type(self), name) is not getattr(BaseTool, name) for name in methods)
        return overrides and self.pure is not True

    def hidden_inputs(self, create_kwargs: Mapping[str, Any], execute_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, besides the model's arguments, on which the result of a call of a pure tool depends.

        Args:
            create_kwargs: The trajectory's `create_kwargs` for this tool.
            execute_kwargs: The arguments of `execute`, without the deadline.

        Returns:
            All of them, by default. A class that ignores some can override this method, to get more hits.
        """
        return {"create": dict(create_kwargs), "execute": dict(execute_kwargs)}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model sees."""
        return self.tool_schema

    def new_state(self, *_: Any, **create_kwargs: Any) -> State:
        """Return the initial state of an instance.

        Args:
            **create_kwargs: The trajectory's `create_kwargs` for this tool.

        Returns:
            The state, which `state()` returns during the trajectory. None by default.
        """
        return cast("State", None)

    def state(self, instance_id: str) -> State:
        """Return the state of a live instance.

        Args:
            instance_id: Id of the instance.

        Returns:
            The object that `new_state` returned.

        Raises:
            ToolContractError: If the instance was not created or has been released.
        """
        try:
            return self.instances[instance_id]
        except KeyError:
            raise ToolContractError(
                f"Tool {self.name!r} has no instance {instance_id!r}: it was not created, or it has been released."
            ) from None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance for one trajectory.

        Args:
            instance_id: Id of the instance. Generated by default.
            **kwargs: Arguments of `new_state`, either directly or in a single `create_kwargs` mapping as verl passes
                them.

        Returns:
            The id, and a response that may be empty.

        Raises:
            DuplicateInstance: If an instance with this id exists.
        """
        instance_id = instance_id or str(uuid4())
        if instance_id in self.instances:
            raise DuplicateInstance(f"Tool {self.name!r} already has an instance {instance_id!r}. Use a unique id.")
        self.instances[instance_id] = self.new_state(**state_kwargs(kwargs))
        return instance_id, ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Execute one tool call.

        Args:
            instance_id: Id of the instance.
            parameters: Arguments of the call, which satisfy the schema.
            **kwargs: The trajectory's `execute_kwargs` for this tool, and the `deadline` of the call.

        Returns:
            The response for the model, the reward of this step or None, and metrics. See `ToolResult`.

        Raises:
            PolicyFault: If the model caused a failure. It reads the message.
            InfraFault: If something other than the model caused a failure.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return this tool's reward for the whole trajectory, in addition to the rewards of its steps.

        Args:
            instance_id: Id of the instance.
            **kwargs: The trajectory's `calc_reward_kwargs` for this tool.

        Returns:
            The reward. 0.0 by default.
        """
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance. Must not fail if the instance does not exist.

        Args:
            instance_id: Id of the instance.
            **kwargs: The trajectory's `release_kwargs` for this tool.
        """
        self.instances.pop(instance_id, None)


def state_kwargs(create_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `new_state`, which may be in a single `create_kwargs` mapping as verl passes them.

    Args:
        create_kwargs: Arguments of `create`, without the id.
    """
    direct = {name: value for name, value in create_kwargs.items() if name != "create_kwargs"}
    return {**(create_kwargs.get("create_kwargs") or {}), **direct}


def as_response(tool_name: str, value: Any) -> ToolResponse:
    """Convert the response of `BaseTool.execute` to a ToolResponse.

    Args:
        tool_name: Name of the tool, for messages.
        value: A ToolResponse, text, None, or another library's response object.

    Returns:
        The response.

    Raises:
        ToolContractError: If the value has another type.
    """
    if isinstance(value, ToolResponse):
        return value
    if value is None or isinstance(value, str):
        return ToolResponse(text=value)
    if not isinstance(value, dict):  # another library's response object, such as verl's
        value = {part: getattr(value, part) for part in ToolResponse.model_fields if hasattr(value, part)} or value
    try:
        return ToolResponse.model_validate(value)
    except ValidationError as error:
        kind = type(value).__name__
        message = f"Tool {tool_name!r} returned a response of type {kind}. Return a ToolResponse or a str."
        raise ToolContractError(message) from error


def as_result(tool_name: str, value: Any, to_response: Callable[[str, Any], ToolResponse] = as_response) -> ToolResult:
    """Convert a return value of `BaseTool.execute` to a ToolResult.

    Args:
        tool_name: Name of the tool, for messages.
        value: A tuple (response, reward, metrics).
        to_response: Converts the response, given the name of the tool.

    Returns:
        The validated result.

    Raises:
        ToolContractError: If the value is not such a tuple, or the reward is not a finite number.
    """
    if not (isinstance(value, tuple) and len(value) == 3):
        returned = f"a tuple of {len(value)} items" if isinstance(value, tuple) else type(value).__name__
        raise ToolContractError(f"Tool {tool_name!r} returned {returned}. Return (response, reward, metrics).")
    response, reward, metrics = value
    if not isinstance(metrics, dict | None):
        raise ToolContractError(f"Tool {tool_name!r} returned metrics of type {type(metrics).__name__}. Return a dict.")
    reward = None if reward is None else as_reward(tool_name, reward)
    return ToolResult(to_response(tool_name, response), reward, metrics or {})


def as_reward(tool_name: str, value: Any) -> float:
    """Convert a reward to a finite float. A NaN would corrupt the whole batch.

    Args:
        tool_name: Name of the tool or reward function, for messages.
        value: A number, but not text.

    Returns:
        The reward.

    Raises:
        ToolContractError: If the value is not a finite number.
    """
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str) and math.isfinite(reward := float(value)):
            return reward
    remedy = "Return a finite number, or None for no reward."
    raise ToolContractError(f"Invalid reward from {tool_name!r}: {value!r:.80}. {remedy}")
