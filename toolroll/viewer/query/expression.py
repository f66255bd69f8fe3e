"""Filter expressions over samples, e.g. `score < 0.5 and "Traceback" in output`.

The syntax is a subset of Python. The text is parsed with `ast` and compiled to closures, never executed as Python; any
unsupported node is rejected with its column. `a.b` is equivalent to `a["b"]`, the key b of the object a.

Invariants:

- Compiling any text returns a FilterExpression or raises ExpressionError, nothing else.
- Evaluating an expression on any sample returns True or False. A missing field is None. A comparison or an operation on
  unsuitable types (None with a number, text with a number) is False or None, not an error, as dumps are heterogeneous.
- Evaluation has no side effects: it cannot reach Python attributes, cannot call functions other than those in
  `FUNCTIONS`, and cannot create values much larger than its operands.
"""

from __future__ import annotations

import ast
import json
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from toolroll._internal.text import shorten
from toolroll.errors import ToolrollError, did_you_mean

MAX_EXPRESSION_CHARS = 1000
"""Longer texts could exhaust the stack of Python's parser."""
MAX_EXPRESSION_DEPTH = 100

Lookup = Callable[[str], Any]
"""Returns the value of a field of one sample, None if it is missing."""
Evaluate = Callable[[Lookup], Any]


class ExpressionError(ToolrollError):
    """Raised when a text is not a valid filter expression.

    Attributes:
        column: Position of the error in the text, from 0.
    """

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


class FilterExpression:
    """A compiled filter expression.

    Args:
        source: Text of the expression.

    Raises:
        ExpressionError: If the text is not a valid expression.

    Example:
        >>> low = FilterExpression("score < 0.5 and finish_reason == 'stop'")
        >>> low.matches({"score": 0.25, "finish_reason": "stop"}.get), sorted(low.names)
        (True, ['finish_reason', 'score'])
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: set[str] = set()
        """Names of the fields that the expression uses."""
        self._evaluate = self._compile(_parse(source))

    def matches(self, lookup: Lookup) -> bool:
        """Return True if the expression is true for a sample.

        Args:
            lookup: Function from a field's name to its value in the sample.
        """
        try:
            return bool(self._evaluate(lookup))
        except RecursionError:  # comparison of deeply nested lists
            return False

    def _compile(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return lambda _: value
            case ast.Name(id=name) if name in LITERALS:
                return lambda _: LITERALS[name]
            case ast.Name(id=name):
                self.names.add(name)
                return lambda lookup: lookup(name)
            case ast.Attribute(value=inner, attr=key):
                inside = self._compile(inner)
                return lambda lookup: _item(inside(lookup), key)
            case ast.Subscript(value=inner, slice=index) if not isinstance(index, ast.Slice):
                inside, at = self._compile(inner), self._compile(index)
                return lambda lookup: _item(inside(lookup), at(lookup))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self._compile(item) for item in items]
                return lambda lookup: [part(lookup) for part in parts]
            case ast.UnaryOp(op=op, operand=inner) if type(op) in UNARY_OPERATORS:
                inside, unary = self._compile(inner), UNARY_OPERATORS[type(op)]
                return lambda lookup: unary(inside(lookup))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC_OPERATORS:
                one, other, combine = self._compile(left), self._compile(right), ARITHMETIC_OPERATORS[type(op)]
                return lambda lookup: _calculate(combine, one(lookup), other(lookup))
            case ast.BoolOp(op=op, values=values):
                parts = [self._compile(value) for value in values]
                combine_all = all if isinstance(op, ast.And) else any
                return lambda lookup: combine_all(part(lookup) for part in parts)
            case ast.Compare(left=left, ops=ops, comparators=others):
                parts = [self._compile(operand) for operand in (left, *others)]
                tests = [COMPARISON_OPERATORS[type(op)] for op in ops]
                return lambda lookup: _all_hold(tests, [part(lookup) for part in parts])
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
                inside, function = self._compile(argument), FUNCTIONS[name]
                return lambda lookup: function(inside(lookup))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                raise ExpressionError(f"{name}() takes one argument", node.col_offset)
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                raise ExpressionError(f"unknown function {name}(){did_you_mean(name, FUNCTIONS)}", node.col_offset)
        raise ExpressionError(f"{shorten(ast.unparse(node), 40)!r} is not supported", node.col_offset)


def _parse(source: str) -> ast.expr:
    text = source.strip()
    if not text:
        raise ExpressionError("empty expression", 0)
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"longer than {MAX_EXPRESSION_CHARS} characters", MAX_EXPRESSION_CHARS)
    indent = len(source) - len(source.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings about escapes and `is` with a literal
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        column = _error_column(text, error)
        raise ExpressionError(_explain(text, column, error.msg), indent + column) from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, thousands of digits, deep nesting
        raise ExpressionError(str(error) or "nested too deeply", 0) from None
    _check_depth(tree)
    return tree


def _check_depth(tree: ast.expr) -> None:
    layer: list[ast.AST] = [tree]
    for _ in range(MAX_EXPRESSION_DEPTH):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    if layer:
        raise ExpressionError("nested too deeply", 0)


def _error_column(text: str, error: SyntaxError) -> int:
    """Return the position of a syntax error, from 0. Python reports offset 0 if the text is incomplete."""
    if not error.offset:
        return len(text)
    before = sum(len(line) + 1 for line in text.split("\n")[: (error.lineno or 1) - 1])
    return min(before + error.offset - 1, len(text))


def _explain(text: str, column: int, message: str) -> str:
    for wrong, right in (("&&", "and"), ("||", "or")):
        if wrong in text:
            return f"use {right} instead of {wrong}"
    if column == len(text):
        return "incomplete expression"
    return "use == to compare" if message == "invalid syntax" and text[column] == "=" else message


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(key, str):
        return value.get(key)
    if isinstance(value, list | tuple | str) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return None


def _calculate(combine: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Combine two numbers. Texts are excluded: "a" * 10**9 and "%999999999d" % 1 would exhaust the memory."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return None
    try:
        return combine(one, other)
    except (ArithmeticError, ValueError):
        return None


def _all_hold(tests: list[Callable[[Any, Any], Any]], values: list[Any]) -> bool:
    """Evaluate a chain of comparisons, such as `0 < score < 1`, which has one test fewer than values."""
    try:
        return all(test(one, other) for test, one, other in zip(tests, values, values[1:], strict=False))
    except TypeError:
        return False


def _if_type(types: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Restrict a function to some types; it returns None for values of other types."""
    return lambda value: function(value) if isinstance(value, types) else None


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return ""


LITERALS = {"null": None, "true": True, "false": False}
UNARY_OPERATORS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: _if_type(int | float, operator.neg),
    ast.UAdd: lambda value: value,
}
ARITHMETIC_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISON_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "len": _if_type(str | list | Mapping, len),
    "abs": _if_type(int | float, abs),
    "lower": _if_type(str, str.lower),
    "text": _as_text,
}
"""Functions that an expression can call. `text` converts any value to text, to search in it."""
