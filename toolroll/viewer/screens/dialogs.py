"""Dialogs: help on all keys and the syntax of filters, and the choice of fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import SelectionList, Static
from textual.widgets.selection_list import Selection

from toolroll._internal.sanitize import one_line
from toolroll.viewer.keys import KEY_GROUPS
from toolroll.viewer.palette import palette

FILTER_EXAMPLES = (
    ("score < 0.5", "numbers: < <= > >= == != + - * / // %"),
    ("finish_reason != 'stop' and calls > 3", "and, or, not, ( )"),
    ("'Traceback' in output", "substring; `in [1, 2]` tests for one of several values"),
    ("rewards.total == None", "nested field; None if it is missing"),
    ("len(output) > 5000", "functions: len, abs, lower, text"),
    ("'sqrt' in text(line.calls)", "text(x) converts x to text; line is the whole record"),
)
FILTER_FIELDS = (
    "Indexed fields (fast): score, turns, calls, faults, policy_faults, infra_faults, failed_programs, tokens, "
    "seconds, finish_reason, outcome, fidelity, group, sample, request_id, step, row, file. Any other name is a field "
    "of the record."
)
FAULTS_COLUMN = "The faults column shows policy faults; 2+1i means 2 policy faults and 1 infra fault."


class HelpScreen(ModalScreen[None]):
    """Scrollable help text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss(None)", show=False),
        Binding("j", "scroll('page_down')", show=False),
        Binding("k", "scroll('page_up')", show=False),
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll {
        width: 90; max-width: 96%; height: auto; max-height: 94%;
        background: $surface; border: round $primary; padding: 0 2; scrollbar-size-vertical: 1;
    }
    """

    def compose(self) -> ComposeResult:
        """Compose the text."""
        with VerticalScroll() as scroll:
            scroll.border_title = "Help"
            scroll.border_subtitle = "esc close · j k scroll"
            yield Static(self._table({name: [(k.shown, k.help) for k in keys] for name, keys in KEY_GROUPS.items()}))
            yield Static(self._table({"Filters": (*FILTER_EXAMPLES, ("", FILTER_FIELDS), ("", FAULTS_COLUMN))}))

    def action_scroll(self, to: str) -> None:
        """Scroll the text: `page_down` or `page_up`."""
        getattr(self.query_one(VerticalScroll), f"scroll_{to}")(animate=False)

    def _table(self, sections: Mapping[str, Iterable[tuple[str, str]]]) -> Table:
        styles = palette(self.app.theme_variables)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, rows in sections.items():
            table.add_row("", Text(name, styles["note"]))
            for left, right in rows:
                table.add_row(Text(left, styles["key"]), Text(right, styles["" if left else "dim"]))
        return table


class FieldChoice(ModalScreen[frozenset[str]]):
    """Checklist of fields. Its result is the set of unchecked fields, so that fields of later samples are shown.

    Args:
        names: Names of the fields.
        hidden: Names of the fields that are unchecked at first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,d,q", "done", show=False),
        Binding("a", "toggle_all", show=False),
    ]
    DEFAULT_CSS = """
    FieldChoice { align: center middle; }
    FieldChoice SelectionList { width: 50; max-width: 90%; height: auto; max-height: 90%; border: round $primary; }
    """

    def __init__(self, names: Sequence[str], hidden: Collection[str]) -> None:
        super().__init__()
        self._names = names
        selections = (Selection(Content(one_line(name, 60)), name, name not in hidden) for name in names)
        self._list = SelectionList[str](*selections)

    def compose(self) -> ComposeResult:
        """Compose the list."""
        self._list.border_title = "Fields"
        self._list.border_subtitle = "space toggle · a all/none · esc done"
        yield self._list

    def action_toggle_all(self) -> None:
        """Check all fields, or none if all are checked."""
        if len(self._list.selected) == len(self._names):
            self._list.deselect_all()
        else:
            self._list.select_all()

    def action_done(self) -> None:
        """Close the dialog."""
        self.dismiss(frozenset(self._names) - frozenset(self._list.selected))
