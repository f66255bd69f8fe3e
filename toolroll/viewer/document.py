"""Document: a sample as blocks of text. What is shown, and what is searched, is the same.

Every text in it is harmless already. A block that is `beside` belongs to the one before it, and is drawn on its right
where there is room: a tool's answer beside the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from toolroll.viewer.needle import Needle


class Kind(StrEnum):
    """What a block is, which decides how it looks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    THINKING = "thinking"
    CALL = "call"
    ANSWER = "answer"
    FAULT = "fault"
    """A call's answer where the call failed, or what else went wrong."""
    FIELD = "field"
    NOTE = "note"
    """The viewer's own words, not the sample's."""


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of text with a title."""

    kind: Kind
    title: str
    text: str = ""
    detail: str = ""
    """What stands at the right of the title: timings, lengths."""
    language: str | None = None
    """The text is code in this language; None: it is prose, perhaps with fenced code in it."""
    folded: bool = False
    """Shown by its title only, until it is opened."""
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """The blocks of one sample, in order."""

    blocks: Sequence[Block] = field(default_factory=tuple)

    def matches(self, needle: Needle) -> Iterator[tuple[int, int, int]]:
        """Every place where the needle is: block, from, to."""
        for number, block in enumerate(self.blocks):
            for start, end in needle.find(block.text):
                yield number, start, end

    def count(self, needle: Needle) -> int:
        """How many places there are."""
        return sum(needle.count(block.text) for block in self.blocks)
