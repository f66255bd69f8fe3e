"""A sample as a sequence of text blocks. Display and search both use it, so that every match can be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_WORD = re.compile(r"[A-Za-z0-9_]+")
_FOLDED = re.compile(r"[iIkKsS]")
"""ASCII letters that match non-ASCII ones if case is ignored: İ ı, K (Kelvin sign), ſ."""

_SUBSTITUTED = re.compile("[\u2400-\u2421\ufffd\u27e8\u27e9]")
"""Symbols that `sanitize()` displays in place of other characters."""


class TextQuery:
    """A text to search for.

    >>> TextQuery("trace").count("Traceback, trace"), TextQuery("Trace").count("Traceback, trace")
    (2, 1)
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("A text query must have at least one character.")
        self.text = text
        self.ignores_case = text == text.lower()
        self._pattern = re.compile(re.escape(text), re.IGNORECASE if self.ignores_case else 0)
        self._hints = self._make_hints()

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each match. Matches do not overlap."""
        return (found.span() for found in self._pattern.finditer(text))

    def count(self, text: str) -> int:
        """Return the number of matches."""
        return sum(1 for _ in self._pattern.finditer(text)) if self.ignores_case else text.count(self.text)

    def may_match_line(self, line: bytes) -> bool:
        """Return False if no string in a line of JSON can match, without parsing the line.

        False positives are possible, false negatives are not.
        """
        if self._hints is None:
            return True
        if self.ignores_case:
            line = line.lower()
        return any(hint in line for hint in self._hints)

    def _make_hints(self) -> list[bytes] | None:
        """Return byte strings of which every matching line contains at least one, or None if there are none.

        JSON encodes ASCII words literally; other characters can be encoded in several ways.
        """
        if _SUBSTITUTED.search(self.text):
            return None
        words = _WORD.findall(self.text)
        if self.ignores_case:
            words = [part for word in words for part in _FOLDED.split(word) if part]
        if words:
            return [max(words, key=len).encode()]
        first = self.text[0]
        if first.isascii() or first.lower() != first.upper():
            return None
        return [first.encode(errors="replace"), json.dumps(first)[1:-1].encode()]


class BlockKind(StrEnum):
    """Kind of a block. Its value is the name of the block's style."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    THINKING = "thinking"
    CALL = "call"
    RESULT = "result"
    FAULT = "fault"
    """Result of a failed call, or another error."""
    FIELD = "field"
    NOTE = "note"
    """Text of the viewer, not of the sample."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of sanitized text with a title."""

    kind: BlockKind
    title: str
    text: str = ""
    detail: str = ""
    """Text to the right of the title: timings, lengths."""
    language: str | None = None
    """Programming language of the text; None for prose, which may contain code fences."""
    folded: bool = False
    """True if only the title is shown until the block is opened."""
    beside: bool = False
    """True if the block is drawn to the right of the previous one if there is room, as a result beside its call."""


@dataclass(frozen=True, slots=True)
class Document:
    """The blocks of one sample, in order."""

    blocks: Sequence[Block] = field(default_factory=tuple)

    def matches(self, query: TextQuery) -> Iterator[tuple[int, int, int]]:
        """Yield the block number, the start and the end of each match."""
        for number, block in enumerate(self.blocks):
            for start, end in query.find(block.text):
                yield number, start, end

    def count(self, query: TextQuery) -> int:
        """Return the number of matches."""
        return sum(query.count(block.text) for block in self.blocks)
