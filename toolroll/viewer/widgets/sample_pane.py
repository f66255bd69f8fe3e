"""Pane that shows one sample in one of several displays."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.strip import Strip
from textual.widget import Widget

from toolroll._internal.sanitize import one_line, sanitize
from toolroll.records.json_line import BadLine
from toolroll.records.packed_tokens import PackedTokens
from toolroll.records.record import Record
from toolroll.records.summary import UnreadableLine
from toolroll.viewer import formatting
from toolroll.viewer.documents.conversation import conversation
from toolroll.viewer.documents.document import Block, BlockKind, Document, TextQuery
from toolroll.viewer.documents.fields import fields_document, rewards_document
from toolroll.viewer.documents.token_flow import TokenText
from toolroll.viewer.palette import Piece, draw
from toolroll.viewer.query.scan import SamplePosition
from toolroll.viewer.widgets.document_view import DocumentView
from toolroll.viewer.widgets.lists import finish_style, score_style
from toolroll.viewer.widgets.token_view import TokenView

MAX_RAW_BYTES = 20_000
"""Number of bytes shown of a line that cannot be read."""


class Display(StrEnum):
    """A way to show a sample."""

    CONVERSATION = "conversation"
    PLAIN = "plain"
    TABLE = "table"
    TOKENS = "tokens"
    REWARDS = "rewards"

    @property
    def shows_fields(self) -> bool:
        """True if the fields are shown as they were written."""
        return self in (Display.PLAIN, Display.TABLE)


class SampleBar(Widget):
    """Line with the displays to choose from and the main values of the sample."""

    DEFAULT_CSS = "SampleBar { height: 1; background: $panel; }"

    def __init__(self, pane: SamplePane) -> None:
        super().__init__()
        self._pane = pane

    def render_line(self, y: int) -> Strip:
        """Return the line. Values that do not fit are omitted from the left."""
        displays: list[Piece] = [(" ", "")]
        for display in Display:
            style = "key" if display is self._pane.current_display else "dim"
            displays += [(display, style, f"screen.show_display({display.value!r})"), ("  ", "")]
        facts = [*self._pane.facts(), (" ", "")]
        free = self.size.width - _width(displays)
        while facts and _width(facts) > free:
            facts.pop(0)
        return draw(self, [*displays, (" " * (free - _width(facts)), ""), *facts])


def _width(pieces: Iterable[Piece]) -> int:
    return sum(cell_len(piece[0]) for piece in pieces)


class SamplePane(Vertical):
    """The current sample in the current display.

    Args:
        tokenizer: Decoder of tokens.
        mask: Pattern of text that is displayed as `*`.
    """

    DEFAULT_CSS = """
    SamplePane > TokenView { display: none; }
    SamplePane.-tokens > TokenView { display: block; }
    SamplePane.-tokens > DocumentView { display: none; }
    """

    def __init__(self, tokenizer: TokenText | None, mask: re.Pattern[str] | None) -> None:
        super().__init__(id="sample")
        self.position: SamplePosition | None = None
        self.record: Record | None = None
        """The sample; None if there is none or if its line cannot be read."""
        self.hidden_fields: Collection[str] = frozenset()
        """Names of the fields that the plain and table displays omit."""
        self.current_display = Display.CONVERSATION
        self.document = DocumentView(id="document")
        """View of all displays except tokens."""
        self.tokens = TokenView(tokenizer)
        self._bar = SampleBar(self)
        self._query: TextQuery | None = None
        self._message = ""
        """Text to show instead of a record: why the line cannot be read, or why there is no sample."""
        self._clean = partial(sanitize, mask=mask)

    def compose(self) -> ComposeResult:
        """Compose the bar and the views."""
        yield self._bar
        yield self.document
        yield self.tokens

    @property
    def content(self) -> DocumentView | TokenView:
        """The visible view."""
        return self.tokens if self.current_display is Display.TOKENS else self.document

    def show(self, position: SamplePosition) -> None:
        """Read and show a sample."""
        self.position, self.record = position, None
        try:
            self.record = position.step.record(position.row)
        except (BadLine, IndexError) as error:
            self._message = str(error) or "The line no longer exists."
        self._update()

    def show_placeholder(self, text: str) -> None:
        """Show a text because there is no sample. Its first line is the title."""
        self.position, self.record, self._message = None, None, text
        self._update()

    def mark(self, query: TextQuery | None) -> None:
        """Mark the matches of a query in this and later samples, or remove the marks."""
        self._query = query
        self.document.mark(query)

    def set_display(self, display: Display) -> None:
        """Show the sample in another display."""
        had_focus = self.content.has_focus
        self.current_display = display
        self.set_class(display is Display.TOKENS, "-tokens")
        if had_focus:
            self.content.focus()
        self._update()

    def searched_document(self, record: Record) -> Document:
        """Return the document that a search covers: the one shown in the current display. Thread-safe."""
        if self.current_display.shows_fields:
            return fields_document(record, self.hidden_fields, self._clean)
        return conversation(record, self._clean)

    def _update(self) -> None:
        self._bar.refresh()
        if self.current_display is Display.TOKENS:
            self.tokens.show(*self._token_sequences())
        else:
            as_table = self.current_display is Display.TABLE
            self.document.show(self._make_document(), as_table=as_table, query=self._query)

    def _make_document(self) -> Document:
        if self.record is not None:
            if self.current_display is Display.REWARDS:
                return rewards_document(self.record, self._clean)
            return self.searched_document(self.record)
        if self.position is not None:
            return _unreadable_document(self.position, self._message)
        title, _, text = self._message.partition("\n")
        return Document([Block(BlockKind.NOTE, title, text)])

    def _token_sequences(self) -> tuple[Sequence[PackedTokens], str]:
        """Return the token sequences of the sample, and the text to show if there are none."""
        if self.record is None:
            title = self._message.partition("\n")[0]
            return (), title if self.position is None else f"Unreadable line: {sanitize(self._message)}"
        try:
            tokens, earlier = self.record.tokens, self.record.earlier
        except BadLine as error:
            return (), str(error)
        return ((), "This sample was recorded without tokens.") if tokens is None else ((*earlier, tokens), "")

    def facts(self) -> list[Piece]:
        """Return the position and the main values of the sample."""
        if self.position is None:
            return []
        step, row = self.position
        pieces: list[Piece] = [(f"step {one_line(step.name, 20)} · ", "dim"), (f"sample {row + 1}", "")]
        if self.record is None:
            return [*pieces, (" · unreadable", "bad")]
        score, reason = self.record.score, self.record.finish_reason
        pieces += [(" · score ", "dim"), (formatting.score(score), score_style(score))]
        if reason:
            pieces += [(" · ", "dim"), (one_line(reason, 20), finish_style(reason))]
        return pieces


def _unreadable_document(position: SamplePosition, problem: str) -> Document:
    """Return the error and the raw line."""
    step, row = position
    raw, source = b"", ""
    with suppress(BadLine, IndexError):
        summary = step.summary(row)
        if isinstance(summary, UnreadableLine):
            source = one_line(f"{Path(summary.path).name}, line {summary.number}")
        raw = step.raw(row)
    blocks = [Block(BlockKind.FAULT, "unreadable line", sanitize(problem), source)]
    if raw:
        title = f"first {MAX_RAW_BYTES:,} bytes" if len(raw) > MAX_RAW_BYTES else "line"
        text = sanitize(raw[:MAX_RAW_BYTES].decode("utf-8", "backslashreplace"))
        blocks.append(Block(BlockKind.FIELD, title, text, formatting.size(len(raw))))
    return Document(blocks)
