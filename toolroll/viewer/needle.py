"""Needle: what is searched for, and a quick look whether a line can have it.

A needle without capitals finds both cases; one with a capital finds what it says. `may_be_in` looks at a line's bytes
as they are on disk, before any JSON is parsed: it may say yes where there is nothing, never no where there is
something in the line's texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_WORD = re.compile(r"[A-Za-z0-9_]+")
_FOLDED = re.compile(r"[iIkKsS]")
"""Letters that are the same as one outside ASCII when case doesn't count: İ ı, K (Kelvin), ſ."""

_MADE = re.compile("[\u2400-\u2421\ufffd\u27e8\u27e9]")
"""Characters that may be shown in place of others (harmless.py)."""


class Needle:
    """A text to look for.

    >>> Needle("trace").count("Traceback, trace"), Needle("Trace").count("Traceback, trace")
    (2, 1)
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("A needle must have at least one character.")
        self.text = text
        self.any_case = text == text.lower()
        self._pattern = re.compile(re.escape(text), re.IGNORECASE if self.any_case else 0)
        self._hints = self._make_hints()

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Where it is: from, to. Places don't overlap."""
        for found in self._pattern.finditer(text):
            yield found.span()

    def count(self, text: str) -> int:
        """How often it is there."""
        if not self.any_case:
            return text.count(self.text)
        return sum(1 for _ in self._pattern.finditer(text))

    def may_be_in(self, line: bytes) -> bool:
        """Whether a line of JSON can have it in one of its texts."""
        if self._hints is None:
            return True
        if self.any_case:
            line = line.lower()
        return any(hint in line for hint in self._hints)

    def _make_hints(self) -> list[bytes] | None:
        """Bytes of which one is in every line that has the needle; None where nothing can be said.

        A word of ASCII stands in JSON as it is. What stands around it may be written in several ways.
        """
        if _MADE.search(self.text):
            return None
        words = _WORD.findall(self.text)
        if self.any_case:
            words = [part for word in words for part in _FOLDED.split(word) if part]
        if words:
            return [max(words, key=len).encode()]
        first = self.text[0]
        if first.isascii() or first.lower() != first.upper():
            return None
        return [first.encode(errors="replace"), json.dumps(first)[1:-1].encode()]
