"""TokenFlow: the tokens of a sample as rows of text, each token in its place.

Rows are made of whole tokens, in order; every token is on exactly one row. A token that ends a line ends its row. What
a row looks like is found when it is drawn, so that a hundred thousand tokens cost no more than to be counted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from toolroll.records.packed import Tokens
from toolroll.rollout.tokens import Author, Span
from toolroll.viewer.harmless import harmless

TextOf = Callable[[int], str]
"""From an id to its text."""


class Shown(NamedTuple):
    """One token, to be drawn."""

    number: int
    text: str
    style: str


class TokenFlow:
    """The rows of one sequence at a width. Without texts, ids stand for them."""

    def __init__(self, tokens: Tokens, width: int, text_of: TextOf | None = None) -> None:
        self.tokens = tokens
        self._text_of = text_of
        self._texts: dict[int, tuple[str, int, bool]] = {}
        self._starts = self._lay(max(width, 8))
        self._span_starts = [span.start for span in tokens.spans]

    def __len__(self) -> int:
        return len(self._starts)

    def first(self, row: int) -> int:
        """The first token of a row."""
        return self._starts[row]

    def row_of(self, token: int) -> int:
        """The row of a token."""
        return bisect_right(self._starts, token) - 1

    def row(self, number: int) -> list[Shown]:
        """The tokens of a row."""
        end = self._starts[number + 1] if number + 1 < len(self._starts) else len(self.tokens.ids)
        return [self.shown(token) for token in range(self._starts[number], end)]

    def shown(self, token: int) -> Shown:
        """One token."""
        return Shown(token, self.text(self.tokens.ids[token])[0], self.style(token))

    def span(self, token: int) -> Span | None:
        """Whose a token is."""
        place = bisect_right(self._span_starts, token) - 1
        return self.tokens.spans[place] if place >= 0 else None

    def style(self, token: int) -> str:
        """By the mask: what was sampled by how probable it was, all else by who wrote it."""
        if self.tokens.mask[token]:
            return probability_style(self.tokens.logprobs[token] if self.tokens.logprobs else None)
        span = self.span(token)
        return "token.tool" if span and span.author is Author.TOOL else "token.prompt"

    def text(self, number: int) -> tuple[str, int, bool]:
        """An id's text as shown, its width, and whether it ends a line."""
        known = self._texts.get(number)
        if known is None:
            if self._text_of is None:
                shown, ends = f"{number} ", False
            else:
                raw = self._text_of(number)
                ends = raw.endswith("\n")
                shown = harmless(raw).replace("\n", "⏎") or "∅"
            known = self._texts[number] = shown, cell_len(shown), ends
        return known

    def _lay(self, width: int) -> array[int]:
        starts, used, ended = array("l"), 0, True
        text, known = self.text, self._texts
        for token, number in enumerate(self.tokens.ids):
            _, cells, ends = known.get(number) or text(number)
            if ended or used + cells > width:
                starts.append(token)
                used = 0
            used += cells
            ended = ends
        return starts


def probability_style(logprob: float | None) -> str:
    """The style of a sampled token: the rarer it was, the louder."""
    if logprob is None or math.isnan(logprob):
        return "token.sampled"
    for least, style in ((math.log(0.9), "token.p90"), (math.log(0.5), "token.p50"), (math.log(0.1), "token.p10")):
        if logprob >= least:
            return style
    return "token.p01" if logprob >= math.log(0.01) else "token.p00"


def counts(tokens: Tokens) -> dict[str, int]:
    """How many tokens are whose."""
    found = {author.value: 0 for author in Author}
    for span in tokens.spans:
        found[span.author.value] += span.end - span.start
    return found


def mean_logprob(tokens: Tokens) -> float | None:
    """Of the sampled tokens."""
    if tokens.logprobs is None:
        return None
    sampled = [value for value, mask in zip(tokens.logprobs, tokens.mask, strict=True) if mask and math.isfinite(value)]
    return sum(sampled) / len(sampled) if sampled else None


def versions(spans: Sequence[Span]) -> list[str]:
    """The weights that sampled it, in order."""
    return list(dict.fromkeys(span.weight_version for span in spans if span.weight_version is not None))
