"""HelpScreen: every key with what it does, and the language of filters."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from toolroll.viewer.keys import GROUPS
from toolroll.viewer.palette import palette

FILTERS = (
    ("score < 0.5", "numbers: < <= > >= == !=, and + - * / // %"),
    ("finish_reason != 'stop' and calls > 3", "and, or, not, ( )"),
    ("'Traceback' in output", "a part of a text; in [1, 2] is one of several"),
    ("rewards.total == None", "a field in a field, and what isn't there"),
    ("len(output) > 5000", "len, abs, lower; text(x): anything as one text"),
    ("'sqrt' in text(line.calls)", "line is the whole line, as it was written"),
)
FIELDS = (
    "score, turns, calls, faults, policy_faults, infra_faults, tokens, seconds, finish_reason, outcome, fidelity, "
    "group, sample, request_id, step, row, file are known of every sample, and quick; any other name is a field of "
    "the line."
)


class HelpScreen(ModalScreen[None]):
    """The help. Any of the keys that close things closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss(None)", show=False),
        Binding("j", "page(1)", show=False),
        Binding("k", "page(-1)", show=False),
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll {
        width: 90; max-width: 96%; height: auto; max-height: 94%;
        background: $surface; border: round $primary; padding: 0 2; scrollbar-size-vertical: 1;
    }
    HelpScreen Static { height: auto; }
    """

    def compose(self) -> ComposeResult:
        """The text."""
        with VerticalScroll() as scroll:
            scroll.border_title = "keys"
            scroll.border_subtitle = "esc closes · j k page"
            yield Static(self._keys())
            yield Static(self._filters())

    def action_page(self, by: int) -> None:
        """A page down or up."""
        scroll = self.query_one(VerticalScroll)
        scroll.scroll_page_down(animate=False) if by > 0 else scroll.scroll_page_up(animate=False)

    def _keys(self) -> Table:
        styles = palette(self.app.theme_variables)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, keys in GROUPS:
            table.add_row("", Text(name, styles["note"]))
            for key in keys:
                table.add_row(Text(key.shown, styles["key"]), Text(key.help))
        return table

    def _filters(self) -> Table:
        styles = palette(self.app.theme_variables)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_row("", Text("filters", styles["note"]))
        for example, said in FILTERS:
            table.add_row(Text(example, styles["key"]), Text(said))
        table.add_row("", Text(FIELDS, styles["dim"]))
        table.add_row("", Text("faults in the list: 2 of the model's own; 2+1i: and one of the infrastructure's"))
        return table
