"""What the model wrote as arguments, checked against the tool's schema.

Promises: whatever the arguments are, the answer is either the checked dict or `InvalidArguments` with one sentence that
the model can act on. Never another exception, never a sentence that grows with the arguments, never a look-up over the
network for a `$ref`. What is wrong with the *schema* is said once, when the checker is made, to the tool's author.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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

from toolroll.errors import ConfigError, InvalidArguments

COMPLAINTS_SHOWN = 3
"""How many complaints one sentence holds. A model mends a few at a time; the rest are counted."""

MAX_DEPTH = 40
"""How deeply arguments may be nested. The validator calls itself several times per level, and Python's stack ends."""

VALUE_WIDTH = 60
"""How many characters of a wrong value are quoted back."""

MESSAGE_WIDTH = 240
"""How many characters of the validator's own wording are kept, where we have none of our own."""


class ArgumentChecker:
    """Checks the arguments of calls to one tool.

    >>> checker = ArgumentChecker("add", {"type": "object", "properties": {"a": {"type": "integer"}}})
    >>> checker.parse('{"a": 1}')
    {'a': 1}
    >>> checker.parse('{"a": "one"}')
    Traceback (most recent call last):
    toolroll.errors.InvalidArguments: Invalid arguments for add: 'a' must be an integer, not "one".
    """

    def __init__(self, tool_name: str, parameters: Mapping[str, Any]) -> None:
        """Raise ConfigError where `parameters` is no JSON Schema, is not one for an object, or has a `$ref` that leads
        nowhere.
        """
        self._tool_name = tool_name
        self._parameters = dict(parameters)
        self._validator = _validator(tool_name, self._parameters)

    def __reduce__(self) -> tuple[type[ArgumentChecker], tuple[str, dict[str, Any]]]:
        return ArgumentChecker, (self._tool_name, self._parameters)  # the validator itself can't be pickled

    def parse(self, arguments: object) -> dict[str, Any]:
        """The arguments as a dict that satisfies the schema. Takes JSON text as the model wrote it, or a mapping.

        Nothing at all (None, blank text) is an empty object: that is how models call a tool without parameters.
        """
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        elif isinstance(arguments, str):
            arguments = self._loads(arguments)
        if not isinstance(arguments, Mapping):
            raise self._invalid(f"they must be a JSON object, not {_kind(arguments)}")
        parsed = dict(arguments)
        if complaint := self.complaint(parsed):
            raise self._invalid(complaint)
        return parsed

    def complaint(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with `arguments`, or None."""
        if _depth(arguments) > MAX_DEPTH:
            return "they are nested too deeply"
        try:
            errors = list(islice(self._validator.iter_errors(arguments), COMPLAINTS_SHOWN + 1))
            shown = "; ".join(dict.fromkeys(_describe(error) for error in errors[:COMPLAINTS_SHOWN]))
        except Exception as error:  # the validator's arithmetic overflows on numbers like 1e999: the model chose them
            return f"they could not be checked ({_cut(str(error), VALUE_WIDTH)})"
        if not errors:
            return None
        return shown + ("; and more is wrong" if len(errors) > COMPLAINTS_SHOWN else "")

    def _loads(self, text: str) -> Any:
        try:
            parsed = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
            if "\\ud" in text.lower():  # perhaps one half of a surrogate pair, which no tool could print or send on
                json.dumps(parsed, ensure_ascii=False).encode()
            return parsed
        except json.JSONDecodeError as error:
            near = _cut(json.dumps(text[max(0, error.pos - 10) : error.pos + 10], ensure_ascii=False), VALUE_WIDTH)
            where = f"line {error.lineno}, column {error.colno}"
            raise self._invalid(f"they are not valid JSON, {error.msg.lower()} at {where}, near {near}") from error
        except RecursionError as error:
            raise self._invalid("they are nested too deeply") from error
        except ValueError as error:  # NaN, or an integer of more digits than Python converts
            raise self._invalid(f"they are not valid JSON ({_cut(str(error), MESSAGE_WIDTH)})") from error

    def _invalid(self, complaint: str) -> InvalidArguments:
        sentence = f"Invalid arguments for {self._tool_name}: {complaint}"
        return InvalidArguments(" ".join(sentence.split()).rstrip(".") + ".")


def _finite(written: str) -> float:
    value = float(written)
    return value if isfinite(value) else _refuse_constant(written)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _validator(tool_name: str, schema: dict[str, Any]) -> Validator:
    """The validator for `schema`, proven to be usable."""
    if not isinstance(schema.get("$schema", ""), str):
        raise ConfigError(f"The parameters of tool {tool_name!r} have a $schema that is no string: leave it out.")
    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        # The format checker makes an invalid regular expression in `pattern` show up here and not in the middle of a
        # rollout.
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        where = _path(error.absolute_path) or "its top level"
        raise ConfigError(
            f"The parameters of tool {tool_name!r} are not a valid JSON Schema, "
            f"at {where}: {_cut(error.message, MESSAGE_WIDTH)}"
        ) from error
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise ConfigError(
            f"The parameters of tool {tool_name!r} have type {types!r}. "
            "Arguments always come as an object: use type 'object' with properties."
        )
    try:
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        _follow_refs(resource, REGISTRY.resolver_with_root(resource), set())
    except (Unresolvable, CannotDetermineSpecification) as error:
        ref = getattr(error, "ref", schema.get("$schema"))
        raise ConfigError(
            f"The parameters of tool {tool_name!r} refer to {ref!r}, which is not in the schema. "
            "Put it under $defs: nothing is fetched."
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"The parameters of tool {tool_name!r} refer to themselves without end. "
            "A schema may refer back to itself only from within properties or items."
        ) from error
    except Exception as error:  # a $ref to something that is no schema
        raise ConfigError(f"The parameters of tool {tool_name!r} can't be followed: {error!r:.200}") from error
    made: Validator = kind(schema, registry=REGISTRY)
    return made


def _follow_refs(resource: Resource[Any], resolver: Any, proven: set[int]) -> None:
    """Look every `$ref` up, and prove that applying the schema to one value comes to an end."""
    _apply(resource.contents, resolver, (), proven)
    for part in resource.subresources():
        _follow_refs(part, resolver.in_subresource(part), proven)


def _apply(schema: Any, resolver: Any, above: tuple[int, ...], proven: set[int]) -> None:
    """Walk the schemas that apply to the same value as `schema`, as a validator would; `above` are those on the way."""
    if id(schema) in above:
        raise RecursionError
    if not isinstance(schema, Mapping) or id(schema) in proven:
        return
    here = (*above, id(schema))
    for keyword in ("$ref", "$dynamicRef"):
        if isinstance(ref := schema.get(keyword), str):
            found = resolver.lookup(ref)
            _apply(found.contents, found.resolver, here, proven)
    parts = [schema[keyword] for keyword in ("not", "if", "then", "else") if keyword in schema]
    parts += [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    parts += schema.get("dependentSchemas", {}).values()
    for part in parts:
        _apply(part, resolver, here, proven)
    proven.add(id(schema))


def _depth(value: object) -> int:
    """How deeply `value` is nested, counted no further than MAX_DEPTH."""
    layer, depth = [value], 0
    while depth <= MAX_DEPTH and (
        layer := [
            inner
            for item in layer
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    ):
        depth += 1
    return depth


def _describe(error: ValidationError) -> str:
    """One error, said to a model."""
    if (types := _alternative_types(error)) is None:
        error = best_match([error]) or error
    where, value, instance = _path(error.absolute_path), cast("Any", error.validator_value), cast("Any", error.instance)
    named = f"'{where}'" if where else "the object"
    if types is not None:
        return f"{named} must be {' or '.join(types)}, not {_quote(instance)}"
    match error.validator:
        case "required":
            missing = [name for name in value if name not in instance]
            return " and ".join(
                f"'{_path([*error.absolute_path, name])}' is missing" for name in missing[:COMPLAINTS_SHOWN]
            )
        case "additionalProperties" if value is False:
            known = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
            extra = [name for name in instance if name not in known]
            allowed = _cut(", ".join(map(repr, known)), MESSAGE_WIDTH) or "none"
            return f"{named} has no parameter {_cut(', '.join(map(repr, extra)), VALUE_WIDTH)} (allowed: {allowed})"
        case "enum":
            allowed = _cut(", ".join(_quote(item) for item in value), MESSAGE_WIDTH)
            return f"{named} must be one of {allowed}, not {_quote(instance)}"
        case "const":
            return f"{named} must be {_quote(value)}, not {_quote(instance)}"
    return f"{named} is wrong: {_cut(error.message, MESSAGE_WIDTH)}"


def _alternative_types(error: ValidationError) -> list[str] | None:
    """The types of which `error` wants one, if that is all it wants: from `type`, or from an anyOf of plain types."""
    wrong = [error] if error.validator == "type" else (error.context or []) if error.validator == "anyOf" else []
    if not wrong or any(part.validator != "type" or (part.relative_path and part is not error) for part in wrong):
        return None
    wanted = [cast("Any", part.validator_value) for part in wrong]
    names = [name for value in wanted for name in ([value] if isinstance(value, str) else value)]
    return [_article(name) for name in names]


def _article(type_name: str) -> str:
    if type_name == "null":
        return type_name
    return f"an {type_name}" if type_name[0] in "aio" else f"a {type_name}"


def _kind(value: object) -> str:
    kinds = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def _path(parts: Iterable[str | int]) -> str:
    """`['a', 0, 'b']` as `a[0].b`."""
    written = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return _cut(written.removeprefix("."), VALUE_WIDTH)


def _quote(value: object) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=repr), VALUE_WIDTH)
    except (ValueError, TypeError, RecursionError):  # circular, keys that are no strings, nested too deeply
        return _kind(value)


def _cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, its middle left out: both the beginning and the end of a message tell
    something.
    """
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
