"""The list of steps and the list of samples. Rows are formatted when they become visible."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size, clamp
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from toolroll._internal.sanitize import one_line
from toolroll.records.index import StepFile
from toolroll.records.summary import SampleSummary, UnreadableLine
from toolroll.viewer import formatting
from toolroll.viewer.documents.layout import wrap
from toolroll.viewer.palette import Piece, draw
from toolroll.viewer.query.listing import SampleListing
from toolroll.viewer.widgets.background import StepTrend

Rows = TypeVar("Rows", bound=Sized)


class RowsView(ScrollView, Generic[Rows], can_focus=True, inherit_bindings=False):
    """List whose subclasses format the header and the rows.

    Args:
        rows: Rows to show.
        id: ID of the widget.
        empty_text: Text that is shown if there are no rows.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move_to(0)", show=False),
        Binding("end", "move_to(-1)", show=False),
    ]
    DEFAULT_CSS = "RowsView { overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"

    @dataclass
    class RowSelected(Message):
        """Posted when the user moves the cursor to a row."""

        view: RowsView[Any]
        row: int

    def __init__(self, rows: Rows, *, id: str, empty_text: str = "") -> None:  # noqa: A002 (Textual's parameter)
        super().__init__(id=id)
        self.rows = rows
        self.cursor = 0
        """Number of the row under the cursor."""
        self._empty_text = empty_text

    @abstractmethod
    def header(self, width: int) -> Sequence[Piece]:
        """Return the line above the rows."""

    @abstractmethod
    def row_pieces(self, row: int, width: int) -> Sequence[Piece]:
        """Return one row."""

    def header_clicked(self, x: int) -> None:
        """Handle a click on the header."""

    def set_cursor(self, row: int) -> None:
        """Move the cursor into view without posting a message."""
        self.cursor = clamp(row, 0, max(0, len(self.rows) - 1))
        self._set_height()
        page = self.size.height - 1
        if page > 0:
            self.scroll_to(0, clamp(self.scroll_offset.y, self.cursor - page + 1, self.cursor), animate=False)
        self.refresh()

    def show(self, rows: Rows) -> None:
        """Show rows, keeping the cursor in its place."""
        self.rows = rows
        self._set_height()
        self.cursor = clamp(self.cursor, 0, max(0, len(self.rows) - 1))
        self.refresh()

    def action_move(self, by: int) -> None:
        """Move the cursor by a number of rows."""
        self._select(self.cursor + by)

    def action_move_page(self, by: int) -> None:
        """Move the cursor by a number of pages."""
        self._select(self.cursor + by * max(1, self.size.height - 2))

    def action_move_to(self, row: int) -> None:
        """Move the cursor to a row. Negative numbers count from the end."""
        self._select(row % max(1, len(self.rows)))

    def on_click(self, event: events.Click) -> None:
        """Select the clicked row."""
        if event.y == 0:
            self.header_clicked(event.x)
        elif (row := self.scroll_offset.y + event.y - 1) < len(self.rows):
            self._select(row)

    def on_resize(self, event: events.Resize) -> None:
        """Keep the cursor in view."""
        self.set_cursor(self.cursor)

    def _select(self, row: int) -> None:
        if len(self.rows):
            self.set_cursor(row)
            self.post_message(self.RowSelected(self, self.cursor))

    def _set_height(self) -> None:
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        width = self.scrollable_content_region.width
        if y == 0:
            return draw(self, self.header(width), width=width, base="header")
        row = self.scroll_offset.y + y - 1
        if row < len(self.rows):
            base = "" if row != self.cursor else "cursor.focused" if self.has_focus else "cursor"
            return draw(self, self.row_pieces(row, width), width=width, base=base)
        return draw(self, self._empty_line(y - 2, width), width=width)

    def _empty_line(self, y: int, width: int) -> list[Piece]:
        text = "" if len(self.rows) else self._empty_text
        rows = wrap(text, max(width - 2, 8))
        return [(f" {text[slice(*rows[y])]}", "note")] if 0 <= y < len(rows) else []


