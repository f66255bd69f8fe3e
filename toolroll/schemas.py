"""The nouns: what a tool looks like to the model, what the model calls, what a tool answers, and the messages between
them.

A tool's schema is the user's own text. It reaches the prompt as it was written: every JSON Schema keyword, at any
depth, in the order given. The models here name the few parts that the code reads and carry the rest along untouched,
whatever flags `model_dump` is called with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_serializer,
    model_validator,
)

JsonDict = dict[str, Any]


class _AsWritten(BaseModel):
    """A JSON object that is dumped as it was written: the same keys in the same order, unknown ones too.

    Only a declared field that is None is left out: `enum=None` in Python means "no enum", and null is no valid value of
    any keyword declared below. A null elsewhere (`default: null`) is the user's and stays.
    """

    model_config = ConfigDict(extra="allow")

    _written: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _remember_order(cls, data: Any, handler: ModelWrapValidatorHandler[_AsWritten]) -> _AsWritten:
        made = handler(data)
        if isinstance(data, Mapping):
            made._written = tuple(data)
        return made

    @model_serializer(mode="plain")
    def _dump(self) -> JsonDict:
        declared = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        present = declared | (self.__pydantic_extra__ or {})
        order = [
            *(key for key in self._written if key in present),
            *(key for key in present if key not in self._written),
        ]
        return {key: _plain(present[key]) for key in order}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, BaseModel) and self.model_dump() == other.model_dump()


def _plain(value: Any) -> Any:
    """`value` with the schema parts in it dumped; all else is the user's JSON and is left alone."""
    if isinstance(value, _AsWritten):
        return value._dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


class OpenAIFunctionPropertySchema(_AsWritten):
    """The schema of one parameter: any JSON Schema object."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_AsWritten):
    """The schema of all parameters of a function: a JSON Schema for an object."""

    type: str | list[str] | None = None
    properties: dict[str, OpenAIFunctionPropertySchema | bool] | None = None
    required: list[str] | None = None


class OpenAIFunctionSchema(_AsWritten):
    """A function that the model may call: its name, what it does, and its parameters."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])
    )
    strict: bool | None = None


class OpenAIFunctionToolSchema(_AsWritten):
    """A tool as OpenAI's chat format writes it, and as chat templates put it into the prompt.

    >>> function = {"name": "now", "description": "Tell the time."}
    >>> schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    >>> schema.function.name
    'now'
    """

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class FunctionCall(BaseModel):
    """What the model wants to call. `arguments` is kept as the model wrote it: nothing says that it is valid JSON."""

    name: str
    arguments: str | JsonDict


class ToolCall(BaseModel):
    """One tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolResponse(BaseModel):
    """What a tool answers: text, images, videos, or several of them.

    Images and videos are in the form that the model's processor takes.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"expected a list, got {type(value).__name__}: wrap a single one in a list, [value]")
        return value

    def is_empty(self) -> bool:
        """Nothing to show the model."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """There is text, and nothing beside it."""
        return bool(self.text) and not (self.image or self.video)


class Message(BaseModel):
    """One message of a conversation, as chat templates read it.

    Keys that a template knows and we don't are carried along.
    """

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonDict] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
