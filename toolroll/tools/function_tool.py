"""@tool: a typed function becomes a tool.

The schema comes from the signature (any type that pydantic knows) and the Google-style docstring. What the model passes
is checked against it and arrives as the annotated types: a parameter annotated with a pydantic model gets that model. A
sync function runs in a thread, never on the event loop.

A parameter annotated `Hidden[...]` is not the model's: it is filled by name from what the trajectory carries, see
`Hidden`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from toolroll.errors import ConfigError, InvalidArguments, ToolContractError, explain
from toolroll.schemas import OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result

THREADS = 64
"""How many calls of one sync function run at once, unless `@tool(threads=…)` says otherwise."""

T = TypeVar("T")


class _HiddenMark:
    """Marks a parameter that the model doesn't see."""


Hidden = Annotated[T, _HiddenMark()]
"""A parameter that the model doesn't see. Its value is looked up by its name, first among what the
call carries (`execute_kwargs`), then among what the trajectory was created with (`create_kwargs`). Two names are always
there: `instance_id`, and `state`, a dict that lasts as long as the trajectory.

    @tool
    def check(answer: str, ground_truth: Hidden[str], state: Hidden[dict[str, Any]]) -> str: ...
"""


@dataclass(frozen=True)
class _Signature:
    """What a function's signature and docstring say, split into the model's part and the hidden part."""

    schema: OpenAIFunctionToolSchema
    arguments: type[BaseModel]
    """Validates the model's arguments; its fields carry the parameters' names as aliases, as any name is allowed there.
    """
    hidden: dict[str, inspect.Parameter]


class FunctionTool(BaseTool[dict[str, Any]]):
    """A tool that calls a function. Made by `@tool`; calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        threads: int = THREADS,
        tool_schema: Any = None,
    ) -> None:
        self.function = function
        self._options: dict[str, Any] = {"name": name, "description": description, "threads": threads}
        self._threads = threads
        self._signature = _read_signature(function, name, description)
        super().__init__({}, tool_schema or self._signature.schema)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def copy(self, tool_schema: Any = None) -> FunctionTool:
        """The same function as a tool of its own, with no instances yet; with another schema, if one is given."""
        return FunctionTool(self.function, **self._options, tool_schema=tool_schema)

    def new_state(self, **create_kwargs: Any) -> dict[str, Any]:
        return {"state": {}, **create_kwargs}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        carried = {"instance_id": instance_id, **self.state(instance_id), **kwargs}
        arguments = self._visible(parameters) | self._hidden(carried)
        if inspect.iscoroutinefunction(self.function):
            returned = await self.function(**arguments)
        else:
            call = partial(contextvars.copy_context().run, self.function, **arguments)
            returned = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        if isinstance(returned, tuple):
            return as_result(self.name, returned)
        return ToolResult(_as_response(self.name, returned), None, {})

    def _visible(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = self._signature.arguments.model_validate(parameters)
        except ValidationError as error:
            raise InvalidArguments(f"Invalid arguments for {self.name}: {explain(error)}.") from error
        return {str(field.alias): getattr(checked, name) for name, field in type(checked).model_fields.items()}

    def _hidden(self, carried: dict[str, Any]) -> dict[str, Any]:
        for name, parameter in self._signature.hidden.items():
            if name not in carried and parameter.default is parameter.empty:
                raise ToolContractError(
                    f"Tool {self.name!r} needs {name!r} for every trajectory: pass it in create_kwargs."
                )
        return {name: carried[name] for name in self._signature.hidden if name in carried}

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        # One pool per tool, so that a slow tool holds up nobody but itself. Threads are made as they are needed.
        return ThreadPoolExecutor(self._threads, thread_name_prefix=f"tool-{self.name}")


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, threads: int = THREADS
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a typed function a tool.

        @tool
        def add(a: int, b: int = 0) -> int:
            \"\"\"Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            \"\"\"
            return a + b

    The function returns a str, anything that JSON can say (the model sees the JSON), a ToolResponse, or (response,
    reward, metrics).

    Args:
        function: The function, sync or async.
        name: What the model calls it; the function's name by default.
        description: What the model is told; the docstring's text by default.
        threads: How many calls of a sync function run at once.
    """
    return FunctionTool(function, **options) if function is not None else partial(FunctionTool, **options)


def _read_signature(function: Callable[..., Any], name: str | None, description: str | None) -> _Signature:
    name = name or function.__name__
    doc = docstring_parser.parse(inspect.getdoc(function) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    description = (description or doc.description or "").strip()
    if not description:
        raise ConfigError(f"Tool {name!r} has no description, so a model can't know what it is for: write a docstring.")
    told = {param.arg_name: param.description or "" for param in doc.params}
    parameters = inspect.signature(function).parameters
    if unknown := told.keys() - parameters.keys():
        raise ConfigError(
            f"The docstring of tool {name!r} describes {sorted(unknown)}, which are no parameters of the function."
        )

    fields: dict[str, Any] = {}
    hidden: dict[str, inspect.Parameter] = {}
    hints = _type_hints(function, name)
    for parameter in parameters.values():
        hint = _checked_hint(parameter, hints, name)
        if any(isinstance(mark, _HiddenMark) for mark in getattr(hint, "__metadata__", ())):
            hidden[parameter.name] = parameter
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        about = Field(default, alias=parameter.name, description=" ".join(told.get(parameter.name, "").split()) or None)
        fields[f"field_{len(fields)}"] = (hint, about)

    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters_schema = _parameters_schema(arguments)
    except PydanticUserError as error:
        raise ConfigError(
            f"Tool {name!r} has a parameter whose type no JSON Schema can say: {error.message}"
        ) from error
    schema = {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters_schema},
    }
    return _Signature(OpenAIFunctionToolSchema.model_validate(schema), arguments, hidden)


def _type_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"An annotation of tool {name!r} can't be resolved ({error}): define the type at the top of its module."
        ) from error


def _checked_hint(parameter: inspect.Parameter, hints: dict[str, Any], name: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"Tool {name!r} takes {str(parameter)!r}, which a model can't name: use ordinary parameters.")
    if parameter.name not in hints:
        raise ConfigError(f"Parameter {parameter.name!r} of tool {name!r} has no type: annotate it.")
    return hints[parameter.name]


class _AsDeclared(GenerateJsonSchema):
    """pydantic's schema with its keys in the order in which they arise (`type` first), not sorted."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


def _parameters_schema(arguments: type[BaseModel]) -> dict[str, Any]:
    made: dict[str, Any] = _untitled(arguments.model_json_schema(schema_generator=_AsDeclared))
    order: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    return {key: made.pop(key, order[key]) for key in order} | made


def _untitled(node: Any, names: bool = False) -> Any:
    """`node` without the titles that pydantic makes up: they cost tokens and say nothing.

    `names`: the keys of this dict are names, not keywords.
    """
    if isinstance(node, list):
        return [_untitled(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: item
        if not names and key in ("default", "const", "enum", "examples")
        else _untitled(item, not names and key in ("properties", "$defs"))
        for key, item in node.items()
        if names or key != "title"
    }


def _as_response(tool_name: str, value: Any) -> ToolResponse:
    """What the function returned, as the model is shown it."""
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    try:
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=_jsonable))
    except (TypeError, ValueError) as error:
        raise ToolContractError(
            f"Tool {tool_name!r} returned {type(value).__name__}, which JSON can't say: {error}."
        ) from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON: return a str, a dict or a ToolResponse")