CellFormatter = Callable[[SampleSummary, int], tuple[str, str]]
"""Returns the text and the style of a cell, given the sample and its row number from 1."""


class ListColumn(NamedTuple):
    """A column of the sample list."""

    name: str
    """Name of the field in SampleSummary and SampleOrder."""
    title: str
    width: int
    priority: int
    """Columns with a higher number are omitted first if there is not enough room."""
    cell: CellFormatter
    align_right: bool = True


def columns_for(width: int, *, with_step: bool) -> list[ListColumn]:
    """Return the columns that fit into a width, from left to right.

    Args:
        width: Available width in cells.
        with_step: Include the column with the step.
    """
    wanted = [column for column in LIST_COLUMNS if with_step or column.name != "step"]
    by_priority = sorted(wanted, key=attrgetter("priority"))
    ends = accumulate(column.width + 1 for column in by_priority)
    chosen = [column for column, end in zip(by_priority, ends, strict=True) if end < width]
    return [column for column in wanted if column in chosen]


def header(columns: Sequence[ListColumn], sorted_by: str, descending: bool) -> list[Piece]:
    """Return the column titles, with an arrow at the column by which the list is sorted."""
    pieces: list[Piece] = [(" ", "header")]
    for column in columns:
        is_sorted = column.name == sorted_by
        arrow = ("↓" if descending else "↑") if is_sorted else ""
        title = column.title[: column.width - len(arrow)] + arrow
        text = formatting.fit(title, column.width, align_right=column.align_right)
        pieces.append((f"{text} ", "header.sorted" if is_sorted else "header"))
    return pieces


def cells(summary: SampleSummary, number: int, columns: Sequence[ListColumn]) -> list[Piece]:
    """Return the cells of a sample.

    Args:
        summary: Values of the sample.
        number: Row number of the sample in its file, from 1.
        columns: Columns to show.
    """
    pieces: list[Piece] = [(" ", "")]
    for column in columns:
        text, style = column.cell(summary, number)
        pieces += [(formatting.fit(text, column.width, align_right=column.align_right), style), (" ", "")]
    return pieces


def score_style(score: float | None) -> str:
    """Return the style of a score, by its sign."""
    if score is None:
        return "dim"
    return "good" if score > 0 else "bad" if score < 0 else "zero"


def finish_style(reason: str | None) -> str:
    """Return the style of a finish reason: complete, truncated or failed."""
    if reason in ("infra", "aborted"):
        return "bad"
    return "" if reason in ("stop", "tool_stop") else "warn" if reason else "dim"


def _faults(summary: SampleSummary, _: int) -> tuple[str, str]:
    policy, infra = summary.policy_faults or 0, summary.infra_faults or 0
    if not policy and not infra:
        return "·", "dim"
    return f"{policy}+{infra}i" if infra else str(policy), "bad" if infra else "warn"


def _finish(summary: SampleSummary, _: int) -> tuple[str, str]:
    return one_line(summary.finish_reason or formatting.UNKNOWN, 40), finish_style(summary.finish_reason)


def _count(name: str) -> CellFormatter:
    """Return the formatter of an integer field."""

    def cell(summary: SampleSummary, _: int) -> tuple[str, str]:
        value = getattr(summary, name)
        return (formatting.UNKNOWN, "dim") if value is None else (str(value), "" if value else "dim")

    return cell


