"""Expression: what the user types to filter samples, e.g. `score < 0.5 and "Traceback" in output`.

It looks like Python and is never run as Python: the text is parsed, each node is one of those below, and everything
else is refused with the place where it stands. It promises:

- Reading any text gives an Expression or raises ExpressionError. Nothing else.
- Asking it about any sample gives True or False. A field that is missing is None; a comparison or a sum that makes no
  sense (None with a number, a text with a number) is False or None, never an error: dumps are uneven.
- It can't do anything but look: no attribute of Python's is reachable, no function but those of FUNCTIONS, and nothing
  whose result could be much larger than what it was made of.

`a.b` and `a["b"]` are the same: the key b of the object a.
"""

from __future__ import annotations

import ast
import json
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from toolroll.errors import ToolrollError, did_you_mean

LONGEST = 1000
"""Characters of an expression. Nobody types more, and Python's parser has a stack that ends."""

Lookup = Callable[[str], Any]
"""From a field's name to its value in one sample; None where there is none."""
Evaluate = Callable[[Lookup], Any]


class ExpressionError(ToolrollError):
    """The text is no expression. `column` is where, from 0."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


class Expression:
    """A filter.

    >>> low = Expression("score < 0.5 and finish_reason == 'stop'")
    >>> low.matches({"score": 0.25, "finish_reason": "stop"}.get), sorted(low.names)
    (True, ['finish_reason', 'score'])
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._names: set[str] = set()
        self._evaluate = self._read(_tree(source))
        self.names = frozenset(self._names)
        """The fields that it asks for."""

    def matches(self, lookup: Lookup) -> bool:
        """Whether a sample is wanted."""
        try:
            return bool(self._evaluate(lookup))
        except RecursionError:  # a list in a list in a list …, compared with another
            return False

    def _read(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return lambda _: value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=key):
                inside = self._read(inner)
                return lambda lookup: _item(inside(lookup), key)
            case ast.Subscript(value=inner, slice=place) if not isinstance(place, ast.Slice):
                inside, at = self._read(inner), self._read(place)
                return lambda lookup: _item(inside(lookup), at(lookup))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self._read(item) for item in items]
                return lambda lookup: [part(lookup) for part in parts]
            case ast.UnaryOp(op=op, operand=inner) if type(op) in UNARY:
                inside, unary = self._read(inner), UNARY[type(op)]
                return lambda lookup: unary(inside(lookup))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                one, other, combine = self._read(left), self._read(right), ARITHMETIC[type(op)]
                return lambda lookup: _number(combine, one(lookup), other(lookup))
            case ast.BoolOp(op=op, values=values):
                parts = [self._read(value) for value in values]
                every = all if isinstance(op, ast.And) else any
                return lambda lookup: every(part(lookup) for part in parts)
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments)
        raise ExpressionError(f"{_called(node)} can't be used here", node.col_offset)

    def _name(self, name: str) -> Evaluate:
        if name in WORDS:
            value = WORDS[name]
            return lambda _: value
        self._names.add(name)
        return lambda lookup: lookup(name)

    def _compare(self, node: ast.Compare) -> Evaluate:
        operands = [self._read(one) for one in (node.left, *node.comparators)]
        tests = [COMPARISONS[type(op)] for op in node.ops]

        def compare(lookup: Lookup) -> bool:
            values = [operand(lookup) for operand in operands]
            pairs = zip(tests, values, values[1:], strict=False)
            return all(_holds(test, one, other) for test, one, other in pairs)

        return compare

    def _call(self, node: ast.Call, name: str, arguments: list[ast.expr]) -> Evaluate:
        if name not in FUNCTIONS:
            raise ExpressionError(f"there is no function {name}(){did_you_mean(name, FUNCTIONS)}", node.col_offset)
        if len(arguments) != 1:
            raise ExpressionError(f"{name}() takes one value", node.col_offset)
        function, inside = FUNCTIONS[name], self._read(arguments[0])
        return lambda lookup: function(inside(lookup))


def _tree(source: str) -> ast.expr:
    text = source.strip()
    if not text:
        raise ExpressionError("nothing to filter by", 0)
    if len(text) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters", LONGEST)
    indent = len(source) - len(source.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's, about escapes and `is` with a literal
            return _within(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ExpressionError(_said(text, error), indent + _column(text, error)) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; thousands of digits; too deep for Python
        raise ExpressionError(str(error) or "nested too deeply", 0) from None


def _within(tree: ast.expr) -> ast.expr:
    """The tree, if it isn't too deep to be walked."""
    layer: list[ast.AST] = [tree]
    for _ in range(100):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    if layer:
        raise ExpressionError("nested too deeply", 0)
    return tree


def _column(text: str, error: SyntaxError) -> int:
    """Where Python stopped, from 0. It says 0, counting from 1, where it wanted more."""
    if not error.offset:
        return len(text)
    before = sum(len(line) + 1 for line in text.split("\n")[: (error.lineno or 1) - 1])
    return min(before + error.offset - 1, len(text))


def _said(text: str, error: SyntaxError) -> str:
    for wrong, right in (("&&", "and"), ("||", "or")):
        if wrong in text:
            return f"write {right} for {wrong}"
    column = _column(text, error)
    if column == len(text):
        return "unfinished"
    if text[column] == "=" and error.msg == "invalid syntax":
        return "write == to compare"
    return "not understood from here" if error.msg == "invalid syntax" else error.msg


def _called(node: ast.expr) -> str:
    names: dict[type[ast.expr], str] = {
        ast.Lambda: "lambda",
        ast.Call: "this call",
        ast.Dict: "a dictionary",
        ast.Set: "a set: write [ ],",
        ast.NamedExpr: ":=",
        ast.JoinedStr: "an f-string",
        ast.Subscript: "a slice",
    }
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return f"the operator {type(node.op).__name__}"
    return names.get(type(node), type(node).__name__)


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(key, str):
        return value.get(key)
    if isinstance(value, list | tuple | str) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return None


def _number(combine: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """A sum of numbers. Not of texts: "a" * 10**9 and "%999999999d" % 1 would fill the memory."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return None
    try:
        return combine(one, other)
    except (ArithmeticError, ValueError):
        return None


def _holds(test: Callable[[Any, Any], Any], one: Any, other: Any) -> bool:
    try:
        return bool(test(one, other))
    except TypeError:
        return False


def _in(one: Any, other: Any) -> bool:
    return one in other


def _negative(value: Any) -> Any:
    return -value if isinstance(value, int | float) else None


def _length(value: Any) -> Any:
    return len(value) if isinstance(value, str | list | Mapping) else None


def _absolute(value: Any) -> Any:
    return abs(value) if isinstance(value, int | float) else None


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return ""


WORDS = {"null": None, "true": True, "false": False}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: _negative,
    ast.UAdd: lambda value: value,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: _in,
    ast.NotIn: lambda one, other: not _in(one, other),
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": _length, "abs": _absolute, "lower": _lower, "text": _text}
"""What may be called: `text` is anything as one text, to look for a word in it."""
