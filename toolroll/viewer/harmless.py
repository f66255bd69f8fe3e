"""Text out of a sample, made harmless to show.

A model can write anything: escape sequences that would recolour or move the terminal, bells, characters that turn the
direction of the line around, halves of characters. What comes out of `harmless` has no character that a terminal acts
upon but the newline; each such character is there to be seen, as a picture (␛) or its number (⟨202E⟩). Nothing is ever
read as markup, anywhere in the viewer: that is the widgets' part.
"""

from __future__ import annotations

import re
from functools import lru_cache

TAB = 4

_ACTED_UPON = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
"""Controls, characters of no width that hide or reorder others, and lone surrogates. Not the newline."""
_LINE_ENDS = re.compile("\r\n")
_EMOJI = re.compile("(?<![A-Za-z0-9_])[\ufe0e\ufe0f]|[\ufe0e\ufe0f](?=\u20e3)")
"""Asks for the coloured form of the character before. Left out, as terminals disagree on how wide that is."""

DEFAULT_MASK = r"<\|image_pad\|>|<\|imgpad\|>"
"""What stands in a prompt once for each patch of an image: thousands of times, and says nothing."""


def harmless(text: str, mask: re.Pattern[str] | None = None) -> str:
    r"""The text, to be shown. What `mask` matches becomes `*`.

    >>> harmless("\x1b[31mred[bold]")
    '␛[31mred[bold]'
    """
    if mask is not None:
        text = mask.sub("*", text)
    if "\r" in text:
        text = _LINE_ENDS.sub("\n", text)
    if text.isascii() and text.isprintable():
        return text
    return _ACTED_UPON.sub(_shown, _EMOJI.sub("", text))


def one_line(text: str, most: int = 200) -> str:
    """The beginning of a text, on one line: for titles and messages."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return harmless(cut).replace("\n", "␤")


def _shown(found: re.Match[str]) -> str:
    return _picture(found[0])


@lru_cache(maxsize=1024)
def _picture(character: str) -> str:
    number = ord(character)
    if character == "\t":
        return " " * TAB
    if number < 0x20:
        return chr(0x2400 + number)
    if number == 0x7F:
        return "␡"
    if 0xD800 <= number <= 0xDFFF:
        return "\ufffd"
    return f"⟨{number:04X}⟩"