LIST_COLUMNS = (
    ListColumn("row", "#", 6, 0, lambda _, number: (str(number), "dim")),
    ListColumn("step", "step", 6, 1, _count("step")),
    ListColumn("score", "score", 7, 2, lambda sample, _: (formatting.score(sample.score), score_style(sample.score))),
    ListColumn("turns", "turns", 5, 6, _count("turns")),
    ListColumn("calls", "calls", 5, 3, _count("calls")),
    ListColumn("faults", "faults", 6, 4, _faults),
    ListColumn("failed_programs", "failed", 6, 11, _count("failed_programs")),
    ListColumn("tokens", "tokens", 7, 7, _count("tokens")),
    ListColumn("seconds", "time", 6, 8, lambda sample, _: (formatting.seconds(sample.seconds), "dim")),
    ListColumn("finish_reason", "finish", 9, 5, _finish, align_right=False),
    ListColumn("group", "group", 12, 9, lambda sample, _: (one_line(sample.group or "", 40), "dim"), align_right=False),
    ListColumn("sample", "index", 5, 10, _count("sample")),
)
"""Columns from left to right."""


class StepList(RowsView[Sequence[StepFile]]):
    """Steps with their number of samples and mean score, or their size if they have not been counted.

    Args:
        trend_of: Returns the aggregates of a step.
    """

    def __init__(self, trend_of: Callable[[StepFile], StepTrend | None]) -> None:
        super().__init__((), id="steps", empty_text="no steps yet")
        self._trend_of = trend_of

    def header(self, width: int) -> Sequence[Piece]:
        """Return the column titles."""
        return [(f" {'step':<{width - 14}}{'n':>5} {'score':>6} ", "header")]

    def row_pieces(self, row: int, width: int) -> Sequence[Piece]:
        """Return one step."""
        step = self.rows[row]
        name = formatting.fit(one_line(step.name, 40), width - 14)
        trend = self._trend_of(step)
        pieces: list[Piece] = [(f" {name}", "" if step.step is not None else "warn")]
        if trend is None:
            return [*pieces, (f"{formatting.size(step.size):>12} ", "dim")]
        score = formatting.UNKNOWN if trend.score is None else f"{trend.score:.3g}"
        count = str(trend.samples) if trend.samples < 100_000 else f"{trend.samples // 1000}k"
        style = "bad" if trend.unreadable else "dim" if trend.samples else "warn"
        return [*pieces, (f"{count:>5} ", style), (f"{score:>6} ", score_style(trend.score))]


class SampleList(RowsView[SampleListing]):
    """The listed samples."""

    @dataclass
    class SortRequested(Message):
        """Posted when a column title is clicked."""

        column: str

    def __init__(self) -> None:
        super().__init__(SampleListing([]), id="samples")
        self._with_step = False

    def show_listing(self, listing: SampleListing, *, with_step: bool, empty_text: str) -> None:
        """Show a listing.

        Args:
            listing: Samples to show.
            with_step: Show the column with the step.
            empty_text: Text to show if the listing is empty.
        """
        self._with_step, self._empty_text = with_step, empty_text
        self.show(listing)

    def shows_column(self, name: str) -> bool:
        """Return True if there is room for a column."""
        return any(name == column.name for column in self._columns(self.scrollable_content_region.width))

    def header(self, width: int) -> Sequence[Piece]:
        """Return the column titles."""
        order = self.rows.order
        return header(self._columns(width), order.column, order.descending)

    def row_pieces(self, row: int, width: int) -> Sequence[Piece]:
        """Return one sample, or the error if its line cannot be read."""
        try:
            step, number = self.rows[row]
            summary = step.summary(number)
        except IndexError:  # the step was rewritten; the next check of the directory detects it
            return [(" removed", "dim")]
        if isinstance(summary, UnreadableLine):
            problem = formatting.fit(one_line(f"✗ {summary.problem}"), width - 8)
            return [(f" {number + 1:>6} ", "dim"), (problem, "bad")]
        return cells(summary, number + 1, self._columns(width))

    def header_clicked(self, x: int) -> None:
        """Request to sort by the clicked column."""
        right = 1
        for column in self._columns(self.scrollable_content_region.width):
            right += column.width + 1
            if x < right:
                self.post_message(self.SortRequested("file" if column.name == "row" else column.name))
                return

    def _columns(self, width: int) -> list[ListColumn]:
        return columns_for(width, with_step=self._with_step)
