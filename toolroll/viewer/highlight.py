"""Highlighting: which parts of a text are which part of a program.

`runs` gives ranges in the order of the text that don't overlap, each with the name of a style; what is between them
has none. It is for showing only, so it may give up (a text too long, a language that it doesn't know) and never raises.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygments.lexer import Lexer

Run = tuple[int, int, str]
"""From, to (exclusive), style."""

LONGEST = 200_000
"""Characters beyond which a text isn't highlighted: it would take more than a moment."""

_FENCE = re.compile(
    r"^([ ]{0,3})(`{3,}|~{3,})[ ]*([\w+#.-]*)[^\n`]*\n(.*?)(?:^\1\2[`~]*[ ]*$|\Z)", re.MULTILINE | re.DOTALL
)
_TAG = re.compile(r"</?(?:think|tool_call|tool_response|answer|tools|code)>|<\|[^|<>\n]{1,40}\|>")


def runs(text: str, language: str | None) -> list[Run]:
    """The runs of a text: code in `language`, or prose with fenced code in it."""
    if len(text) > LONGEST:
        return []
    if language is not None:
        return _code(text, 0, language)
    found: list[Run] = []
    done = 0
    for fence in _FENCE.finditer(text):
        found += _tags(text, done, fence.start())
        inner, after = fence.span(4)
        found.append((fence.start(), inner, "fence"))
        found += _code(text[inner:after], inner, fence[3] or "python")
        if after < fence.end():
            found.append((after, fence.end(), "fence"))
        done = fence.end()
    return found + _tags(text, done, len(text))


def _tags(text: str, start: int, end: int) -> list[Run]:
    return [(*found.span(), "tag") for found in _TAG.finditer(text, start, end)]


def _code(code: str, offset: int, language: str) -> list[Run]:
    lexer = _lexer(language)
    if lexer is None:
        return []
    found: list[Run] = []
    for start, kind, value in lexer.get_tokens_unprocessed(code):
        style = _style(kind)
        if style is not None and value:
            found.append((offset + start, offset + start + len(value), style))
    return found


@lru_cache(maxsize=32)
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


@lru_cache(maxsize=256)
def _style(kind: object) -> str | None:
    name = str(kind).removeprefix("Token.")
    for beginning, style in _STYLES:
        if name.startswith(beginning):
            return style
    return None


_STYLES = (
    ("Comment", "comment"),
    ("Keyword.Constant", "number"),
    ("Keyword", "keyword"),
    ("Literal.String", "string"),
    ("Literal.Number", "number"),
    ("Name.Builtin", "builtin"),
    ("Name.Function", "function"),
    ("Name.Class", "function"),
    ("Name.Decorator", "function"),
    ("Name.Exception", "builtin"),
    ("Name.Tag", "builtin"),
    ("Operator.Word", "keyword"),
    ("Operator", "operator"),
    ("Generic.Error", "error"),
    ("Error", "error"),
)
