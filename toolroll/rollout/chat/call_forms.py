"""The forms in which models write tool calls.

    hermes       <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    llama        {"name": "f", "parameters": {"a": 1}}    or  [f(a=1)]
    mistral      [TOOL_CALLS]f[ARGS]{"a": 1}        or  [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
    deepseek_v3  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
    kimi_k2      <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    qwen3_coder  <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm          <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    minimax_m2   <invoke name="f"><parameter name="a">1</parameter></invoke>
    dsml         <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>…
    gemma4       <|tool_call>call:f{a:1}<tool_call|>
    olmo3        <function_calls>f(a=1)</function_calls>

gpt-oss writes messages instead of calls in a text; see `turn_parser.py`. The form of a model is the first one that
reads probe calls back which the model's chat template rendered.

A call ends where its arguments end, so a program in them may contain the closing marker. Newlines in JSON strings are
accepted because models write programs that way. A call that cannot be read has a problem, a message to the model.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolroll.rollout.chat.parsed_turn import (
    CALL_TOO_DEEP,
    MALFORMED_CALL,
    MAX_CALL_NESTING,
    UNCLOSED_CALL,
    ParsedCall,
    Tools,
    json_problem,
    parse_finite,
    reject_constant,
)
from toolroll.rollout.chat.turn_text import TurnText

Parameters = Mapping[str, Mapping[str, Any]]
"""Schemas of the parameters by tool and name."""
_WHITESPACE = re.compile(r"\s*")


class CallError(Exception):
    """A call cannot be read.

    Args:
        problem: Message to the model.
        json_start: Position of JSON that is not valid, about which the message is.
    """

    def __init__(self, problem: str, json_start: int | None = None) -> None:
        super().__init__(problem)
        self.json_start = json_start


@dataclass(frozen=True)
class _Call:
    """A call as it was read."""

    name: Any
    arguments: Any
    id: str | None = None


_Reader = Callable[[TurnText, int, Parameters], tuple[list[_Call], int]]
"""Reads the calls at a position of the text, after the opening. Returns them and their end, or raises CallError."""


@dataclass(frozen=True)
class CallForm:
    """A form of tool calls."""

    name: str
    opening: re.Pattern[str]
    """Text that opens a call. A group `marker` must be a real token if the vocabulary has that token."""
    read: _Reader
    close: str = ""
    """Marker that closes a call."""
    section: tuple[str, ...] = ()
    """Markers around the calls of a turn."""

    def find_call(self, turn: TurnText, start: int) -> re.Match[str] | None:
        """Return the next opening of a call."""
        return next(self._openings(turn, start), None)

    def count_calls(self, turn: TurnText, start: int) -> int:
        """Return the number of openings from a position on."""
        return sum(1 for _ in self._openings(turn, start))

    def _openings(self, turn: TurnText, start: int) -> Iterator[re.Match[str]]:
        for found in self.opening.finditer(turn.text, start):
            marker = found.groupdict().get("marker")
            if marker is None or turn.has_marker(marker, found.start("marker")):
                yield found

    def read_calls(
        self, turn: TurnText, opening: re.Match[str], parameters: Parameters
    ) -> tuple[list[ParsedCall], int]:
        """Read the calls that an opening opens. Return them and the end of their text."""
        start = opening.end()
        try:
            calls, body_end = self.read(turn, start, parameters)
        except CallError as error:
            return self._give_up(turn, opening, error)
        except RecursionError:
            return self._give_up(turn, opening, CallError(CALL_TOO_DEEP))
        end = self._skip_close(turn, body_end)
        if end is not None:
            raw = turn.text[start:body_end].strip()
            return [ParsedCall.check(call.name, call.arguments, raw, id=call.id) for call in calls], end
        if turn.text[body_end:].strip():
            is_json = turn.text[start:body_end].lstrip().startswith(("{", "["))
            return self._give_up(turn, opening, CallError(MALFORMED_CALL, start if is_json else None))
        raw = turn.text[start:].strip()
        cut_off = [ParsedCall.check(call.name, call.arguments, raw, problem=UNCLOSED_CALL) for call in calls]
        return cut_off, len(turn.text)

    def find_lost_call(self, turn: TurnText, start: int) -> str | None:
        """Return a message about markers of a call in text without an opening of one, or None."""
        if any(turn.find(marker, start) is not None for marker in self.section[::2]):
            return MALFORMED_CALL
        close = turn.find(self.close, start) if self.close else None
        if close is not None and turn.text[start:close].rstrip().endswith("}"):
            return f"The tool call has an end, {self.close}, but no start. Write both."
        return None

    def _skip_close(self, turn: TurnText, position: int) -> int | None:
        if not self.close:
            return position
        position = _skip_whitespace(turn.text, position)
        return position + len(self.close) if turn.has_marker(self.close, position) else None

    def _give_up(self, turn: TurnText, opening: re.Match[str], error: CallError) -> tuple[list[ParsedCall], int]:
        """Return a call with a problem, which extends to its closing marker, the next call, or the end."""
        start = opening.end()
        following = self.find_call(turn, max(start, opening.start() + 1))
        end = len(turn.text) if following is None else following.start()
        close = turn.find(self.close, start) if self.close else None
        is_closed = close is not None and close < end
        if close is not None and is_closed:
            end = close
        problem = str(error)
        if self.close and not is_closed:
            problem = UNCLOSED_CALL
        elif error.json_start is not None:
            problem = json_problem(turn.text[error.json_start : end].strip()) or problem
        call = ParsedCall.check(None, None, turn.text[start:end].strip(), problem=problem)
        return [call], end + len(self.close) if is_closed else end


def parameters_of(tools: Tools) -> Parameters:
    """Return the schemas of the parameters of tools."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


