"""CompareScreen: two samples of one group side by side."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from toolroll.records.json_line import BadLine
from toolroll.records.record import Record
from toolroll.viewer.comparison import Fact, facts, fold_shared, group_rows
from toolroll.viewer.conversation import conversation
from toolroll.viewer.document_view import DocumentView
from toolroll.viewer.harmless import one_line
from toolroll.viewer.help import HelpScreen
from toolroll.viewer.key_bar import KeyBar
from toolroll.viewer.keys import Key, bindings
from toolroll.viewer.listing import Place
from toolroll.viewer.palette import palette
from toolroll.viewer.rows_view import fitted

KEYS = (
    Key("n p", "the right sample", "", (("n", "next_sample"), ("p", "previous_sample"))),
    Key("N P", "the left sample", "", (("N", "next_left"), ("P", "previous_left"))),
    Key("j k", "page", "", (("j", "page(1)"), ("k", "page(-1)"))),
    Key("g G", "ends", "", (("g", "to_end(-1)"), ("G", "to_end(1)"))),
    Key("tab ← →", "side", "", (("tab,right,left,shift+tab", "other_side"),)),
    Key("z", "fold", "", (("z", "fold"),)),
    Key("?", "help", "", (("question_mark", "help"),)),
    Key("esc c", "back", "", (("escape,c", "back"),)),
    Key("q", "quit", "", (("q", "app.quit"),)),
)


class Facts(Widget):
    """What is known of both, in two lines each with their names above."""

    DEFAULT_CSS = "Facts { height: 4; background: $panel; padding: 0 1; }"

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.names = ("", "")
        self.facts: list[Fact] = []

    def render_line(self, y: int) -> Strip:
        """One line of it."""
        styles, width = palette(self.app.theme_variables), self.size.width
        if y == 0:
            segments = [Segment(self.title, styles["key"])]
        else:
            label = ("", *self.names)[y - 1]
            segments = [Segment(fitted(label, max(map(len, self.names)) + 1), styles["dim"])]
            for fact in self.facts:
                text = fact[y - 1]
                style = "dim" if y == 1 else "warn" if fact.differs else ""
                segments.append(Segment(f"{text:>{max(map(len, fact)) + 2}}", styles[style]))
        return Strip(segments).crop(0, width).adjust_cell_length(width).apply_style(self.rich_style)


class CompareScreen(Screen[None]):
    """The two."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]
    DEFAULT_CSS = """
    CompareScreen { layout: vertical; }
    CompareScreen Horizontal { height: 1fr; }
    CompareScreen DocumentView { width: 1fr; height: 1fr; }
    CompareScreen #left { border-right: solid $panel; }
    """

    def __init__(self, rows: list[int], place: Place, record: Record) -> None:
        super().__init__()
        self._rows = rows
        self._step = place.step
        self._left = rows.index(place.row)
        self._right = (self._left + 1) % len(rows)
        self._records = {place.row: record}
        self._facts = Facts()
        self._views = DocumentView(id="left"), DocumentView(id="right")

    @classmethod
    def of(cls, place: Place, record: Record) -> CompareScreen | None:
        """Beside the next sample of its group; None where it is the only one."""
        rows = group_rows(place.step, place.row)
        return cls(rows, place, record) if len(rows) > 1 and place.row in rows else None

    def compose(self) -> ComposeResult:
        """What is known of both above, both conversations below."""
        yield self._facts
        with Horizontal():
            yield from self._views
        yield KeyBar(KEYS)

    def on_mount(self) -> None:
        """Show them."""
        self._views[0].focus()
        self._show()

    def _show(self) -> None:
        left, right = self._rows[self._left], self._rows[self._right]
        try:
            records = self._record(left), self._record(right)
        except (BadLine, IndexError) as error:
            self.notify(f"It can't be read any more: {error}", severity="error", markup=False)
            self.dismiss(None)
            return
        made = (conversation(record) for record in records)
        one, other = fold_shared(*made)
        for view, document in zip(self._views, (one, other), strict=True):
            view.show(document)
        bar, group = self._facts, records[0].group
        bar.title = (
            f"group {one_line(group or '', 40)} in step {one_line(self._step.name, 20)}: {len(self._rows)} samples"
        )
        bar.names = f"sample {left + 1}", f"sample {right + 1}"
        bar.facts = facts(records[0].summary(), records[1].summary())
        bar.refresh()

    def _record(self, row: int) -> Record:
        if row not in self._records:
            self._records[row] = self._step.record(row)
        return self._records[row]

    def _by(self, left: int, right: int) -> None:
        count = len(self._rows)
        self._left, self._right = (self._left + left) % count, (self._right + right) % count
        if self._left == self._right:
            if count == 2:
                self._left, self._right = (self._left - left) % count, (self._right - right) % count
                self._left, self._right = self._right, self._left
            elif left:
                self._left = (self._left + left) % count
            else:
                self._right = (self._right + right) % count
        self._show()

    def action_next_sample(self) -> None:
        """Another one on the right."""
        self._by(0, 1)

    def action_previous_sample(self) -> None:
        """Another one on the right."""
        self._by(0, -1)

    def action_next_left(self) -> None:
        """Another one on the left."""
        self._by(1, 0)

    def action_previous_left(self) -> None:
        """Another one on the left."""
        self._by(-1, 0)

    def action_page(self, by: int) -> None:
        """Both by a page."""
        for view in self._views:
            view.scroll_page_down(animate=False) if by > 0 else view.scroll_page_up(animate=False)

    def action_to_end(self, end: int) -> None:
        """Both to the beginning, or to the end."""
        for view in self._views:
            view.scroll_end(animate=False) if end > 0 else view.scroll_home(animate=False)

    def action_other_side(self) -> None:
        """Move the other one."""
        self._views[self._views[0].has_focus].focus()

    def action_fold(self) -> None:
        """Unfold both, or fold them."""
        for view in self._views:
            view.fold_all()

    def action_help(self) -> None:
        """The help."""
        self.app.push_screen(HelpScreen())

    def action_back(self) -> None:
        """To the lists."""
        self.dismiss(None)
