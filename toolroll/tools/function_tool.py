"""The `@tool` decorator, which turns a typed function into a tool.

The schema is generated from the signature, whose types may be any that pydantic supports, and from the Google-style
docstring. The model's arguments are validated and converted to the annotated types, including pydantic models. Sync
functions run in a thread and do not block the event loop.

Parameters annotated with `Hidden[...]` are not part of the schema. Their values come from the trajectory.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaError, to_jsonable_python

from toolroll.errors import ConfigError, InvalidArguments, ToolContractError, explain, validate
from toolroll.limiter.limited import call_in_thread
from toolroll.limiter.settings import ResourceLimits
from toolroll.schemas import OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result, state_kwargs

DEFAULT_MAX_THREADS = 64
"""Default maximum number of concurrent calls of one sync function."""

T = TypeVar("T")
INSTANCE_PARAMETERS = frozenset({"state", "instance_id"})
"""Hidden parameters that are set by toolroll and not by the dataset."""
_CONSTRUCTOR_ARGUMENTS = {"config", "tool_schema"}


class _HiddenMarker:
    """Annotation of a parameter that the model does not see."""


Hidden = Annotated[T, _HiddenMarker()]
"""Type of a parameter that the model does not see, such as `Hidden[str]`.

The value is looked up by the parameter's name, first in the call's `execute_kwargs`, then in the trajectory's
`create_kwargs`. Two names are always available: `instance_id`, and `state`, a dict that lasts for the trajectory.

Example:
    >>> @tool
    ... def check(answer: str, ground_truth: Hidden[str], state: Hidden[dict[str, Any]]) -> bool:
    ...     '''Check an answer.'''
    ...     return answer == ground_truth
