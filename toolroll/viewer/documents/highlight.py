"""Syntax highlighting of code and of code fences in prose.

Highlighting never raises. It returns no runs for a text that is too long or in an unknown language.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygments.lexer import Lexer

StyledRange = tuple[int, int, str]
"""Start, end (exclusive) and name of the style."""

MAX_HIGHLIGHTED_CHARS = 200_000

_FENCE = re.compile(
    r"^([ ]{0,3})(`{3,}|~{3,})[ ]*([\w+#.-]*)[^\n`]*\n(.*?)(?:^\1\2[`~]*[ ]*$|\Z)", re.MULTILINE | re.DOTALL
)
_TAG = re.compile(r"</?(?:think|tool_call|tool_response|answer|tools|code)>|<\|[^|<>\n]{1,40}\|>")


def highlight(text: str, language: str | None) -> list[StyledRange]:
    """Return the styled ranges of a text, in order and without overlaps.

    Args:
        text: Text to highlight.
        language: Name of a Pygments lexer, or None for prose that may contain code fences and chat tags.
    """
    if len(text) > MAX_HIGHLIGHTED_CHARS:
        return []
    if language is not None:
        return _code(text, 0, language)
    found: list[StyledRange] = []
    end = 0
    for fence in _FENCE.finditer(text):
        found += _tags(text, end, fence.start())
        code_start, code_end = fence.span(4)
        end = fence.end()
        found.append((fence.start(), code_start, "fence"))
        found += _code(text[code_start:code_end], code_start, fence[3] or "python")
        if code_end < end:
            found.append((code_end, end, "fence"))
    return found + _tags(text, end, len(text))


def _tags(text: str, start: int, end: int) -> list[StyledRange]:
    return [(*found.span(), "tag") for found in _TAG.finditer(text, start, end)]


def _code(code: str, offset: int, language: str) -> list[StyledRange]:
    lexer = _lexer(language)
    return [
        (offset + start, offset + start + len(value), style)
        for start, kind, value in (lexer.get_tokens_unprocessed(code) if lexer is not None else ())
        if value and (style := _style(kind)) is not None
    ]


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
    return next((style for style, prefixes in _STYLES.items() if name.startswith(prefixes)), None)


_STYLES: dict[str, tuple[str, ...]] = {
    "comment": ("Comment",),
    "number": ("Keyword.Constant", "Literal.Number"),
    "keyword": ("Keyword", "Operator.Word"),
    "string": ("Literal.String",),
    "builtin": ("Name.Builtin", "Name.Exception", "Name.Tag"),
    "function": ("Name.Function", "Name.Class", "Name.Decorator"),
    "operator": ("Operator",),
    "error": ("Generic.Error", "Error"),
}
"""Prefixes of the names of Pygments tokens by style. The first match counts."""
