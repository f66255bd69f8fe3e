"""SamplePane: one sample, in one of its displays."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.strip import Strip
from textual.widget import Widget

from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.records.summary import Bad
from toolroll.viewer import figures
from toolroll.viewer.conversation import conversation
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.document_view import DocumentView
from toolroll.viewer.fields import fields
from toolroll.viewer.harmless import harmless, one_line
from toolroll.viewer.listing import Place
from toolroll.viewer.needle import Needle
from toolroll.viewer.palette import palette
from toolroll.viewer.rewards import rewards
from toolroll.viewer.row import Piece, finish_style, score_style
from toolroll.viewer.token_text import TokenText
from toolroll.viewer.token_view import TokenView

CONVERSATION, PLAIN, TABLE, TOKENS, REWARDS = "conversation", "plain", "table", "tokens", "rewards"
DISPLAYS = (CONVERSATION, PLAIN, TABLE, TOKENS, REWARDS)
SWITCHED = (CONVERSATION, PLAIN, TABLE)
"""Those that the key s goes through."""
SEARCHED = SWITCHED
"""Those in which matches can be marked."""
FIELDS = (PLAIN, TABLE)
"""Those that show the line's fields as they were written."""
MOST_RAW = 20_000
"""Characters that are shown of a line that can't be read."""


class SampleBar(Widget):
    """The displays to choose from, and what the sample is."""

    DEFAULT_CSS = "SampleBar { height: 1; background: $panel; }"

    def __init__(self) -> None:
        super().__init__()
        self.display_name = CONVERSATION
        self.facts: list[Piece] = []

    def render_line(self, y: int) -> Strip:
        """The line."""
        styles, width = palette(self.app.theme_variables), self.size.width
        segments = [Segment(" ")]
        for name in DISPLAYS:
            click = Style.from_meta({"@click": f"screen.show_display({name!r})"})
            chosen = name == self.display_name
            segments += [Segment(name, (styles["key"] if chosen else styles["dim"]) + click), Segment("  ")]
        facts = [*self.facts, (" ", "")]
        used = sum(segment.cell_length for segment in segments)
        while facts and used + sum(cell_len(text) for text, _ in facts) > width:
            facts.pop(0)
        room = width - used - sum(cell_len(text) for text, _ in facts)
        segments += [Segment(" " * room), *(Segment(text, styles[name]) for text, name in facts)]
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)


class SamplePane(Vertical):
    """The sample and its bar."""

    DEFAULT_CSS = """
    SamplePane > DocumentView, SamplePane > TokenView { height: 1fr; }
    SamplePane > TokenView { display: none; }
    SamplePane.-tokens > TokenView { display: block; }
    SamplePane.-tokens > DocumentView { display: none; }
    """

    def __init__(self, tokenizer: TokenText | None, mask: re.Pattern[str] | None) -> None:
        super().__init__(id="sample")
        self.place: Place | None = None
        self.record: Record | None = None
        self.hidden_fields: Collection[str] = frozenset()
        """Which fields plain text and table don't show."""
        self.nothing = ""
        """What is said where there is no sample."""
        self._display = CONVERSATION
        self._clean = partial(harmless, mask=mask)
        self._bar = SampleBar()
        self._document = DocumentView(id="document")
        self._tokens = TokenView(tokenizer)

    def compose(self) -> ComposeResult:
        """The bar above, the display below."""
        yield self._bar
        yield self._document
        yield self._tokens

    @property
    def display_name(self) -> str:
        """In which of the displays it is."""
        return self._display

    @property
    def document(self) -> DocumentView:
        """What shows everything but tokens."""
        return self._document

    @property
    def content(self) -> DocumentView | TokenView:
        """What scrolls."""
        return self._tokens if self._display == TOKENS else self._document

    def show(self, place: Place | None, needle: Needle | None = None) -> None:
        """Read a sample and show it."""
        self.place, self.record = place, None
        problem: Document | None = None
        if place is not None:
            try:
                self.record = place.step.record(place.row)
            except (BadLine, IndexError) as error:
                problem = _unreadable(place, str(error) or "It is gone.")
        self._show(problem, needle)

    def forget(self) -> None:
        """What is on the disk is another: whatever is shown next is read anew."""
        self.place = None

    def set_display(self, name: str, needle: Needle | None = None) -> None:
        """Show the sample otherwise."""
        had_focus = self.content.has_focus
        self._display = name
        self.set_class(name == TOKENS, "-tokens")
        if had_focus:
            self.content.focus()
        self.show(self.place, needle)

    def switch_tokens(self) -> None:
        """Another form of the token view."""
        self._tokens.switch()

    def searched(self, record: Record) -> Document:
        """What a search looks through in a sample: what the present display shows of it. For any thread."""
        if self._display in FIELDS:
            return fields(record, self.hidden_fields, self._clean)
        return conversation(record, self._clean)

    def _show(self, problem: Document | None, needle: Needle | None) -> None:
        self._bar.display_name = self._display
        self._bar.facts = self._facts()
        self._bar.refresh()
        record = self.record
        if self._display == TOKENS:
            self._show_tokens(record, problem)
            return
        if problem is not None:
            document = problem
        elif record is None:
            title, _, text = self.nothing.partition("\n")
            document = Document([Block(Kind.NOTE, title, text)])
        elif self._display == REWARDS:
            document = rewards(record, self._clean)
        else:
            document = self.searched(record)
        self._document.show(document, as_table=self._display == TABLE, needle=needle)

    def _show_tokens(self, record: Record | None, problem: Document | None) -> None:
        if problem is not None:
            self._tokens.show((), f"This line can't be read: {problem.blocks[0].text}")
            return
        try:
            tokens = record.tokens if record is not None else None
            earlier = record.earlier if record is not None else []
        except BadLine as error:
            self._tokens.show((), str(error))
            return
        if tokens is None:
            who = "This sample was written without its tokens."
            self._tokens.show((), who if record is not None else self.nothing.partition("\n")[0])
            return
        self._tokens.show((*earlier, tokens))

    def _facts(self) -> list[Piece]:
        if self.place is None:
            return []
        step, row = self.place
        pieces: list[Piece] = [(f"step {one_line(step.name, 20)} · ", "dim"), (f"sample {row + 1}", "")]
        try:
            summary = step.summary(row)
        except IndexError:
            return pieces
        if isinstance(summary, Bad):
            return [*pieces, (" · unreadable", "bad")]
        pieces += [(" · score ", "dim"), (figures.score(summary.score), score_style(summary.score))]
        if summary.finish_reason:
            reason = one_line(summary.finish_reason, 20)
            pieces += [(" · ", "dim"), (reason, finish_style(summary.finish_reason))]
        return pieces


def _unreadable(place: Place, said: str) -> Document:
    """A line that can't be read, shown for what it is."""
    raw = _raw(place.step, place.row)
    cut = raw[:MOST_RAW].decode("utf-8", "backslashreplace")
    blocks = [Block(Kind.FAULT, "this line can't be read", harmless(said), _where(place))]
    if raw:
        shown = f"its first {MOST_RAW:,} bytes" if len(raw) > MOST_RAW else "the line"
        blocks.append(replace(Block(Kind.FIELD, shown, harmless(cut)), detail=figures.size(len(raw))))
    return Document(blocks)


def _where(place: Place) -> str:
    try:
        summary = place.step.summary(place.row)
    except IndexError:
        return ""
    return one_line(f"{Path(summary.path).name}, line {summary.number}") if isinstance(summary, Bad) else ""


def _raw(step: StepFile, row: int) -> bytes:
    try:
        return step.raw(row)
    except (BadLine, IndexError):
        return b""