"""


class FunctionTool(BaseTool[dict[str, Any]]):
    """A tool that calls a function. Created by `@tool`; calling it calls the function.

    The `class_name` of a config file may name it, in toolroll and in verl.

    Args:
        function: The function, sync or async.
        name: Name of the tool. By default, the function's name.
        description: Description of the tool. By default, the text of the function's docstring.
        threads: Maximum number of concurrent calls of a sync function.
        returns_images: True if responses may contain images.
        limits: Limits of the calls: `ResourceLimits` or its fields.
        pure: True if the result depends on the arguments alone, so that it can be cached.
        version: Version of the function's behaviour.
        tool_schema: Schema from a config file. By default, the schema generated from the signature.

    Raises:
        ConfigError: If no schema can be generated for the function, `tool_schema` does not match it, or the limits are
            invalid.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        threads: int = DEFAULT_MAX_THREADS,
        returns_images: bool = False,
        limits: ResourceLimits | Mapping[str, Any] | None = None,
        pure: bool = False,
        version: str | None = None,
        tool_schema: Any = None,
    ) -> None:
        self.function = function
        self.pure, self.version = pure, version
        self.returns_images = returns_images
        self.limits = None if limits is None else validate(ResourceLimits, limits, "@tool: limits")
        self._options: dict[str, Any] = {
            "name": name,
            "description": description,
            "threads": threads,
            "returns_images": returns_images,
            "limits": self.limits,
            "pure": pure,
            "version": version,
        }
        if threads < 1:
            raise ConfigError(f"@tool: threads must be at least 1, got {threads}.")
        schema, self._arguments, self._hidden, self._hidden_types = _read_signature(function, name, description)
        super().__init__({}, schema if tool_schema is None else tool_schema)
        if pure and self.keeps_state:
            raise ConfigError(f"@tool: {self.name!r} has the parameter `state` or `instance_id`, so it is not pure.")
        self.__doc__ = function.__doc__
        generated, configured = schema.function.parameters, self.tool_schema.function.parameters
        accepted, required = set(generated.properties or {}), set(generated.required or [])
        offered = set(configured.properties or {})
        if not required <= offered <= accepted:
            raise ConfigError(
                f"The tool_schema of {self.name!r} does not match the function: it has the parameters "
                f"{sorted(offered)}, but the function accepts {sorted(accepted)} and requires {sorted(required)}."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # verl's registry creates a tool by calling the object that `class_name` names with these two arguments.
        is_constructor_call = not args and kwargs.keys() == _CONSTRUCTOR_ARGUMENTS
        if is_constructor_call and not inspect.signature(self.function).parameters.keys() >= _CONSTRUCTOR_ARGUMENTS:
            return self.with_config(**kwargs)
        return self.function(*args, **kwargs)

    def with_config(self, config: dict[str, Any], tool_schema: Any = None) -> FunctionTool:
        """Return a copy for an entry of a config file.

        Args:
            config: Settings of the entry, which may only contain `type`.
            tool_schema: Schema of the entry, or None to keep the generated one.

        Returns:
            A tool without instances.

        Raises:
            ConfigError: If `config` has settings, or the schema does not match the function.
        """
        if unknown := ", ".join(repr(key) for key in sorted(map(str, config.keys() - {"type"}))):
            raise ConfigError(f"config: a function has no settings, got {unknown}. Remove them.")
        return FunctionTool(self.function, **self._options, tool_schema=tool_schema)

    @property
    def keeps_state(self) -> bool:
        """True if results may depend on earlier calls or on the trajectory."""
        return not INSTANCE_PARAMETERS.isdisjoint(self._hidden)

    def hidden_inputs(self, create_kwargs: Mapping[str, Any], execute_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the hidden parameters. Others do not reach the function."""
        available = {**state_kwargs(create_kwargs), **execute_kwargs}
        return {name: available[name] for name in self._hidden if name in available}

    def _implementation(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def new_state(self, **create_kwargs: Any) -> dict[str, Any]:
        """Return the values for hidden parameters, converted to the annotated types.

        Values from a dataset often have another type, such as "4" instead of 4.
        """
        types = self._hidden_types
        try:
            values = {key: types[key].validate_python(v) if key in types else v for key, v in create_kwargs.items()}
        except ValidationError as error:
            raise ToolContractError(f"Tool {self.name!r} has an invalid create_kwarg: {explain(error)}.") from error
        return {**values, "state": {}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Call the function and convert its return value to a ToolResult."""
        available = {"instance_id": instance_id, **self.state(instance_id), **kwargs}
        arguments = self._visible_arguments(parameters) | self._hidden_arguments(available)
        if inspect.iscoroutinefunction(self.function):
            returned = await self.function(**arguments)
        else:
            returned = await call_in_thread(self._executor, partial(_call, self.function, arguments))
            returned = await returned if inspect.isawaitable(returned) else returned
        return as_result(self.name, returned if isinstance(returned, tuple) else (returned, None, {}), _serialize)

    def _visible_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            validated = self._arguments.model_validate(parameters)
        except ValidationError as error:
            raise InvalidArguments(f"Invalid arguments for {self.name}: {explain(error)}.") from error
        return {str(field.alias): getattr(validated, name) for name, field in type(validated).model_fields.items()}

    def _hidden_arguments(self, available: dict[str, Any]) -> dict[str, Any]:
        for name, parameter in self._hidden.items():
            if name not in available and parameter.default is parameter.empty:
                raise ToolContractError(
                    f"Tool {self.name!r} requires {name!r} for every trajectory. Pass it in create_kwargs."
                )
        return {name: available[name] for name in self._hidden if name in available}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_executor"}

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        # One pool per tool, so that a slow tool does not delay others. Threads are started on demand.
        return ThreadPoolExecutor(self._options["threads"], thread_name_prefix=f"tool-{self.name}")


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    threads: int = DEFAULT_MAX_THREADS,
    returns_images: bool = False,
    limits: ResourceLimits | Mapping[str, Any] | None = None,
    pure: bool = False,
    version: str | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Turn a typed function into a tool.

    The function returns a str, any JSON-serializable value (the model reads the JSON), a ToolResponse, or a tuple
    (response, reward, metrics).

    Args:
        function: The function, sync or async.
        **options: `name`: name of the tool, by default that of the function. `description`: description of the tool, by
            default the text of the docstring. `threads`: maximum number of concurrent calls of a sync function, by
            default 64. `returns_images`: True if responses may contain images. `limits`: limits of the calls,
            `ResourceLimits` or its fields, e.g. `{"limit": 8, "rpm": 600}`. `pure`: True if the result depends on the
            arguments alone, so that equal calls are made once. `version`: text to change when the results change, so
            that cached and recorded ones are not used any more.

    Returns:
        The tool, or a decorator if only options are given.

    Raises:
        ConfigError: If the function has no description, a parameter without a type, or a type that has no JSON Schema,
            if the limits are invalid, or if a pure function has the parameter `state` or `instance_id`.

    Example:
        >>> @tool
        ... def add(a: int, b: int = 0) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: The first number.
        ...         b: The second number.
        ...     '''
        ...     return a + b
        >>> add.name, add(1, 2)
        ('add', 3)
    """
    return FunctionTool(function, **options) if function is not None else partial(FunctionTool, **options)


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # a future cannot hold a StopIteration: awaiting it would never end
        raise RuntimeError("StopIteration") from error


def _read_signature(
    function: Callable[..., Any], name: str | None, description: str | None
) -> tuple[OpenAIFunctionToolSchema, type[BaseModel], dict[str, inspect.Parameter], dict[str, TypeAdapter[Any]]]:
    """Return the schema, the model of the arguments, the hidden parameters, and the types of their values.

    The parameters' names are aliases in the model, because pydantic reserves some names.
    """
    if not inspect.isroutine(function):
        raise ConfigError(f"@tool expects a function, got {function!r:.80}.")
    name = name or function.__name__
    docstring = docstring_parser.parse(inspect.getdoc(function) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    description = (description or docstring.description or "").strip()
    if not description:
        raise ConfigError(f"Tool {name!r} has no description for the model. Add a docstring.")
    descriptions = {param.arg_name: param.description or "" for param in docstring.params}
    parameters = inspect.signature(function).parameters
    if unknown := descriptions.keys() - parameters.keys():
        raise ConfigError(f"The docstring of tool {name!r} describes unknown parameters: {sorted(unknown)}.")

    fields: dict[str, Any] = {}
    hidden: dict[str, inspect.Parameter] = {}
    hidden_types: dict[str, TypeAdapter[Any]] = {}
    hints = _type_hints(function, name)
    for parameter in parameters.values():
        hint = _checked_hint(parameter, hints, name)
        if not _is_hidden(hint):
            fields[f"field_{len(fields)}"] = _field(parameter, hint, descriptions.get(parameter.name, ""))
            continue
        hidden[parameter.name] = parameter
        if parameter.name not in INSTANCE_PARAMETERS:
            hidden_types[parameter.name] = _type_adapter(hint)

    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = {"name": name, "description": description, "parameters": _parameters_schema(arguments)}
    except (PydanticUserError, SchemaError) as error:
        raise ConfigError(f"Tool {name!r} has a parameter whose type has no JSON Schema: {error}") from error
    tool_schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": schema})
    return tool_schema, arguments, hidden, hidden_types


def _is_hidden(hint: Any) -> bool:
    """Return True if the marker is on the annotation or inside it, as in `Hidden[str] | None`."""
    is_marked = any(isinstance(item, _HiddenMarker) for item in getattr(hint, "__metadata__", ()))
    return is_marked or any(_is_hidden(part) for part in typing.get_args(hint))


def _type_adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a pydantic model, which has its own config
        return TypeAdapter(hint)


def _field(parameter: inspect.Parameter, hint: Any, description: str) -> Any:
    """Return the pydantic field of a parameter, whose default may be a `Field(...)`."""
    options: dict[str, Any] = {"description": " ".join(description.split())} if description else {}
    if isinstance(parameter.default, FieldInfo):
        return Annotated[hint, parameter.default], Field(alias=parameter.name, **options)
    default = ... if parameter.default is parameter.empty else parameter.default
    return hint, Field(default, alias=parameter.name, **options)


def _type_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, SyntaxError) as error:
        raise ConfigError(
            f"An annotation of tool {name!r} cannot be resolved ({error}). Define the type at the top of its module."
        ) from error


def _checked_hint(parameter: inspect.Parameter, hints: dict[str, Any], name: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"Tool {name!r} has the parameter {str(parameter)!r}. Use parameters that have a name.")
    if parameter.name not in hints:
        raise ConfigError(f"Parameter {parameter.name!r} of tool {name!r} has no type. Annotate it.")
    return hints[parameter.name]


class _UnsortedJsonSchema(GenerateJsonSchema):
    """JSON Schema generator that keeps the order of keys, with `type` first, instead of sorting them."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


def _parameters_schema(arguments: type[BaseModel]) -> dict[str, Any]:
    schema: dict[str, Any] = _without_titles(arguments.model_json_schema(schema_generator=_UnsortedJsonSchema))
    leading: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    return {key: schema.pop(key, default) for key, default in leading.items()} | schema


def _without_titles(node: Any, keys_are_names: bool = False) -> Any:
    """Return a schema without pydantic's generated titles, which cost tokens and carry no information.

    Args:
        node: Schema or part of one.
        keys_are_names: Whether the keys of `node` are names, as under `properties`, and not keywords.
    """
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: item for key, item in node.items() if keys_are_names or key != "title"}
    for key, item in schema.items():
        if keys_are_names or key not in ("default", "const", "enum", "examples"):
            schema[key] = _without_titles(item, keys_are_names=not keys_are_names and key in ("properties", "$defs"))
    return schema


def _serialize(tool_name: str, value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    try:
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=to_jsonable_python))
    except (TypeError, ValueError) as error:
        problem = f"{type(value).__name__}, which cannot be converted to JSON: {error}"
        raise ToolContractError(f"Tool {tool_name!r} returned {problem}.") from error
