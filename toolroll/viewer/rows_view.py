"""RowsView: a list of any length with a header and a cursor. A row is made when it is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from toolroll.viewer.palette import Palette, palette
from toolroll.viewer.row import Piece
from toolroll.viewer.wrapping import wrap


class RowsView(ScrollView, can_focus=True, inherit_bindings=False):
    """The base of the lists. What a row says is its subclass's to say."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move_to_end(-1)", show=False),
        Binding("end", "move_to_end(1)", show=False),
    ]
    DEFAULT_CSS = "RowsView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    class Chosen(Message):
        """The cursor was moved to a row by the user."""

        def __init__(self, view: RowsView, row: int) -> None:
            super().__init__()
            self.view = view
            self.row = row

        @property
        def control(self) -> RowsView:
            """Which list."""
            return self.view

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (textual's word)
        super().__init__(id=id)
        self._cursor = 0
        self._palette: Palette | None = None

    # What a subclass says

    def count(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    def header(self, width: int) -> Sequence[Piece]:
        """The line above the rows."""
        raise NotImplementedError

    def pieces(self, row: int, width: int) -> Sequence[Piece]:
        """One row."""
        raise NotImplementedError

    def empty(self) -> str:
        """What stands in place of rows where there are none."""
        raise NotImplementedError

    def header_clicked(self, x: int) -> None:
        """The header was clicked."""

    # The cursor

    @property
    def cursor(self) -> int:
        """The row that it is on."""
        return self._cursor

    def put_cursor(self, row: int) -> None:
        """Move it, and bring it into view. Nobody is told."""
        self._cursor = max(0, min(row, self.count() - 1))
        self._bring_into_view()
        self.refresh()

    def update(self) -> None:
        """The rows are others, or more."""
        self.virtual_size = Size(self.size.width, self.count() + 1)
        self._cursor = max(0, min(self._cursor, self.count() - 1))
        self.refresh()

    def action_move(self, by: int) -> None:
        """By some rows."""
        self._choose(self._cursor + by)

    def action_move_page(self, by: int) -> None:
        """By a page."""
        self._choose(self._cursor + by * max(1, self.size.height - 2))

    def action_move_to_end(self, end: int) -> None:
        """To the first row or to the last."""
        self._choose(0 if end < 0 else self.count() - 1)

    def on_click(self, event: events.Click) -> None:
        """A row is chosen by a click."""
        if event.y == 0:
            self.header_clicked(event.x)
        elif (row := self.scroll_offset.y + event.y - 1) < self.count():
            self._choose(row)

    def on_resize(self, event: events.Resize) -> None:
        """Keep the cursor in view."""
        self.update()
        self._bring_into_view()

    def _choose(self, row: int) -> None:
        if self.count():
            self.put_cursor(row)
            self.post_message(self.Chosen(self, self._cursor))

    def _bring_into_view(self) -> None:
        page = self.size.height - 1
        if page <= 0:
            return
        top = self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(0, self._cursor, animate=False)
        elif self._cursor >= top + page:
            self.virtual_size = Size(self.size.width, self.count() + 1)
            self.scroll_to(0, self._cursor - page + 1, animate=False)

    # Drawing

    def notify_style_update(self) -> None:
        """Another theme has other colours."""
        super().notify_style_update()
        self._palette = None

    @property
    def styles_by_name(self) -> Palette:
        """The styles of pieces."""
        if self._palette is None:
            self._palette = palette(self.app.theme_variables)
        return self._palette

    def render_line(self, y: int) -> Strip:
        """One line, as it is on the screen."""
        styles, base, width = self.styles_by_name, self.rich_style, self.scrollable_content_region.width
        if y == 0:
            strip = self._strip(self.header(width), width)
            return strip.adjust_cell_length(width, styles["header"]).apply_style(base)
        row = self.scroll_offset.y + y - 1
        if row >= self.count():
            text = self.empty() if not self.count() else ""
            return self._empty_line(text, y - 2, width).adjust_cell_length(width, base).apply_style(base)
        strip = self._strip(self.pieces(row, width), width).adjust_cell_length(width)
        if row == self._cursor:
            strip = strip.apply_style(styles["cursor.focused" if self.has_focus else "cursor"])
        return strip.apply_style(base)

    def _strip(self, pieces: Sequence[Piece], width: int) -> Strip:
        styles = self.styles_by_name
        return Strip([Segment(text, styles[name]) for text, name in pieces]).crop(0, width)

    def _empty_line(self, text: str, y: int, width: int) -> Strip:
        lines = _folded(text, width - 2)
        return Strip([Segment(f" {lines[y]}", self.styles_by_name["note"])] if 0 <= y < len(lines) else [])


def _folded(text: str, width: int) -> list[str]:
    return [text[start:end] for start, end in wrap(text, max(width, 8))] if text else []


def fitted(text: str, width: int) -> str:
    """A text of exactly this width."""
    return set_cell_size(text if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 1))}…", width)


def cut_left(text: str, width: int) -> str:
    """The end of a text, as much as has room. Of a path, the end says more."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return f"…{text}" if text and width > 8 else ""
