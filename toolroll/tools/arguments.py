"""Validation of tool-call arguments against the tool's schema.

Invariants:

- Validating any arguments either returns a dict or raises `InvalidArguments`, never another exception.
- The message is one line of bounded length, for any arguments.
- A `$ref` is never fetched over the network.
- An unusable schema is reported when the validator is created and not during a rollout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from math import isfinite
from typing import Any, NoReturn, cast

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.exceptions import CannotDetermineSpecification, Unresolvable
from referencing.jsonschema import DRAFT202012

from toolroll._internal.text import json_error_text, shorten_middle
from toolroll.errors import ConfigError, InvalidArguments

MAX_ERRORS_REPORTED = 3
"""Maximum number of validation errors in one message. The model rarely fixes more than a few at a time."""

MAX_ARGUMENT_DEPTH = 40
"""Maximum nesting depth of arguments. The validator recurses several times per level and would overflow the stack."""

MAX_QUOTED_VALUE_CHARS = 60
"""Maximum length of an invalid value that a message quotes."""

MAX_DETAIL_CHARS = 240
"""Maximum length of a detail in a message, such as the allowed values or the validator's own message."""

_TOO_DEEP = f"nested more than {MAX_ARGUMENT_DEPTH} levels deep"

_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}


class ArgumentValidator:
    """Validates the arguments of calls to one tool.

    Args:
        tool_name: Name of the tool, for messages.
        parameters: JSON Schema of the tool's parameters.

    Raises:
        ConfigError: If `parameters` is not a valid JSON Schema for an object, or has a `$ref` that cannot be resolved.

    Example:
        >>> validator = ArgumentValidator("add", {"type": "object", "properties": {"a": {"type": "integer"}}})
        >>> validator.parse('{"a": 1}')
        {'a': 1}
        >>> validator.parse('{"a": "one"}')
        Traceback (most recent call last):
        toolroll.errors.InvalidArguments: Invalid arguments for add: 'a' must be an integer, not "one".
    """

    def __init__(self, tool_name: str, parameters: Mapping[str, Any]) -> None:
        self._tool_name = tool_name
        self._parameters = dict(parameters)
        try:
            self._validator = _create_validator(self._parameters)
        except ConfigError as error:
            raise ConfigError(f"The parameters of tool {tool_name!r} {error}") from error.__cause__

    def __reduce__(self) -> tuple[type[ArgumentValidator], tuple[str, dict[str, Any]]]:
        return ArgumentValidator, (self._tool_name, self._parameters)  # jsonschema's validator cannot be pickled

    def parse(self, arguments: object) -> dict[str, Any]:
        """Return the arguments as a dict that satisfies the schema.

        Args:
            arguments: JSON text as the model wrote it, or a mapping. None and blank text are an empty object, because
                models omit the arguments of a tool without parameters.

        Returns:
            The arguments by parameter name.

        Raises:
            InvalidArguments: If the arguments are not valid JSON, not an object, or do not satisfy the schema.
        """
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        elif isinstance(arguments, str):
            arguments = self._load_json(arguments)
        if not isinstance(arguments, Mapping):
            raise self._invalid(f"expected a JSON object, got {_json_kind(arguments)}")
        parsed = dict(arguments)
        if errors := self._describe_errors(parsed):
            raise self._invalid(errors)
        return parsed

    def _load_json(self, text: str) -> Any:
        try:
            value = json.loads(text, parse_constant=_reject_number, parse_float=_parse_finite)
            if "\\ud" in text.lower():  # may be a lone surrogate, which a tool could neither print nor send
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except json.JSONDecodeError as error:
            context = json.dumps(text[max(0, error.pos - 10) : error.pos + 10], ensure_ascii=False)
            where = f"line {error.lineno}, column {error.colno}"
            near = shorten_middle(context, MAX_QUOTED_VALUE_CHARS)
            raise self._invalid(f"invalid JSON: {json_error_text(error)} at {where}, near {near}") from error
        except RecursionError as error:
            raise self._invalid(_TOO_DEEP) from error
        except ValueError as error:  # NaN, a lone surrogate, or more digits than Python converts
            raise self._invalid(f"invalid JSON: {shorten_middle(str(error), MAX_DETAIL_CHARS)}") from error

    def _describe_errors(self, arguments: dict[str, Any]) -> str:
        if _is_too_deep(arguments):
            return _TOO_DEEP
        try:
            errors = list(islice(self._validator.iter_errors(arguments), MAX_ERRORS_REPORTED + 1))
            descriptions = dict.fromkeys(_describe(error) for error in errors[:MAX_ERRORS_REPORTED])
        except Exception as error:  # for example an overflow in multipleOf, caused by a number such as 10**400
            return f"they could not be validated ({shorten_middle(str(error), MAX_QUOTED_VALUE_CHARS)})"
        more = ["and there are further errors"] if len(errors) > MAX_ERRORS_REPORTED else []
        return "; ".join([*descriptions, *more])

    def _invalid(self, problem: str) -> InvalidArguments:
        message = f"Invalid arguments for {self._tool_name}: {problem}"
        return InvalidArguments(" ".join(message.split()).rstrip(".") + ".")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _reject_number(digits)


def _reject_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_ARGUMENT_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# Checking a schema. The messages of these functions continue the sentence "The parameters of tool 'x' …".


