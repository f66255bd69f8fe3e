"""Display of the tokens of a sample, coloured by mask and log-probability, as text or one token per line.

Only visible rows are drawn. With a tokenizer, a thread first decodes all distinct token IDs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, isfinite
from typing import ClassVar

from textual import events, work
from textual.binding import BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.worker import get_current_worker

from toolroll._internal.sanitize import one_line
from toolroll.errors import ConfigError
from toolroll.records.packed_tokens import PackedTokens
from toolroll.viewer import formatting
from toolroll.viewer.documents.token_flow import PROBABILITY_STYLES, TokenFlow, TokenText
from toolroll.viewer.palette import Piece, draw
from toolroll.viewer.widgets.document_view import SCROLL_BINDINGS

HEADER_LINES = 3
"""Number of lines above the tokens, which do not scroll."""
NUMBER_CELLS = 8
"""Width of the column with token numbers."""


class TokenView(ScrollView, can_focus=True, inherit_bindings=False):
    """Scrollable display of token sequences.

    Args:
        text_of: Decoder; without one, token IDs are shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = SCROLL_BINDINGS
    DEFAULT_CSS = "TokenView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    def __init__(self, text_of: TokenText | None = None) -> None:
        super().__init__(id="tokens")
        self._one_per_line = False
        self._text_of = text_of
        self._sequences: Sequence[PackedTokens] = ()
        self._flows: list[TokenFlow] = []
        self._starts: list[int] = []
        """First line of each sequence."""
        self._width = 0
        self._message = ""
        self._tokenizer_error = ""

    def show(self, sequences: Sequence[PackedTokens], message: str = "") -> None:
        """Show the sequences of a sample.

        Args:
            sequences: Sequences in chronological order.
            message: Text to show instead of tokens.
        """
        self._sequences, self._message = sequences, message
        self.scroll_to(0, 0, animate=False)
        if self._text_of is not None and not self._tokenizer_error and sequences:
            self._message = "Decoding tokens …"
            self._decode(self._text_of, sequences)
        self._lay_out()

    def toggle_one_per_line(self) -> None:
        """Switch between text and one token per line."""
        self._one_per_line = not self._one_per_line
        self.scroll_to(0, 0, animate=False)
        self._update_starts()

    @work(thread=True, exclusive=True, group="decode")
    def _decode(self, text_of: TokenText, sequences: Sequence[PackedTokens]) -> None:
        worker = get_current_worker()
        try:
            if not text_of.is_loaded:
                text_of.load()
            for token_id in set[int]().union(*(tokens.ids for tokens in sequences)):
                if worker.is_cancelled:
                    return
                text_of(token_id)
        except ConfigError as error:
            self._tokenizer_error = str(error)
        self.call_later(self._show_decoded, sequences)  # in the thread of the app

    def _show_decoded(self, sequences: Sequence[PackedTokens]) -> None:
        if sequences is self._sequences:
            self._message = ""
            self._lay_out()

    def _lay_out(self) -> None:
        self._width = self.scrollable_content_region.width or 80
        text_of = self._text_of if self._text_of is not None and self._text_of.is_loaded else None
        sequences = () if self._message else self._sequences
        self._flows = [TokenFlow(tokens, self._width - NUMBER_CELLS - 1, text_of) for tokens in sequences]
        self._update_starts()

    def _update_starts(self) -> None:
        self._starts, line = [], 0
        for flow in self._flows:
            self._starts.append(line)
            line += self._title_lines + (len(flow.tokens.ids) if self._one_per_line else len(flow))
        self.virtual_size = Size(self.size.width, HEADER_LINES + line)
        self.refresh()

    @property
    def _title_lines(self) -> int:
        """Number of title lines above each sequence: one if there are several sequences."""
        return int(len(self._flows) > 1)

    def on_resize(self, event: events.Resize) -> None:
        """Update the layout if the width has changed."""
        if self._width != self.scrollable_content_region.width:
            self._lay_out()

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        return draw(self, self._line(y), width=self.scrollable_content_region.width)

    def _line(self, y: int) -> Sequence[Piece]:
        if not self._flows:
            return [(f" {self._message}", "note")] if y == 1 else []
        line = self.scroll_offset.y + max(0, y - HEADER_LINES)
        number = bisect_right(self._starts, line) - 1
        flow, row = self._flows[number], line - self._starts[number] - self._title_lines
        if y < HEADER_LINES:
            return (self._counts, self._legend, self._remark)[y](flow)
        if row < 0:
            return [(f" sequence {number + 1} of {len(self._flows)}", "note")]
        if self._one_per_line:
            return self._token(flow, row) if row < len(flow.tokens.ids) else []
        if row >= len(flow):
            return []
        shown = flow.row(row)
        return [(f"{shown[0].number:>{NUMBER_CELLS - 1}} ", "dim"), *((token.text, token.style) for token in shown)]

    def _counts(self, flow: TokenFlow) -> Sequence[Piece]:
        counts, mean = flow.count_by_author(), flow.mean_logprob()
        total = formatting.plural(len(flow.tokens.ids), "token")
        by_author = f"{counts['prompt']:,} prompt · {counts['model']:,} sampled · {counts['tool']:,} tool"
        logprob = "no log-probs" if mean is None else f"mean log-prob {mean:.3f}"
        return [(f" {total} · {by_author} · {logprob}", "")]

    def _legend(self, flow: TokenFlow) -> Sequence[Piece]:
        unsampled: list[Piece] = [("prompt", "token.prompt"), (" ", ""), ("tool", "token.tool")]
        sampled: list[Piece] = [("sampled", "token.sampled")]
        if flow.tokens.logprobs is not None:
            ranges = [(f" ≥ {minimum:g} ", style) for minimum, style in PROBABILITY_STYLES.items()]
            sampled = [("p", "dim"), *ranges]
        versions = one_line(" → ".join(flow.weight_versions()), 40)
        weights = f"  weights {versions}" if versions else ""
        return [(" mask 0: ", "dim"), *unsampled, ("  mask 1: ", "dim"), *sampled, (weights, "dim")]

    def _remark(self, _: TokenFlow) -> Sequence[Piece]:
        if self._one_per_line:
            number = f"{'#':>{NUMBER_CELLS - 1}}"
            title = f"{number}  {'id':>7}  {'text':<20} mask  {'author':<7}turn  {'log-prob':>8}  probability"
            return [(formatting.fit(title, self.scrollable_content_region.width), "header")]
        if self._tokenizer_error:
            return [(f" {self._tokenizer_error}", "bad")]
        if self._text_of is None:
            return [(" token IDs; use --tokenizer PATH to show text · t: one per line", "note")]
        return [(" t: one per line", "note")]

    def _token(self, flow: TokenFlow, token: int) -> Sequence[Piece]:
        tokens, span, shown = flow.tokens, flow.span(token), flow.shown(token)
        mask = tokens.mask[token]
        text = formatting.fit(shown.text.rstrip(" ") if self._text_of is None else shown.text, 20)
        pieces: list[Piece] = [
            (f"{token:>{NUMBER_CELLS - 1}}  {tokens.ids[token]:>7}  ", "dim"),
            (text, shown.style),
            (f"  {mask}    ", "good" if mask else "dim"),
            (f"{span.author.value if span else '':<7}", ""),
            (f"{span.turn if span else '':>4}  ", "dim"),
        ]
        if mask and tokens.logprobs is not None:
            logprob = tokens.logprobs[token]
            probability = min(1.0, exp(logprob)) if isfinite(logprob) else 0.0
            pieces += [(f"{logprob:>8.3f}  ", ""), ("━" * max(1, round(probability * 10)), shown.style)]
        return pieces
