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
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaError, to_jsonable_python

from toolroll.errors import ConfigError, InvalidArguments, ToolContractError, explain
from toolroll.schemas import OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result

THREADS = 64
"""How many calls of one sync function run at once, unless `@tool(threads=…)` says otherwise."""

T = TypeVar("T")
_MADE_OF = {"config", "tool_schema"}


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
    hidden_types: dict[str, TypeAdapter[Any]]


class FunctionTool(BaseTool[dict[str, Any]]):
    """A tool that calls a function. Made by `@tool`; calling it calls the function.

    `class_name` in a config file may name it, here and in verl.
    """

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
        if threads < 1:
            raise ConfigError(f"@tool(threads={threads}): at least one is needed.")
        self._threads = threads
        self._signature = _read_signature(function, name, description)
        super().__init__({}, self._signature.schema if tool_schema is None else tool_schema)
        self._check_fit()
        self.__doc__ = function.__doc__

    def _check_fit(self) -> None:
        """A schema from a config must fit the function, or every call would fail."""
        own, shown = self._signature.schema.function.parameters, self.tool_schema.function.parameters
        known, offered, needed = set(own.properties or {}), set(shown.properties or {}), set(own.required or [])
        if not needed <= offered <= known:
            raise ConfigError(
                f"The tool_schema of {self.name!r} doesn't fit the function: it has the parameters {sorted(offered)}, "
                f"the function takes {sorted(known)} and needs {sorted(needed)}."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # verl's registry makes a tool by calling whatever `class_name` names, with these two.
        if args or kwargs.keys() != _MADE_OF or inspect.signature(self.function).parameters.keys() >= _MADE_OF:
            return self.function(*args, **kwargs)
        return self.configured(**kwargs)

    def configured(self, config: dict[str, Any], tool_schema: Any = None) -> FunctionTool:
        """The same function as a tool of a config file's entry. A function takes no settings."""
        if unknown := ", ".join(repr(key) for key in sorted(map(str, config.keys() - {"type"}))):
            raise ConfigError(f"config has {unknown}, but a function takes no settings: remove them.")
        return self.copy(tool_schema)

    def copy(self, tool_schema: Any = None) -> FunctionTool:
        """The same function as a tool of its own, with no instances yet; with another schema, if one is given."""
        return FunctionTool(self.function, **self._options, tool_schema=tool_schema)

    def new_state(self, **create_kwargs: Any) -> dict[str, Any]:
        return {**self._typed(create_kwargs), "state": {}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        carried = {"instance_id": instance_id, **self.state(instance_id), **kwargs}
        arguments = self._visible(parameters) | self._hidden(carried)
        if inspect.iscoroutinefunction(self.function):
            returned = await self.function(**arguments)
        else:
            call = partial(contextvars.copy_context().run, _call, self.function, arguments)
            returned = await asyncio.get_running_loop().run_in_executor(self._pool, call)
            returned = await returned if inspect.isawaitable(returned) else returned
        if isinstance(returned, tuple) and len(returned) == 3:
            return as_result(self.name, (_as_response(self.name, returned[0]), *returned[1:]))
        if isinstance(returned, tuple):
            raise ToolContractError(f"Tool {self.name!r} returned a tuple that is not (response, reward, metrics).")
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

    def _typed(self, carried: dict[str, Any]) -> dict[str, Any]:
        """What the trajectory carries, as the types that the function asks for: data sets hold "4" where 4 is meant."""
        try:
            types = self._signature.hidden_types
            return {name: types[name].validate_python(v) if name in types else v for name, v in carried.items()}
        except ValidationError as error:
            raise ToolContractError(f"Tool {self.name!r} was created with a wrong value: {explain(error)}.") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

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


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # a future can't hold one: whoever awaits it would wait for ever
        raise RuntimeError("StopIteration") from error


def _read_signature(function: Callable[..., Any], name: str | None, description: str | None) -> _Signature:
    if not inspect.isroutine(function):
        raise ConfigError(f"@tool takes a function, not {function!r:.80}.")
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
    hidden_types: dict[str, TypeAdapter[Any]] = {}
    hints = _type_hints(function, name)
    for parameter in parameters.values():
        hint = _checked_hint(parameter, hints, name)
        if _is_hidden(hint):
            hidden[parameter.name] = parameter
            if parameter.name not in ("state", "instance_id"):  # ours, not the data set's
                hidden_types[parameter.name] = _type_adapter(hint)
        else:
            fields[f"field_{len(fields)}"] = _field(parameter, hint, told.get(parameter.name, ""))

    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters_schema = _parameters_schema(arguments)
    except (PydanticUserError, SchemaError) as error:
        raise ConfigError(f"Tool {name!r} has a parameter whose type no JSON Schema can say: {error}") from error
    schema = {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters_schema},
    }
    return _Signature(OpenAIFunctionToolSchema.model_validate(schema), arguments, hidden, hidden_types)


def _is_hidden(hint: Any) -> bool:
    """Whether the mark is on the annotation or anywhere in it, as in `Hidden[str] | None`."""
    marked = any(isinstance(mark, _HiddenMark) for mark in getattr(hint, "__metadata__", ()))
    return marked or any(_is_hidden(part) for part in typing.get_args(hint))


def _type_adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a model, which brings its own config
        return TypeAdapter(hint)


def _field(parameter: inspect.Parameter, hint: Any, told: str) -> Any:
    """The pydantic field of a parameter: type, default (or a `Field(…)` in its place), and what the docstring says."""
    about: dict[str, Any] = {"description": " ".join(told.split())} if told else {}
    if isinstance(parameter.default, FieldInfo):
        return Annotated[hint, parameter.default], Field(alias=parameter.name, **about)
    default = ... if parameter.default is parameter.empty else parameter.default
    return hint, Field(default, alias=parameter.name, **about)


def _type_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, SyntaxError) as error:
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
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=to_jsonable_python))
    except (TypeError, ValueError) as error:
        raise ToolContractError(
            f"Tool {tool_name!r} returned {type(value).__name__}, which JSON can't say: {error}."
        ) from error