# JSON


_DECODER = json.JSONDecoder(strict=False, parse_constant=reject_constant, parse_float=parse_finite)


def _skip_whitespace(text: str, position: int) -> int:
    found = _WHITESPACE.match(text, position)
    return found.end() if found else position


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position and its end.

    Raises:
        CallError: If there is none.
    """
    start = _skip_whitespace(text, start)
    if start == len(text):
        raise CallError(UNCLOSED_CALL)
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise CallError(CALL_TOO_DEEP, start) from error
    except ValueError as error:  # includes integers with more digits than Python converts
        raise CallError(MALFORMED_CALL, start) from error


def _call_of(value: Any) -> _Call:
    """Return the call that a JSON value describes."""
    if not isinstance(value, dict):
        raise CallError(MALFORMED_CALL)
    if isinstance(function := value.get("function"), dict):
        value = {**value, **function}
    name = value.get("name", function if isinstance(function, str) else None)
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and value.keys() - {"name", "function", "id", "type", "arguments", "parameters"}:
        raise CallError('The tool call has no arguments. Write them as an object under "arguments".')
    call_id = value.get("id")
    return _Call(name, {} if arguments is None else arguments, call_id if isinstance(call_id, str) else None)


def _read_json_calls(turn: TurnText, start: int, _: Parameters) -> tuple[list[_Call], int]:
    """Read an object or a list of objects with name and arguments."""
    value, end = read_json(turn.text, start)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise CallError(MALFORMED_CALL)
    return [_call_of(call) for call in calls], end


def _read_named_json(turn: TurnText, start: int, separator: str) -> tuple[str, Any, int]:
    """Read a header, a separator and JSON arguments. Return the header, the arguments and their end."""
    position = turn.find(separator, start)
    header = None if position is None else turn.text[start:position].strip()
    if position is None or header is None or any(marker in header for marker in ("<|", "<｜", "[TOOL_CALLS]")):
        raise CallError("The tool call has no arguments. Write the name of the tool, then its arguments as JSON.")
    arguments, end = read_json(turn.text, position + len(separator))
    return header, arguments, end


def _read_mistral(turn: TurnText, start: int, parameters: Parameters) -> tuple[list[_Call], int]:
    start = _skip_whitespace(turn.text, start)
    if turn.text[start : start + 1] in ("[", "{") and not turn.text.startswith("[ARGS]", start):
        return _read_json_calls(turn, start, parameters)
    header, arguments, end = _read_named_json(turn, start, "[ARGS]")
    name, _, call_id = header.partition("[CALL_ID]")
    return [_Call(name.strip(), arguments, call_id.strip() or None)], end


_DEEPSEEK_V3_NAME = re.compile(r"([^\n]*)\n```json\n")


def _read_deepseek_v3(turn: TurnText, start: int, _: Parameters) -> tuple[list[_Call], int]:
    """Read `name<sep>{…}`, or `function<sep>name`, a newline, and the arguments in a JSON code block."""
    separator = "<｜tool▁sep｜>"
    position = turn.find(separator, start)
    is_block = position is not None and turn.text[start:position].strip() == "function"
    block = _DEEPSEEK_V3_NAME.match(turn.text, (position or 0) + len(separator)) if is_block else None
    if block is None:
        name, arguments, end = _read_named_json(turn, start, separator)
        return [_Call(name, arguments)], end
    arguments, end = read_json(turn.text, block.end())
    end = _skip_whitespace(turn.text, end)
    return [_Call(block[1].strip(), arguments)], end + 3 if turn.text.startswith("```", end) else end


_KIMI_HEADER = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?", re.DOTALL)


def _read_kimi(turn: TurnText, start: int, _: Parameters) -> tuple[list[_Call], int]:
    header, arguments, end = _read_named_json(turn, start, "<|tool_call_argument_begin|>")
    found = _KIMI_HEADER.fullmatch(header)
    return [_Call(found["name"] if found else header, arguments, header)], end


# Tags: each argument between markers. Whether 5 is a number or a text depends on the tool's schema.


@dataclass(frozen=True)
class _Tags:
    """Markers of a form that writes each argument between tags."""

    name: re.Pattern[str]
    """Text with the tool's name, in group 1."""
    parameter: re.Pattern[str]
    """Text before a value: the parameter's name in group 1; "true" in a group `string` if the value is a text."""
    value_end: str
    next_call: re.Pattern[str]
    """Text between two calls."""
    call_end: str = ""
    """Text after the last argument, before the form's closing marker."""
    close: str = ""
    """The form's closing marker, if there is no text before it."""

    def read(self, turn: TurnText, start: int, parameters: Parameters) -> tuple[list[_Call], int]:
        """Read a name and its arguments."""
        text = turn.text
        name = self.name.match(text, start)
        if name is None:
            raise CallError(MALFORMED_CALL)
        types = parameters.get(name[1].strip(), {})
        arguments: dict[str, Any] = {}
        position = name.end()
        while (found := self.parameter.match(text, position)) is not None:
            key = found[1].strip()
            if key in arguments:
                raise CallError(f"The parameter {key:.80} is given twice.")
            end = self._find_value_end(text, found.end())
            value = text[found.end() : end]
            is_text = found.groupdict().get("string")
            arguments[key] = value if is_text == "true" else _to_value(value, None if is_text else types.get(key, {}))
            position = end + len(self.value_end)
        self._check_values(text[name.end() : position], arguments, types)
        position = _skip_whitespace(text, position)
        if not text.startswith(self.call_end, position):
            is_cut_off = self.call_end.startswith(text[position:].strip())
            raise CallError(UNCLOSED_CALL if is_cut_off else MALFORMED_CALL)
        return [_Call(name[1].strip(), arguments)], position + len(self.call_end)

    def _find_value_end(self, text: str, start: int) -> int:
        """Return the end of a value: the first closing tag that another argument or the end of the call follows."""
        end = text.find(self.value_end, start)
        first = end
        while end >= 0:
            following = _skip_whitespace(text, end + len(self.value_end))
            if text.startswith(self.call_end or self.close, following) or self.parameter.match(text, following):
                return end
            end = text.find(self.value_end, end + 1)
        if first < 0:
            raise CallError(UNCLOSED_CALL)
        return first

    def _check_values(self, text: str, arguments: Mapping[str, Any], types: Mapping[str, Any]) -> None:
        """Reject a value that contains another argument or the next call, because its closing tag is missing."""
        inside = {found[1].strip() for found in self.parameter.finditer(text)} - arguments.keys()
        if inside & types.keys() or self.next_call.search(text):
            raise CallError("The tool call is incomplete. Close each parameter before the next one.")


