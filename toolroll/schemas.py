"""Pydantic models of tool schemas, tool calls, tool responses and chat messages.

Invariant: a tool schema reaches the prompt exactly as the user wrote it. Every JSON Schema keyword is kept, at any
depth and in the given order, with any flags of `model_dump`. The models declare only the fields that the code reads and
preserve all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator

JsonDict = dict[str, Any]


class _VerbatimModel(BaseModel):
    """A JSON object that is dumped with the same keys in the same order as it was given, including unknown keys.

    Only declared fields whose value is None are omitted: null is not a valid value of any keyword declared below. Other
    nulls, such as `default: null`, are kept.
    """

    model_config = ConfigDict(extra="allow")

    _key_order: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _record_key_order(cls, data: Any, handler: Callable[[Any], Self]) -> Self:
        model = handler(data)
        if isinstance(data, Mapping):
            model._key_order = tuple(data)
        return model

    @model_serializer(mode="plain")
    def _dump(self) -> JsonDict:
        declared = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        present = declared | (self.__pydantic_extra__ or {})
        return {key: _to_json(present[key]) for key in dict.fromkeys((*self._key_order, *present)) if key in present}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, BaseModel) and self.model_dump() == other.model_dump()


def _to_json(value: Any) -> Any:
    if isinstance(value, _VerbatimModel):
        return value._dump()
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value


class OpenAIFunctionPropertySchema(_VerbatimModel):
    """JSON Schema of one parameter of a function. Any keyword is allowed."""

    type: str | list[str] | None = None
    """JSON type or types of the parameter."""
    description: str | None = None
    """Description of the parameter, which the model reads."""
    enum: list[Any] | None = None
    """Allowed values."""


class OpenAIFunctionParametersSchema(_VerbatimModel):
    """JSON Schema of the parameters of a function, which form an object. Any keyword is allowed."""

    type: str | list[str] | None = None
    """JSON type, normally "object"."""
    properties: dict[str, OpenAIFunctionPropertySchema | bool] | None = None
    """Schemas of the parameters by name."""
    required: list[str] | None = None
    """Names of the parameters without a default."""


class OpenAIFunctionSchema(_VerbatimModel):
    """Schema of a function that the model may call."""

    name: str = Field(min_length=1)
    """Name by which the model calls the function."""
    description: str | None = None
    """Description of the function, which the model reads."""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])
    )
    """Schema of the parameters. By default, the function has none."""
    strict: bool | None = None
    """OpenAI's strict mode. Passed on to the chat template."""


class OpenAIFunctionToolSchema(_VerbatimModel):
    """Schema of a tool in OpenAI's chat format, as chat templates render it into the prompt.

    Example:
        >>> function = {"name": "now", "description": "Return the current time."}
        >>> schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
        >>> schema.function.name
        'now'
    """

    type: Literal["function"] = "function"
    """Kind of tool. Only functions exist."""
    function: OpenAIFunctionSchema
    """Schema of the function."""


def text_function_schema(name: str, description: str, **parameters: str) -> JsonDict:
    """Return the tool schema of a function whose parameters are all required strings.

    Args:
        name: Name of the function.
        description: Description of the function, which the model reads.
        **parameters: Description of each parameter.
    """
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class FunctionCall(BaseModel):
    """Name and arguments of a function call that the model wrote."""

    name: str
    """Name of the function. It may not exist."""
    arguments: str | JsonDict
    """Arguments as the model wrote them. Text is not necessarily valid JSON."""


class ToolCall(BaseModel):
    """One tool call in an assistant message."""

    id: str | None = None
    """Id that the response refers to, if the chat format has one."""
    type: Literal["function"] = "function"
    """Kind of call. Only functions exist."""
    function: FunctionCall
    """Function and arguments."""


class ToolResponse(BaseModel):
    """Response of a tool to the model: text, images, videos, or a combination of them.

    Example:
        >>> ToolResponse(text="42").is_text_only()
        True
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    text: str | None = None
    """Text that the model reads."""
    image: list[Any] | None = None
    """Images: PIL images, arrays, bytes or paths. The model sees them before the text."""
    video: list[Any] | None = None
    """Videos, in the form that the model's processor accepts."""

    @field_validator("image", "video", mode="before")
    @classmethod
    def _require_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"expected a list, got {type(value).__name__}; wrap a single item in a list")
        return value

    def is_empty(self) -> bool:
        """Return True if the response has neither text nor images nor videos."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return True if the response has text and neither images nor videos."""
        return bool(self.text) and not (self.image or self.video)


class Message(BaseModel):
    """One message of a conversation, as chat templates read it. Unknown keys are preserved."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message."""
    content: str | list[JsonDict] | None = None
    """Text, or a list of content parts."""
    reasoning_content: str | None = None
    """Reasoning of the assistant, which templates render separately."""
    tool_calls: list[ToolCall] | None = None
    """Tool calls of the assistant."""
    tool_call_id: str | None = None
    """Id of the call that a tool message responds to."""
    name: str | None = None
    """Name of the author, or of the tool that responds."""
