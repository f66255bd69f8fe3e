"""FieldChoice: which fields of a line plain text and table show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import SelectionList
from textual.widgets.selection_list import Selection

from toolroll.viewer.harmless import one_line


class FieldChoice(ModalScreen[frozenset[str]]):
    """A list to tick fields in. Gives those that aren't ticked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,d,q", "done", show=False),
        Binding("a", "all", show=False),
    ]
    DEFAULT_CSS = """
    FieldChoice { align: center middle; }
    FieldChoice Vertical { width: 50; max-width: 90%; height: auto; max-height: 90%; }
    FieldChoice SelectionList { height: auto; max-height: 100%; border: round $primary; }
    """

    def __init__(self, names: Sequence[str], hidden: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._hidden = hidden

    def compose(self) -> ComposeResult:
        """The list."""
        with Vertical():
            choice = SelectionList[str](
                *(Selection(Content(one_line(name, 60)), name, name not in self._hidden) for name in self._names)
            )
            choice.border_title = "fields"
            choice.border_subtitle = "space one · a all or none · esc done"
            yield choice

    def action_all(self) -> None:
        """All of them, or none."""
        choice = self.query_one(SelectionList)
        if len(choice.selected) == len(self._names):
            choice.deselect_all()
        else:
            choice.select_all()

    def action_done(self) -> None:
        """Give what isn't ticked. What a later sample has beside is shown."""
        self.dismiss(frozenset(self._names) - frozenset(self.query_one(SelectionList).selected))
