"""TokenView: the tokens of a sample, coloured by mask and log-probability. As text, or one token per line.

Rows are drawn when they are seen. With a tokenizer the texts of the distinct ids are found first, in a thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, isfinite
from typing import ClassVar

from rich.segment import Segment
from textual import events, work
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.worker import get_current_worker

from toolroll.errors import ConfigError
from toolroll.records.packed import Tokens
from toolroll.viewer import figures
from toolroll.viewer.document_view import SCROLLING
from toolroll.viewer.harmless import one_line
from toolroll.viewer.palette import Palette, palette
from toolroll.viewer.row import Piece
from toolroll.viewer.rows_view import fitted
from toolroll.viewer.token_flow import TokenFlow, counts, mean_logprob, versions
from toolroll.viewer.token_text import TokenText

HEAD = 3
"""Lines above the tokens: what they are, and what the colours mean."""
NUMBERS = 8
"""The width of the column of numbers."""


class TokenView(ScrollView, can_focus=True, inherit_bindings=False):
    """The tokens."""

    BINDINGS: ClassVar[list[BindingType]] = SCROLLING
    DEFAULT_CSS = "TokenView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    class _Decoded(Message):
        """The texts of these sequences were found."""

        def __init__(self, sequences: Sequence[Tokens]) -> None:
            super().__init__()
            self.sequences = sequences

    def __init__(self, text_of: TokenText | None = None) -> None:
        super().__init__(id="tokens")
        self.one_per_line = False
        self._text_of = text_of
        self._sequences: Sequence[Tokens] = ()
        self._flows: list[TokenFlow] = []
        self._starts: list[int] = []
        self._width = 0
        self._said = ""
        self._problem = ""
        self._palette: Palette | None = None

    def show(self, sequences: Sequence[Tokens], said: str = "") -> None:
        """Show the sequences of a sample, the earlier ones first; or say why there are none."""
        self._sequences, self._said = sequences, said
        self._flows = []
        self.scroll_to(0, 0, animate=False)
        if self._text_of is not None and not self._problem and sequences:
            self._said = "finding the texts of the tokens …"
            self._decode(self._text_of, sequences)
        self._lay_out()

    def switch(self) -> None:
        """From text to one token per line, and back."""
        self.one_per_line = not self.one_per_line
        self.scroll_to(0, 0, animate=False)
        self._place()

    @work(thread=True, exclusive=True, group="token texts")
    def _decode(self, text_of: TokenText, sequences: Sequence[Tokens]) -> None:
        worker = get_current_worker()
        try:
            if not text_of.is_loaded:
                text_of.load()
            for tokens in sequences:
                for number in set(tokens.ids):
                    if worker.is_cancelled:
                        return
                    text_of(number)
        except ConfigError as error:
            self._problem = str(error)
        self.post_message(self._Decoded(sequences))

    def on_token_view__decoded(self, event: _Decoded) -> None:
        """The texts are there."""
        if event.sequences is self._sequences:
            self._said = ""
            self._flows = []
            self._lay_out()

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width or 80
        if self._said:
            self._flows = []
        elif not self._flows or self._width != width:
            text_of = self._text_of if self._text_of is not None and self._text_of.is_loaded else None
            self._flows = [TokenFlow(tokens, width - NUMBERS - 1, text_of) for tokens in self._sequences]
            self._width = width
        self._place()

    def _place(self) -> None:
        """Where each sequence begins: after a line that says so, where there are several."""
        self._starts, line = [], 0
        for flow in self._flows:
            self._starts.append(line)
            line += self._titles + (len(flow.tokens.ids) if self.one_per_line else len(flow))
        self.virtual_size = Size(self.size.width, HEAD + line)
        self.refresh()

    @property
    def _titles(self) -> int:
        """Lines above each sequence that say which it is."""
        return int(len(self._flows) > 1)

    def on_resize(self, event: events.Resize) -> None:
        """Lay them out anew where the width is another."""
        if self._width != self.scrollable_content_region.width:
            self._lay_out()

    def notify_style_update(self) -> None:
        """Another theme has other colours."""
        super().notify_style_update()
        self._palette = None

    # Drawing

    def render_line(self, y: int) -> Strip:
        """One line, as it is on the screen."""
        if self._palette is None:
            self._palette = palette(self.app.theme_variables)
        styles, base, width = self._palette, self.rich_style, self.scrollable_content_region.width
        pieces = self._pieces(y)
        strip = Strip([Segment(text, styles[name]) for text, name in pieces]).crop(0, width)
        return strip.adjust_cell_length(width, base).apply_style(base)

    def _pieces(self, y: int) -> list[Piece]:
        if not self._flows:
            return [(f" {self._said}", "note")] if y == 1 else []
        line = self.scroll_offset.y + max(0, y - HEAD)
        number = bisect_right(self._starts, line) - 1
        flow, row = self._flows[number], line - self._starts[number] - self._titles
        if y < HEAD:
            return self._head(flow)[y]
        if row < 0:
            return [(f" sequence {number + 1} of {len(self._flows)}", "note")]
        if self.one_per_line:
            return self._token(flow, row) if row < len(flow.tokens.ids) else []
        if row >= len(flow):
            return []
        shown = ((token.text, token.style) for token in flow.row(row))
        return [(f"{flow.first(row):>{NUMBERS - 1}} ", "dim"), *shown]

    def _head(self, flow: TokenFlow) -> tuple[list[Piece], list[Piece], list[Piece]]:
        """What stands above the tokens, however far one scrolls."""
        tokens, whose = flow.tokens, counts(flow.tokens)
        said = [
            figures.plural(len(tokens.ids), "token"),
            f"{whose['prompt']:,} prompt",
            f"{whose['model']:,} sampled",
            f"{whose['tool']:,} tools'",
        ]
        mean = mean_logprob(tokens)
        said.append("no log-probs" if mean is None else f"mean log-prob {mean:.3f}")
        legend: list[Piece] = [
            (" mask 0: ", "dim"),
            ("prompt", "token.prompt"),
            (" ", ""),
            ("tool", "token.tool"),
            ("  mask 1: ", "dim"),
        ]
        if tokens.logprobs is None:
            legend.append(("sampled", "token.sampled"))
        else:
            legend += [
                ("p ≥ 0.9", "token.p90"),
                (" ", ""),
                ("≥ 0.5", "token.p50"),
                (" ", ""),
                ("≥ 0.1", "token.p10"),
                (" ", ""),
                ("≥ 0.01", "token.p01"),
                (" ", ""),
                ("less", "token.p00"),
            ]
        if weights := versions(tokens.spans):
            legend.append((f"  weights {one_line(' → '.join(weights), 40)}", "dim"))
        return [(f" {' · '.join(said)}", "")], legend, self._remark()

    def _remark(self) -> list[Piece]:
        if self.one_per_line:
            title = f"{'#':>{NUMBERS - 1}}  {'id':>7}  {'text':<20} mask  {'who':<7}turn  {'log-prob':>8}  probability"
            return [(fitted(title, self.scrollable_content_region.width), "header")]
        if self._problem:
            return [(f" {self._problem}", "bad")]
        if self._text_of is None:
            return [(" ids; with --tokenizer PATH their texts · t: one per line", "note")]
        return [(" t: one per line", "note")]

    def _token(self, flow: TokenFlow, token: int) -> list[Piece]:
        tokens, span, shown = flow.tokens, flow.span(token), flow.shown(token)
        mask = tokens.mask[token]
        text = fitted(shown.text.rstrip(" ") if self._text_of is None else shown.text, 20)
        pieces: list[Piece] = [
            (f"{token:>{NUMBERS - 1}}  {tokens.ids[token]:>7}  ", "dim"),
            (text, shown.style),
            (f"  {mask}    ", "good" if mask else "dim"),
            (f"{span.author.value if span else '':<7}", ""),
            (f"{span.turn + 1 if span else '':>4}  ", "dim"),
        ]
        if mask and tokens.logprobs is not None:
            value = tokens.logprobs[token]
            chance = min(1.0, exp(value)) if isfinite(value) else 0.0
            pieces += [(f"{value:>8.3f}  ", ""), ("━" * max(1, round(chance * 10)), shown.style)]
        return pieces
