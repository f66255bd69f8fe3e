"""The two lists: the steps, and the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.message import Message

from toolroll.records.index import StepFile
from toolroll.records.summary import Bad
from toolroll.viewer import figures, row
from toolroll.viewer.harmless import one_line
from toolroll.viewer.listing import Listing
from toolroll.viewer.row import Column, Piece
from toolroll.viewer.rows_view import RowsView, fitted
from toolroll.viewer.trends import StepFigures


class StepList(RowsView):
    """The steps, each with how many samples it has and their mean score, where that is known."""

    def __init__(self, figures_of: Callable[[StepFile], StepFigures | None]) -> None:
        super().__init__(id="steps")
        self._figures_of = figures_of
        self._steps: Sequence[StepFile] = ()

    def show(self, steps: Sequence[StepFile]) -> None:
        """Show these steps."""
        self._steps = steps
        self.update()

    def count(self) -> int:
        """How many rows there are."""
        return len(self._steps)

    def header(self, width: int) -> Sequence[Piece]:
        """The line above the rows."""
        return [(f" {'step':<{width - 14}}{'n':>5} {'score':>6} ", "header")]

    def pieces(self, row_number: int, width: int) -> Sequence[Piece]:
        """One step."""
        step = self._steps[row_number]
        name = fitted(one_line(step.name, 40), width - 14)
        known = self._figures_of(step)
        pieces: list[Piece] = [(f" {name}", "" if step.step is not None else "warn")]
        if known is None:
            return [*pieces, (f"{figures.size(step.size):>12} ", "dim")]
        score = figures.score(known.score) if known.score is None else f"{known.score:.3g}"
        count = str(known.samples) if known.samples < 100_000 else f"{known.samples // 1000}k"
        style = "bad" if known.bad else "dim" if known.samples else "warn"
        return [*pieces, (f"{count:>5} ", style), (f"{score:>6} ", row.score_style(known.score))]

    def empty(self) -> str:
        """What stands in place of rows where there are none."""
        return "no step yet"


class SampleList(RowsView):
    """The samples that are listed."""

    class SortAsked(Message):
        """A column's title was clicked."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__(id="samples")
        self._listing = Listing([])
        self._with_step = False
        self.said_empty = ""

    def show(self, listing: Listing, *, with_step: bool) -> None:
        """Show these samples."""
        self._listing, self._with_step = listing, with_step
        self.update()

    def shows(self, column: str) -> bool:
        """Whether there is room for a column."""
        return any(column == shown.name for shown in self._columns(self.scrollable_content_region.width))

    def count(self) -> int:
        """How many rows there are."""
        return len(self._listing)

    def header(self, width: int) -> Sequence[Piece]:
        """The line above the rows."""
        order = self._listing.order
        return row.header(self._columns(width), order.column, order.descending)

    def pieces(self, row_number: int, width: int) -> Sequence[Piece]:
        """One sample, or what is wrong with the line."""
        try:
            step, number = self._listing[row_number]
            summary = step.summary(number)
        except IndexError:  # begun anew since; the next look at the directory says so
            return [(" gone", "dim")]
        if isinstance(summary, Bad):
            return [(f" {number + 1:>6} ", "dim"), (fitted(one_line(f"✗ {summary.problem}"), width - 8), "bad")]
        return row.cells(summary, number + 1, self._columns(width))

    def empty(self) -> str:
        """What stands in place of rows where there are none."""
        return self.said_empty

    def header_clicked(self, x: int) -> None:
        """Sort by the column that was clicked."""
        right = 1
        for column in self._columns(self.scrollable_content_region.width):
            right += column.width + 1
            if x < right:
                self.post_message(self.SortAsked("file" if column.name == "row" else column.name))
                return

    def _columns(self, width: int) -> list[Column]:
        return row.columns_for(width, with_step=self._with_step)