def _create_validator(schema: dict[str, Any]) -> Validator:
    if not isinstance(schema.get("$schema", ""), str):
        raise ConfigError("have a $schema that is not a string. Remove it.")
    validator_class: Any = validator_for(schema, default=Draft202012Validator)
    try:
        # The format checker finds an invalid regular expression in `pattern`.
        validator_class.check_schema(schema, format_checker=validator_class.FORMAT_CHECKER)
    except SchemaError as error:
        where = _format_path(error.absolute_path) or "the top level"
        detail = shorten_middle(error.message, MAX_DETAIL_CHARS)
        raise ConfigError(f"are not a valid JSON Schema, at {where}: {detail}.") from error
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise ConfigError(f"have type {types!r}. Arguments are always an object: use type 'object' with properties.")
    _check_refs(schema)
    return cast("Validator", validator_class(schema, registry=REGISTRY))


def _check_refs(schema: dict[str, Any]) -> None:
    try:
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        _check_resource(resource, REGISTRY.resolver_with_root(resource), set())
    except (Unresolvable, CannotDetermineSpecification) as error:
        ref = getattr(error, "ref", schema.get("$schema"))
        raise ConfigError(f"refer to {ref!r}, which is not in the schema. Add it under $defs.") from error
    except RecursionError as error:
        raise ConfigError(
            "have a $ref that leads back to itself. A recursive schema must recurse through properties or items."
        ) from error
    except Exception as error:  # for example a $ref to something that is not a schema
        raise ConfigError(f"cannot be resolved: {error!r:.200}.") from error


def _check_resource(resource: Resource[Any], resolver: Any, checked: set[int]) -> None:
    """Resolve every `$ref` and check that applying the schema to a value terminates."""
    _check_termination(resource.contents, resolver, (), checked)
    for part in resource.subresources():
        _check_resource(part, resolver.in_subresource(part), checked)


def _check_termination(schema: Any, resolver: Any, parents: tuple[int, ...], checked: set[int]) -> None:
    """Visit all schemas that apply to the same value as `schema`, raising RecursionError if one is its own parent."""
    if id(schema) in parents:
        raise RecursionError
    if not isinstance(schema, Mapping) or id(schema) in checked:
        return
    path = (*parents, id(schema))
    for keyword in ("$ref", "$dynamicRef"):
        if isinstance(ref := schema.get(keyword), str):
            target = resolver.lookup(ref)
            _check_termination(target.contents, target.resolver, path, checked)
    parts = [schema[keyword] for keyword in ("not", "if", "then", "else") if keyword in schema]
    parts += [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    parts += schema.get("dependentSchemas", {}).values()
    for part in parts:
        _check_termination(part, resolver, path, checked)
    checked.add(id(schema))


# Describing validation errors to the model.


def _describe(error: ValidationError) -> str:
    if types := _expected_types(error):
        return f"{_subject(error)} must be {' or '.join(types)}, not {_quote(error.instance)}"
    error = best_match([error]) or error
    expected, instance = cast("Any", error.validator_value), cast("Any", error.instance)
    match error.validator:
        case "required":
            missing = [name for name in expected if name not in instance][:MAX_ERRORS_REPORTED]
            return " and ".join(f"'{_format_path([*error.absolute_path, name])}' is missing" for name in missing)
        case "additionalProperties" if expected is False:
            return _describe_unknown_parameters(error, instance)
        case "enum":
            allowed = shorten_middle(", ".join(map(_quote, expected)), MAX_DETAIL_CHARS)
            return f"{_subject(error)} must be one of {allowed}, not {_quote(instance)}"
        case "const":
            return f"{_subject(error)} must be {_quote(expected)}, not {_quote(instance)}"
    return f"{_subject(error)} is invalid: {shorten_middle(error.message, MAX_DETAIL_CHARS)}"


def _describe_unknown_parameters(error: ValidationError, instance: Mapping[str, Any]) -> str:
    known = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
    unknown = ", ".join(repr(name) for name in instance if name not in known)
    allowed = shorten_middle(", ".join(map(repr, known)), MAX_DETAIL_CHARS) or "none"
    where = f" in {_subject(error)}" if error.absolute_path else ""
    return f"unknown parameter {shorten_middle(unknown, MAX_QUOTED_VALUE_CHARS)}{where} (allowed: {allowed})"


def _expected_types(error: ValidationError) -> list[str]:
    """Return the types that would satisfy a `type` error or an `anyOf` of plain types; no types for other errors."""
    parts = list(error.context or ())
    alternatives = parts if error.validator == "anyOf" else [error]
    if any(part.relative_path for part in parts) or any(one.validator != "type" for one in alternatives):
        return []
    values = [cast("Any", alternative.validator_value) for alternative in alternatives]
    names = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    return [_with_article(name) for name in names]


def _with_article(type_name: str) -> str:
    if type_name == "null":
        return type_name
    return f"an {type_name}" if type_name[0] in "aio" else f"a {type_name}"


def _subject(error: ValidationError) -> str:
    path = _format_path(error.absolute_path)
    return f"'{path}'" if path else "the object"


def _format_path(parts: Iterable[str | int]) -> str:
    """Return `['a', 0, 'b']` as `a[0].b`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return shorten_middle(path.removeprefix("."), MAX_QUOTED_VALUE_CHARS)


def _quote(value: object) -> str:
    try:
        return shorten_middle(json.dumps(value, ensure_ascii=False, default=repr), MAX_QUOTED_VALUE_CHARS)
    except (ValueError, TypeError, RecursionError):  # circular, keys that are not strings, or nested too deeply
        return _json_kind(value)


def _json_kind(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")