def _to_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value that a text stands for: JSON or a Python literal, unless the schema asks for a text."""
    types = set() if schema is None else _types_of(schema)
    if types == {"string"}:
        return text
    try:
        value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return text
    if not _is_json(value) or (types and not (_types_of_value(value) & types)):
        return text
    return text if isinstance(value, str) and types else value


def _is_json(value: Any) -> bool:
    """Return True if a Python literal is a JSON value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))


def _types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows, or an empty set if it does not restrict them."""
    if not isinstance(schema, Mapping):  # `true` allows everything
        return set()
    types = schema.get("type")
    found = set(types) if isinstance(types, list) else {types} if isinstance(types, str) else set()
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or ():
            found |= _types_of(part)
    if not found and isinstance(schema.get("enum"), list):
        found = {name for value in schema["enum"] for name in _types_of_value(value)}
    return found


def _types_of_value(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}


_QWEN3_CODER = _Tags(
    name=re.compile(r"\s*+<function=([^>]*+)>"),
    parameter=re.compile(r"\s*+<parameter=([^>]*+)>\n?"),
    value_end="</parameter>",
    next_call=re.compile(r"</function>\s*+</tool_call>\s*+<tool_call>"),
    call_end="</function>",
)
_SEED_OSS = replace(
    _QWEN3_CODER,
    parameter=re.compile(r"\s*+<parameter=([^>]*+)>"),
    next_call=re.compile(r"</function>\s*+</seed:tool_call>\s*+<seed:tool_call>"),
)
_GLM = _Tags(
    name=re.compile(r"\s*+([^<\n]++)\s*+"),
    parameter=re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>"),
    value_end="</arg_value>",
    next_call=re.compile(r"</tool_call>\s*+<tool_call>"),
    close="</tool_call>",
)
_MINIMAX = _Tags(
    name=re.compile(r'([^">]*+)">'),
    parameter=re.compile(r'\s*+<parameter name="([^"]*+)">'),
    value_end="</parameter>",
    next_call=re.compile(r'</invoke>\s*+<invoke name="'),
    call_end="</invoke>",
)
_DSML = _Tags(
    name=re.compile(r'([^">]*+)">'),
    parameter=re.compile(r'\s*+<｜DSML｜parameter name="([^"]*+)"(?: string="(?P<string>true|false)")?>'),
    value_end="</｜DSML｜parameter>",
    next_call=re.compile(r'</｜DSML｜invoke>\s*+<｜DSML｜invoke name="'),
    call_end="</｜DSML｜invoke>",
)


def _read_qwen3_coder(turn: TurnText, start: int, parameters: Parameters) -> tuple[list[_Call], int]:
    """Read the tags. A newline before the end of a text belongs to the closing tag."""
    calls, end = _QWEN3_CODER.read(turn, start, parameters)
    [call] = calls
    arguments = {
        key: value.removesuffix("\n") if isinstance(value, str) else value for key, value in call.arguments.items()
    }
    return [_Call(call.name, arguments)], end


# Python calls


_PYTHON_TOKEN = re.compile(
    r'''"""(?:\\.|(?!""")[^\\])*+(?:"""|\Z)|"(?:\\.|[^"\\])*+(?:"|\Z)|'(?:\\.|[^'\\])*+(?:'|\Z)|[()\[\]{}]''', re.DOTALL
)
"""A string, which may lack its end, or a bracket."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def _repair_string(literal: str) -> str:
    """Return a string literal with escapes for newlines, and for backslashes that start no escape."""

    def repair(escape: re.Match[str]) -> str:
        if escape[1] == "\n":  # the literal continues on the next line
            return ""
        return escape[0] if escape[1] in "\\'\"abfnrtv01234567xuUN" else "\\" + escape[0]

    return _ESCAPE.sub(repair, literal).replace("\n", "\\n").replace("\r", "\\r")


def _python_source(text: str, start: int) -> tuple[str, int]:
    """Return the source of the expression that the brackets at a position enclose, and its end."""
    parts: list[str] = []
    depth, position = 0, start
    for token in _PYTHON_TOKEN.finditer(text, start):
        parts += [text[position : token.start()], _repair_string(token[0])]
        position = token.end()
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth > MAX_CALL_NESTING:
            raise CallError(CALL_TOO_DEEP)
        if depth <= 0 and token[0] in ")]}":
            return "".join(parts), position
    raise CallError(UNCLOSED_CALL)


def _python_calls(source: str) -> list[_Call]:
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise CallError(f"The tool call is not a valid Python call: {message:.100}.") from error
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    if not calls:
        raise CallError(MALFORMED_CALL)
    return [_python_call(call) for call in calls]


def _python_call(call: ast.expr) -> _Call:
    if not isinstance(call, ast.Call):
        raise CallError(MALFORMED_CALL)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise CallError("The tool call has arguments without a name. Write each argument as name=value.")
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in call.keywords}
    return _Call(ast.unparse(call.func), arguments)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str(value)):  # JSON writes characters beyond U+FFFF as two escapes
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=bool() | int() | float() | None as value) if value is None or math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(_python_value(key)): _python_value(value) for key, value in pairs if key is not None}
    raise CallError(f"The argument {ast.unparse(node):.80} is not a literal. Write values, not expressions.")


_PYTHON_NAME = re.compile(r"\s*+[A-Za-z_][\w.]*+(?=\()")


def _read_olmo3(turn: TurnText, start: int, _: Parameters) -> tuple[list[_Call], int]:
    """Read calls, one after the other or in a list."""
    calls: list[_Call] = []
    position = start
    while (name := _PYTHON_NAME.match(turn.text, position)) or not calls:
        if name is None and turn.text[(bracket := _skip_whitespace(turn.text, position)) : bracket + 1] != "[":
            raise CallError(MALFORMED_CALL)
        source, position = _python_source(turn.text, position)
        calls += _python_calls(source)
    return calls, position


_LLAMA_OPENING = re.compile(
    r'(?P<marker><\|python_tag\|>)|(?=\{\s*+"(?:name|type|function|parameters|arguments)"\s*+:)'
    r"|^(?=\[\s*+[A-Za-z_][\w.]*+\()",
    re.MULTILINE,
)


def _read_llama(turn: TurnText, start: int, parameters: Parameters) -> tuple[list[_Call], int]:
    """Read JSON or a list of Python calls. JSON without a known tool or arguments is an answer, not a call."""
    start = _skip_whitespace(turn.text, start)
    if turn.text.startswith("[", start):
        source, end = _python_source(turn.text, start)
        return _python_calls(source), end
    value, end = read_json(turn.text, start)
    if isinstance(value, dict):
        keys = value.keys() & {"arguments", "parameters", "function"}
        is_call = "name" in value and (keys or value["name"] in parameters)
        if not is_call and "function" not in value:
            return [], end
    return [_call_of(value)], end


# Gemma 4


_GEMMA_QUOTE = '<|"|>'
_GEMMA_CALL = re.compile(r"\s*+call:([^{\s]++)\s*+(?=\{)")
_GEMMA_KEY = re.compile(r"[^:{},\[\]]*+")
_GEMMA_SCALAR = re.compile(r"[^,{}\[\]\s]++")
_GEMMA_TEXT_END = re.compile(r'<\|"\|>(?=\s*[,}\]])')


def _read_gemma4(turn: TurnText, start: int, _: Parameters) -> tuple[list[_Call], int]:
    name = _GEMMA_CALL.match(turn.text, start)
    if name is None:
        raise CallError(MALFORMED_CALL)
    arguments, end = _read_gemma_value(turn.text, name.end(), 0)
    return [_Call(name[1], arguments)], end


def _read_gemma_value(text: str, position: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_CALL_NESTING:
        raise CallError(CALL_TOO_DEEP)
    position = _skip_whitespace(text, position)
    if text.startswith(_GEMMA_QUOTE, position):
        start = position + len(_GEMMA_QUOTE)
        end = _GEMMA_TEXT_END.search(text, start)
        if end is None:
            raise CallError(UNCLOSED_CALL)
        return text[start : end.start()], end.end()
    if text.startswith(("{", "["), position):
        return _read_gemma_container(text, position, depth)
    found = _GEMMA_SCALAR.match(text, position)
    if found is None:
        raise CallError(UNCLOSED_CALL if position == len(text) else MALFORMED_CALL)
    return _to_value(found[0], None), found.end()


def _read_gemma_key(text: str, position: int) -> tuple[str, int]:
    """Return a key and the position after its colon. A key may have quotes."""
    if text.startswith(_GEMMA_QUOTE, position):
        start = position + len(_GEMMA_QUOTE)
        end = text.find(_GEMMA_QUOTE, start)
        key, position = text[start : max(start, end)], end + len(_GEMMA_QUOTE)
    else:
        found = _GEMMA_KEY.match(text, position)
        end = found.end() if found else position
        key, position = text[position:end].strip(), end
    position = _skip_whitespace(text, position)
    if end < 0 or not text.startswith(":", position):
        raise CallError(UNCLOSED_CALL if end < 0 or position == len(text) else MALFORMED_CALL)
    return key, position + 1


def _read_gemma_container(text: str, position: int, depth: int) -> tuple[Any, int]:
    close = "}" if text[position] == "{" else "]"
    items: list[tuple[str, Any]] = []
    position = _skip_whitespace(text, position + 1)
    while not text.startswith(close, position):
        if items:
            if not text.startswith(",", position):
                raise CallError(UNCLOSED_CALL if position == len(text) else MALFORMED_CALL)
            position += 1
        key = ""
        if close == "}":
            key, position = _read_gemma_key(text, _skip_whitespace(text, position))
        value, position = _read_gemma_value(text, position, depth + 1)
        items.append((key, value))
        position = _skip_whitespace(text, position)
    values = dict(items) if close == "}" else [value for _, value in items]
    return values, position + 1


_QWEN3_CODER_OPENING = re.compile(
    r"(?P<marker><tool_call>)"
    r"|(?<!<tool_call>)(?<!<tool_call>\n)(?=<function=[^>\s]++>\s*+(?:<parameter=|</function>))"
)
"""Some turns lack the first marker."""


def _marker(text: str) -> re.Pattern[str]:
    return re.compile(f"(?P<marker>{re.escape(text)})")


FORMS = (
    CallForm("hermes", _marker("<tool_call>"), _read_json_calls, "</tool_call>"),
    CallForm("qwen3_coder", _QWEN3_CODER_OPENING, _read_qwen3_coder, "</tool_call>"),
    CallForm("seed_oss", _marker("<seed:tool_call>"), _SEED_OSS.read, "</seed:tool_call>"),
    CallForm("glm", _marker("<tool_call>"), _GLM.read, "</tool_call>"),
    CallForm("mistral", _marker("[TOOL_CALLS]"), _read_mistral),
    CallForm(
        "deepseek_v3",
        _marker("<｜tool▁call▁begin｜>"),
        _read_deepseek_v3,
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallForm(
        "dsml",
        re.compile('<｜DSML｜invoke name="'),
        _DSML.read,
        section=(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
        ),
    ),
    CallForm(
        "kimi_k2",
        _marker("<|tool_call_begin|>"),
        _read_kimi,
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    CallForm(
        "minimax_m2",
        re.compile('<invoke name="'),
        _MINIMAX.read,
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    CallForm("gemma4", _marker("<|tool_call>"), _read_gemma4, "<tool_call|>"),
    CallForm("olmo3", _marker("<function_calls>"), _read_olmo3, "</function_calls>"),
    CallForm("lfm2", _marker("<|tool_call_start|>"), _read_olmo3, "<|tool_call_end|>"),
    CallForm("llama", _LLAMA_OPENING, _read_llama),
)
"""All forms. If two have the same opening, the probe calls decide which one a model writes."""
