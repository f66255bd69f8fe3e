"""Make text of any origin safe to display in a terminal or a log.

Models can write escape sequences that move or recolour the terminal, bells, bidirectional overrides and lone
surrogates. `sanitize()` replaces each character that a terminal interprets, except the newline, by a visible symbol
(␛) or its code point (⟨202E⟩).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from toolroll._internal.text import shorten

TAB_CELLS = 4

_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
"""Control characters except the newline, zero-width characters that hide or reorder others, lone surrogates."""
_EMOJI_VARIATION = re.compile("(?<![A-Za-z0-9_])[\ufe0e\ufe0f]|[\ufe0e\ufe0f](?=\u20e3)")
"""Variation selectors of emoji. They are removed because terminals disagree on the width of the result."""


def sanitize(text: str, mask: re.Pattern[str] | None = None) -> str:
    r"""Return a text without characters that a terminal interprets.

    Args:
        text: Any text.
        mask: Pattern of text to replace by `*`.

    Returns:
        The text in which newlines are the only control characters. Sanitizing it again has no effect.

    Example:
        >>> sanitize("\x1b[31mred[bold]")
        '␛[31mred[bold]'
    """
    if mask is not None:
        text = mask.sub("*", text)
    text = text.replace("\r\n", "\n")
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: _symbol(found[0]), _EMOJI_VARIATION.sub("", text))


def escape_unsafe(text: str, escape: Callable[[str], str]) -> str:
    """Return a text in which `escape` has replaced each character that a terminal interprets, except the newline."""
    return _UNSAFE.sub(lambda found: escape(found[0]), text)


def one_line(text: str, max_chars: int = 200) -> str:
    """Return the start of a text on one line, sanitized, for titles and messages."""
    return sanitize(shorten(text, max_chars)).replace("\n", "␤")


@lru_cache(maxsize=1024)
def _symbol(character: str) -> str:
    code = ord(character)
    if character == "\t":
        return " " * TAB_CELLS
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else f"⟨{code:04X}⟩"
