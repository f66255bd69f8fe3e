"""Display of a document with folds and search matches. Only visible lines are drawn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from toolroll.viewer import formatting
from toolroll.viewer.documents.document import Block, BlockKind, Document, TextQuery
from toolroll.viewer.documents.highlight import StyledRange, highlight
from toolroll.viewer.documents.layout import GUTTER_CELLS, Layout, LayoutCell, LayoutLine, LinePart
from toolroll.viewer.palette import Palette, palette

_SCROLL_KEYS = {"up", "down", "pageup", "pagedown", "home", "end"}
SCROLL_BINDINGS: list[BindingType] = [
    one for one in ScrollableContainer.BINDINGS if isinstance(one, Binding) and one.key in _SCROLL_KEYS
]
"""Textual's bindings for scrolling without ← and →, which switch panes."""


class DocumentView(ScrollView, can_focus=True, inherit_bindings=False):
    """Scrollable display of a document."""

    BINDINGS: ClassVar[list[BindingType]] = SCROLL_BINDINGS
    DEFAULT_CSS = "DocumentView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (Textual's parameter)
        super().__init__(id=id)
        self._document = Document()
        self._as_table = False
        self._toggled: set[int] = set()
        self._page = Layout(self._document, 80)
        self._highlights: dict[int, list[StyledRange]] = {}
        self.matches: list[tuple[int, int, int]] = []
        """Block number, start and end of each match."""
        self.current_match: int | None = None
        """Number of the match that was last scrolled to."""

    def show(self, document: Document, *, as_table: bool = False, query: TextQuery | None = None) -> None:
        """Show a document from its start.

        Args:
            document: Document to show.
            as_table: Show it as a table of titles and texts.
            query: Text whose matches are marked.
        """
        self._document, self._as_table = document, as_table
        self._toggled, self._highlights = set(), {}
        self.mark(query)
        self._lay_out()
        self.scroll_to(0, 0, animate=False)

    def mark(self, query: TextQuery | None) -> None:
        """Mark the matches of a query, or remove the marks."""
        self.matches = list(self._document.matches(query)) if query is not None else []
        self.current_match = None
        self.refresh()

    def go_to_match(self, number: int) -> None:
        """Scroll to a match, unfolding its block if necessary."""
        if not 0 <= number < len(self.matches):
            return
        self.current_match = number
        block, start, _ = self.matches[number]
        if self._page.line_of(block, start) is None:
            self._toggle(block)
        line = self._page.line_of(block, start) or 0
        self.scroll_to(0, max(0, line - self.size.height // 3), animate=False)
        self.refresh()

    def fold_all(self) -> bool:
        """Unfold all blocks, or fold them if all are unfolded. Return False if there is nothing to fold."""
        foldable = self._page.foldable
        self._toggled = set() if foldable <= self._toggled else set(foldable)
        self._lay_out()
        return bool(foldable)

    def _toggle(self, block: int) -> None:
        self._toggled ^= {block}
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out the document, keeping the text at the top of the view in place."""
        top = self._top_character()
        width = self.scrollable_content_region.width or self.size.width or 80
        self._page = Layout(self._document, width, toggled=self._toggled, as_table=self._as_table)
        self.virtual_size = Size(width, len(self._page.lines))
        if top is not None and (line := self._page.line_of(*top)) is not None:
            self.scroll_to(0, line, animate=False)
        self.refresh()

    def _top_character(self) -> tuple[int, int] | None:
        """Return the block and the offset of the first visible character, or None at the start of the document."""
        top = self.scroll_offset.y
        if self._page.document is not self._document or not top:
            return None
        cells = (line.left for line in self._page.lines[top:] if line.left is not None)
        return next(((cell.block, cell.start) for cell in cells if cell.part is LinePart.BODY), None)

    def on_resize(self, event: events.Resize) -> None:
        """Update the layout if the width has changed."""
        if self.scrollable_content_region.width != self._page.width:
            self._lay_out()

    def on_click(self, event: events.Click) -> None:
        """Fold or unfold the block whose title or note on more text was clicked."""
        layout, number = self._page, self.scroll_offset.y + event.y
        if not 0 <= number < len(layout.lines):
            return
        line = layout.lines[number]
        cell = line.right if line.paired and event.x > layout.split else line.left
        if cell is not None and cell.part in (LinePart.TITLE, LinePart.MORE) and cell.block in layout.foldable:
            self._toggle(cell.block)

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        number, lines = self.scroll_offset.y + y, self._page.lines
        width, base = self.size.width, self.rich_style
        if number >= len(lines):
            return Strip.blank(width, base)
        strip = Strip(self._line_segments(lines[number])).adjust_cell_length(width, base).apply_style(base)
        if (selection := self.text_selection) is not None and (span := selection.get_span(number)) is not None:
            strip = _with_selection(strip, span, self.selection_style)
        return strip.apply_offsets(0, number)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the text that was selected with the mouse."""
        lines = self._page.lines
        first = selection.start.y if selection.start else 0
        last = selection.end.y if selection.end else len(lines) - 1
        texts = []
        for number in range(first, min(last, len(lines) - 1) + 1):
            text = "".join(segment.text for segment in self._line_segments(lines[number]))
            start, end = selection.get_span(number) or (0, -1)
            if not lines[number].paired:
                start = max(start, GUTTER_CELLS)
            texts.append((text[start:] if end < 0 else text[start:end]).rstrip())
        return "\n".join(texts), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Redraw the selection."""
        self.refresh()

    def _line_segments(self, line: LayoutLine) -> list[Segment]:
        layout = self._page
        if not line.paired:
            return self._cell_segments(line.left, layout.width)
        if layout.as_table:
            return self._table_segments(line)
        left = self._cell_segments(line.left, layout.split)
        padding = layout.split - sum(segment.cell_length for segment in left)
        return [*left, Segment(" " * (max(0, padding) + 1)), *self._cell_segments(line.right, layout.right_width)]

    def _table_segments(self, line: LayoutLine) -> list[Segment]:
        layout, styles = self._page, self._styles
        if line.left is None and line.right is None:
            return [Segment("─" * layout.split + "┼" + "─" * layout.right_width, styles["rule"])]
        name = layout.document.blocks[line.left.block].title if line.left else ""
        cells = [Segment(set_cell_size(name, layout.split), styles["field"]), Segment("│ ", styles["rule"])]
        return cells + (self._text_segments(line.right) if line.right is not None else [])

    def _cell_segments(self, cell: LayoutCell | None, width: int) -> list[Segment]:
        if cell is None:
            return []
        block = self._document.blocks[cell.block]
        if cell.part is LinePart.TITLE:
            return self._title_segments(cell.block, block, width)
        bar = Segment("▎ ", self._styles["rule" if block.kind is BlockKind.FIELD else block.kind])
        return [bar, *self._text_segments(cell)]

    def _title_segments(self, number: int, block: Block, width: int) -> list[Segment]:
        layout, styles = self._page, self._styles
        arrow = ("▾ " if layout.is_open(number) else "▸ ") if number in layout.foldable else "▎ "
        room = width - GUTTER_CELLS
        title = block.title if cell_len(block.title) <= room else set_cell_size(block.title, room)
        segments = [Segment(arrow + title, styles[block.kind])]
        if block.detail and cell_len(title) + 3 + cell_len(block.detail) <= room:
            segments.append(Segment("  " + block.detail, styles["dim"]))
        return segments

    def _text_segments(self, cell: LayoutCell) -> list[Segment]:
        block, styles = self._document.blocks[cell.block], self._styles
        if cell.part is LinePart.MORE:
            more = formatting.plural(cell.end - cell.start, "more character")
            return [Segment(f"▸ {more} (press z or click to show)", styles["note"])]
        if cell.part is LinePart.DETAIL:
            return [Segment(block.detail[cell.start : cell.end], styles["dim"])]
        names = [""] * (cell.end - cell.start)
        for ranges in (self._highlights_from(cell), self._matches_from(cell)):  # matches cover highlights
            for start, end, name in _clip(ranges, cell):
                names[start:end] = [name] * (end - start)
        base, characters = styles[f"text.{block.kind}"], iter(block.text[cell.start : cell.end])
        runs = [(name, sum(1 for _ in group)) for name, group in groupby(names)]
        return [Segment("".join(islice(characters, length)), base + styles[name]) for name, length in runs]

    def _highlights_from(self, cell: LayoutCell) -> Iterator[StyledRange]:
        if cell.block not in self._highlights:
            block = self._document.blocks[cell.block]
            self._highlights[cell.block] = highlight(block.text, block.language)
        ranges = self._highlights[cell.block]
        return islice(ranges, max(0, bisect_right(ranges, cell.start, key=lambda found: found[0]) - 1), None)

    def _matches_from(self, cell: LayoutCell) -> Iterator[StyledRange]:
        first, last = (bisect_left(self.matches, (cell.block, offset, 0)) for offset in (cell.start, cell.end))
        for number in range(max(0, first - 1), last):  # the previous match may extend into this line
            block, start, end = self.matches[number]
            if block == cell.block:
                yield start, end, "match.current" if number == self.current_match else "match"

    @property
    def _styles(self) -> Palette:
        return palette(self.app.theme_variables)


def _clip(ranges: Iterable[StyledRange], cell: LayoutCell) -> Iterator[StyledRange]:
    """Yield the parts of ranges, which are in order, that are on a line, relative to its start."""
    for start, end, name in ranges:
        if start >= cell.end:
            return
        if end > cell.start:
            yield max(start, cell.start) - cell.start, min(end, cell.end) - cell.start, name


def _with_selection(strip: Strip, span: tuple[int, int], style: Style) -> Strip:
    start, end = span
    end = strip.cell_length if end < 0 else min(end, strip.cell_length)
    if start >= end:
        return strip
    before, inside, after = strip.divide([start, end, strip.cell_length])
    return Strip.join([before, Strip(Segment.apply_style(inside, post_style=style)), after])
