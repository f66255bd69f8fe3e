"""DocumentView: a document on the screen. Only the lines that are seen are drawn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import groupby, islice
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from toolroll.viewer import figures
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.highlight import Run, runs
from toolroll.viewer.layout import GUTTER, Cell, Layout, Line, Part
from toolroll.viewer.needle import Needle
from toolroll.viewer.palette import Palette, palette

Match = tuple[int, int, int]
"""Block, from, to."""

SCROLLING: list[BindingType] = [
    Binding("up", "scroll_up", show=False),
    Binding("down", "scroll_down", show=False),
    Binding("pageup", "page_up", show=False),
    Binding("pagedown", "page_down", show=False),
    Binding("home", "scroll_home", show=False),
    Binding("end", "scroll_end", show=False),
]
"""Without ← and →, which go from pane to pane."""


class DocumentView(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows a document, its folds, and where the needle is."""

    BINDINGS: ClassVar[list[BindingType]] = SCROLLING
    DEFAULT_CSS = "DocumentView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (textual's word)
        super().__init__(id=id)
        self._document = Document()
        self._as_table = False
        self._turned: set[int] = set()
        self._layout_made: Layout | None = None
        self._runs: dict[int, list[Run]] = {}
        self._matches: list[Match] = []
        self._current: int | None = None
        self._palette: Palette | None = None

    # What is shown

    def show(self, document: Document, *, as_table: bool = False, needle: Needle | None = None) -> None:
        """Show a document from its beginning."""
        self._document, self._as_table = document, as_table
        self._turned, self._runs, self._current = set(), {}, None
        self._matches = list(document.matches(needle)) if needle else []
        self._lay_out()
        self.scroll_to(0, 0, animate=False)

    def mark(self, needle: Needle | None) -> None:
        """Show where another needle is, or none."""
        self._matches = list(self._document.matches(needle)) if needle else []
        self._current = None
        self.refresh()

    @property
    def document(self) -> Document:
        """What is shown."""
        return self._document

    @property
    def matches(self) -> int:
        """How many there are."""
        return len(self._matches)

    @property
    def current_match(self) -> int | None:
        """Which of them was gone to."""
        return self._current

    def go_to_match(self, number: int) -> None:
        """Bring a match into view, out of a fold if need be."""
        if not 0 <= number < len(self._matches):
            return
        self._current = number
        block, start, _ = self._matches[number]
        if self._made.line_of(block, start) is None:
            self._turned ^= {block}
            self._lay_out()
        line = self._made.line_of(block, start) or 0
        above = self.size.height // 3
        self.scroll_to(0, max(0, line - above), animate=False)
        self.refresh()

    def fold_all(self) -> bool:
        """Unfold everything, or fold it again where everything is. Whether there is anything to fold."""
        foldable = self._made.foldable
        self._turned = set() if foldable <= self._turned else set(foldable)
        self._lay_out()
        return bool(foldable)

    # Where it is shown

    @property
    def _made(self) -> Layout:
        if self._layout_made is None:
            self._lay_out()
        assert self._layout_made is not None
        return self._layout_made

    def _lay_out(self) -> None:
        top = self._top()
        width = self.scrollable_content_region.width or self.size.width or 80
        self._layout_made = Layout(self._document, width, turned=self._turned, as_table=self._as_table)
        self.virtual_size = Size(width, len(self._layout_made.lines))
        if top is not None and (line := self._layout_made.line_of(*top)) is not None:
            self.scroll_to(0, line, animate=False)
        self.refresh()

    def _top(self) -> tuple[int, int] | None:
        """The character at the top, which shall stay there. None at the very beginning."""
        made, line = self._layout_made, self.scroll_offset.y
        if made is None or made.document is not self._document or not line:
            return None
        for found in made.lines[line:]:
            if found.left is not None and found.left.part is Part.BODY:
                return found.left.block, found.left.start
        return None

    def on_resize(self, event: events.Resize) -> None:
        """Lay it out anew where the width is another."""
        if self._layout_made is None or self.scrollable_content_region.width != self._layout_made.width:
            self._lay_out()

    def on_click(self, event: events.Click) -> None:
        """A click on a title or on a rest folds or unfolds it."""
        number = self.scroll_offset.y + event.y
        if not 0 <= number < len(self._made.lines):
            return
        line = self._made.lines[number]
        cell = line.right if line.paired and event.x > self._made.split else line.left
        if cell is not None and cell.part in (Part.TITLE, Part.MORE) and self._made.is_foldable(cell.block):
            self._turned ^= {cell.block}
            self._lay_out()

    def notify_style_update(self) -> None:
        """Another theme has other colours."""
        super().notify_style_update()
        self._palette = None

    # How it is drawn

    def render_line(self, y: int) -> Strip:
        """One line, as it is on the screen."""
        number = self.scroll_offset.y + y
        width, base = self.size.width, self.rich_style
        if number >= len(self._made.lines):
            return Strip.blank(width, base)
        segments = self._line(self._made.lines[number])
        strip = Strip(segments).adjust_cell_length(width, base).apply_style(base)
        if (selection := self.text_selection) is not None and (span := selection.get_span(number)) is not None:
            strip = _selected(strip, span, self.selection_style)
        return strip.apply_offsets(0, number)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text that was selected with the mouse."""
        first = selection.start.y if selection.start else 0
        last = selection.end.y if selection.end else len(self._made.lines) - 1
        texts = []
        for number in range(first, min(last, len(self._made.lines) - 1) + 1):
            text = "".join(segment.text for segment in self._line(self._made.lines[number]))
            start, end = selection.get_span(number) or (0, -1)
            if not self._made.lines[number].paired:  # the bar at the left is no text
                start = max(start, GUTTER)
            texts.append((text[start:] if end < 0 else text[start:end]).rstrip())
        return "\n".join(texts), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw it."""
        self.refresh()

    def _line(self, line: Line) -> list[Segment]:
        made = self._made
        if not line.paired:
            return self._cell(line.left, made.width)
        if made.as_table:
            return self._table_line(line)
        left = _padded(self._cell(line.left, made.split), made.split)
        return [*left, Segment(" "), *self._cell(line.right, made.right_width)]

    def _table_line(self, line: Line) -> list[Segment]:
        made, styles = self._made, self._styles
        if line.left is None and line.right is None:
            return [Segment("─" * made.split + "┼" + "─" * made.right_width, styles["rule"])]
        name = made.document.blocks[line.left.block].title if line.left else ""
        cells = [Segment(set_cell_size(name, made.split), styles["field"]), Segment("│ ", styles["rule"])]
        if line.right is not None:
            cells += self._text(line.right)
        return cells

    def _cell(self, cell: Cell | None, width: int) -> list[Segment]:
        if cell is None:
            return []
        block = self._document.blocks[cell.block]
        if cell.part is Part.TITLE:
            return self._title(cell.block, block, width)
        bar = Segment("▎ ", self._styles[block.kind] if block.kind is not Kind.FIELD else self._styles["rule"])
        return [bar, *self._text(cell)]

    def _title(self, number: int, block: Block, width: int) -> list[Segment]:
        styles = self._styles
        arrow = ("▾ " if self._made.is_open(number) else "▸ ") if self._made.is_foldable(number) else "▎ "
        title = block.title if cell_len(block.title) <= width - GUTTER else set_cell_size(block.title, width - GUTTER)
        segments = [Segment(arrow, styles[block.kind]), Segment(title, styles[block.kind])]
        room = width - GUTTER - cell_len(title) - 1
        if block.detail and cell_len(block.detail) + 2 <= room:
            segments.append(Segment("  " + block.detail, styles["dim"]))
        return segments

    def _text(self, cell: Cell) -> list[Segment]:
        block, styles = self._document.blocks[cell.block], self._styles
        if cell.part is Part.MORE:
            more = figures.plural(cell.end - cell.start, "more character", "more characters")
            return [Segment(f"▸ {more}: z, or a click, shows them", styles["note"])]
        if cell.part is Part.DETAIL:
            return [Segment(block.detail[cell.start : cell.end], styles["dim"])]
        base = styles[f"text.{block.kind}"]
        layers = [*self._run_layers(cell), *self._match_layers(cell)]
        text = block.text[cell.start : cell.end]
        return [Segment(text[start:end], base + style) for start, end, style in _pieces(len(text), layers)]

    def _run_layers(self, cell: Cell) -> Iterable[tuple[int, int, Style]]:
        """What is code in a line."""
        found = self._runs_of(cell.block)
        first = max(0, bisect_right(found, cell.start, key=lambda run: run[0]) - 1)
        for start, end, name in islice(found, first, None):
            if start >= cell.end:
                return
            if end > cell.start:
                yield max(start, cell.start) - cell.start, min(end, cell.end) - cell.start, self._styles[name]

    def _match_layers(self, cell: Cell) -> Iterable[tuple[int, int, Style]]:
        """What was searched for in a line."""
        first = bisect_left(self._matches, (cell.block, cell.start, 0))
        if first and self._matches[first - 1][0] == cell.block:
            first -= 1  # it may reach over from the line before
        for number, (block, start, end) in enumerate(islice(self._matches, first, None), first):
            if block != cell.block or start >= cell.end:
                return
            if end > cell.start:
                style = self._styles["match.current" if number == self._current else "match"]
                yield max(start, cell.start) - cell.start, min(end, cell.end) - cell.start, style

    def _runs_of(self, number: int) -> list[Run]:
        if number not in self._runs:
            block = self._document.blocks[number]
            self._runs[number] = runs(block.text, block.language)
        return self._runs[number]

    @property
    def _styles(self) -> Palette:
        if self._palette is None:
            self._palette = palette(self.app.theme_variables)
        return self._palette


def _pieces(length: int, layers: Iterable[tuple[int, int, Style]]) -> Iterable[tuple[int, int, Style]]:
    """A line in pieces of one style each. Of two layers over each other, the later one is seen."""
    styles = [Style.null()] * length
    for start, end, style in layers:
        styles[start:end] = [style] * (end - start)
    place = 0
    for style, some in groupby(styles):
        end = place + sum(1 for _ in some)
        yield place, end, style
        place = end


def _padded(segments: list[Segment], width: int) -> list[Segment]:
    room = width - sum(segment.cell_length for segment in segments)
    return [*segments, Segment(" " * room)] if room > 0 else segments


def _selected(strip: Strip, span: tuple[int, int], style: Style) -> Strip:
    start, end = span
    end = strip.cell_length if end < 0 else min(end, strip.cell_length)
    if start >= end:
        return strip
    before, inside, after = strip.divide([start, end, strip.cell_length])
    marked = Strip(Segment(segment.text, (segment.style or Style.null()) + style) for segment in inside)
    return Strip.join([before, marked, after])
