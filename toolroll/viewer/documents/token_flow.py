"""Decode the tokens of a sequence and arrange them in rows.

A row consists of whole tokens, in order, and every token is on exactly one row. A token that ends with a newline ends
its row. Rows are formatted when they are drawn, so that sequences of 100,000 tokens open quickly.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.cells import cell_len

from toolroll._internal.sanitize import sanitize
from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.packed_tokens import PackedTokens
from toolroll.rollout.tokens import Author, Span


class TokenText:
    """Function from token IDs to their texts. Each ID is decoded once.

    Args:
        path: Path or name of the tokenizer.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def load(self) -> None:
        """Load the tokenizer, which takes seconds.

        Raises:
            MissingExtra: If transformers is not installed.
            ConfigError: If the tokenizer cannot be loaded.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtra("transformers", "rollout") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"Cannot load the tokenizer {self.path!r}: {reason}") from error

    @property
    def is_loaded(self) -> bool:
        """True if IDs can be decoded."""
        return self._tokenizer is not None

    def __call__(self, token_id: int) -> str:
        """Return the text of a token, or its ID in angle brackets if the tokenizer does not know it."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = str(self._tokenizer.decode([token_id]))
            except (IndexError, OverflowError, ValueError, TypeError, KeyError):
                self._texts[token_id] = f"<{token_id}>"
        return self._texts[token_id]


PROBABILITY_STYLES = {0.9: "token.p90", 0.5: "token.p50", 0.1: "token.p10", 0.01: "token.p01", 0.0: "token.p00"}
"""Styles of sampled tokens by their minimum probability."""


class ShownToken(NamedTuple):
    """A token as displayed."""

    number: int
    text: str
    style: str


class _TokenCell(NamedTuple):
    """Displayed text of a token ID."""

    text: str
    cells: int
    ends_row: bool


class TokenFlow:
    """Rows of a token sequence.

    Args:
        tokens: The sequence.
        width: Width of a row in cells.
        text_of: Returns the text of a token ID; without it, IDs are shown.
    """

    def __init__(self, tokens: PackedTokens, width: int, text_of: Callable[[int], str] | None = None) -> None:
        self.tokens = tokens
        self._cells = {token_id: _token_cell(token_id, text_of) for token_id in set(tokens.ids)}
        self._row_starts = self._find_row_starts(max(width, 8))
        self._span_starts = [span.start for span in tokens.spans]

    def __len__(self) -> int:
        return len(self._row_starts)

    def row(self, number: int) -> list[ShownToken]:
        """Return the tokens of a row."""
        end = self._row_starts[number + 1] if number + 1 < len(self) else len(self.tokens.ids)
        return [self.shown(token) for token in range(self._row_starts[number], end)]

    def shown(self, token: int) -> ShownToken:
        """Return a token as displayed."""
        return ShownToken(token, self._cells[self.tokens.ids[token]].text, self.style(token))

    def span(self, token: int) -> Span | None:
        """Return the span that contains a token."""
        index = bisect_right(self._span_starts, token) - 1
        return self.tokens.spans[index] if index >= 0 else None

    def style(self, token: int) -> str:
        """Return the style of a token: by probability if it was sampled (mask 1), else by author."""
        if self.tokens.mask[token]:
            return probability_style(self.tokens.logprobs[token] if self.tokens.logprobs else None)
        span = self.span(token)
        return "token.tool" if span and span.author is Author.TOOL else "token.prompt"

    def count_by_author(self) -> dict[str, int]:
        """Return the number of tokens by author."""
        found = {author.value: 0 for author in Author}
        for span in self.tokens.spans:
            found[span.author.value] += span.end - span.start
        return found

    def mean_logprob(self) -> float | None:
        """Return the mean log-probability of the sampled tokens, or None if it is unknown."""
        pairs = zip(self.tokens.logprobs or (), self.tokens.mask, strict=False)
        sampled = [value for value, mask in pairs if mask and math.isfinite(value)]
        return sum(sampled) / len(sampled) if sampled else None

    def weight_versions(self) -> list[str]:
        """Return the versions of the weights that sampled the tokens, in order."""
        versions = (span.weight_version for span in self.tokens.spans)
        return list(dict.fromkeys(version for version in versions if version is not None))

    def _find_row_starts(self, width: int) -> array[int]:
        starts, used, is_ended = array("l"), 0, True
        for token, token_id in enumerate(self.tokens.ids):
            _, cells, ends_row = self._cells[token_id]
            if is_ended or used + cells > width:
                starts.append(token)
                used = 0
            used += cells
            is_ended = ends_row
        return starts


def _token_cell(token_id: int, text_of: Callable[[int], str] | None) -> _TokenCell:
    raw = f"{token_id} " if text_of is None else text_of(token_id)
    text = sanitize(raw).replace("\n", "⏎") or "∅"
    return _TokenCell(text, cell_len(text), raw.endswith("\n"))


def probability_style(logprob: float | None) -> str:
    """Return the style of a sampled token. Unlikely tokens stand out."""
    if logprob is None or math.isnan(logprob):
        return "token.sampled"
    probability = math.exp(min(logprob, 0.0))
    return next(style for minimum, style in PROBABILITY_STYLES.items() if probability >= minimum)
