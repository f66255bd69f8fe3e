"""BrowseScreen: the first screen, with all its keys."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from toolroll.viewer.export import export_sample, sample_markdown
from toolroll.viewer.field_choice import FieldChoice
from toolroll.viewer.finding_screen import FindingScreen
from toolroll.viewer.help import HelpScreen
from toolroll.viewer.keys import KEYS, bindings
from toolroll.viewer.sample_pane import CONVERSATION, FIELDS, PLAIN, REWARDS, SWITCHED, TOKENS

COPIED = 75_000
"""Characters that every terminal takes into its clipboard."""


class BrowseScreen(FindingScreen):
    """Looking at a sample in all ways, on top of moving and finding."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]

    def action_open(self) -> None:
        """Open what the cursor is on; in a sample, the next match."""
        if self.focused is self.pane.content:
            self.action_next_match()
        else:
            self.go_to_pane(self.sample_list if self.focused is self.step_list else self.pane.content)

    def action_back(self) -> None:
        """Close what was opened last."""
        if self.search is not None:
            self.stop_search()
        elif self.pane.display_name != CONVERSATION:
            self.action_show_display(CONVERSATION)
        elif self.focused is self.pane.content:
            self.go_to_pane(self.sample_list)
        elif self.wanted is not None:
            self.wanted = None
            self.list_anew()
        self.tell()

    def action_switch_display(self) -> None:
        """Conversation, plain text, table."""
        now = SWITCHED.index(self.pane.display_name) if self.pane.display_name in SWITCHED else -1
        self.action_show_display(SWITCHED[(now + 1) % len(SWITCHED)])

    def action_show_display(self, name: str) -> None:
        """Show the sample in one of its displays."""
        before = self.pane.display_name in FIELDS
        self.pane.set_display(name, self.needle)
        if self.search is not None and before != (name in FIELDS):
            self.start_search(self.search.needle, go=False)

    def action_tokens(self) -> None:
        """The tokens, in one form or the other."""
        if self.pane.display_name == TOKENS:
            self.pane.switch_tokens()
        else:
            self.action_show_display(TOKENS)

    def action_rewards(self) -> None:
        """What it earned."""
        self.action_show_display(CONVERSATION if self.pane.display_name == REWARDS else REWARDS)

    def action_fold(self) -> None:
        """Unfold everything, or fold it again."""
        if self.pane.display_name == TOKENS or not self.pane.document.fold_all():
            self.notify("Nothing here can be folded.")

    def action_fields(self) -> None:
        """Choose the fields."""
        record = self.pane.record
        if record is None:
            self.notify("There is no sample to choose fields of.")
            return
        names = list(dict.fromkeys([*record.fields, *self.pane.hidden_fields]))
        self.app.push_screen(FieldChoice(names, self.pane.hidden_fields), self._fields_chosen)

    def _fields_chosen(self, hidden: frozenset[str] | None) -> None:
        if hidden is not None and hidden != self.pane.hidden_fields:
            self.pane.hidden_fields = hidden
            self.action_show_display(self.pane.display_name if self.pane.display_name in FIELDS else PLAIN)

    def action_compare(self) -> None:
        """Beside another sample of its group."""
        from toolroll.viewer.compare import CompareScreen

        if self.pane.place is None or self.pane.record is None:
            self.notify("There is no sample to compare.")
            return
        screen = CompareScreen.of(self.pane.place, self.pane.record)
        if screen is None:
            self.notify("No other sample of its group is in this step.")
        else:
            self.app.push_screen(screen)

    def action_plots(self) -> None:
        """By step."""
        from toolroll.viewer.plots import PlotScreen  # plotext is loaded when it is first needed

        self.background.survey(self.steps)
        self.app.push_screen(PlotScreen(lambda: self.shelf.steps, self.background.figures_of), self._plots_seen)

    def _plots_seen(self, _: None) -> None:
        """What is large is counted only as long as somebody looks at it."""
        if not self.is_small:
            self.background.stop_survey()
            self.surveyed(None)

    def action_copy(self) -> None:
        """Copy the sample."""
        text = sample_markdown(self.pane.place, self.pane.record)
        if text is None:
            self.notify("There is no sample to copy.")
            return
        self.app.copy_to_clipboard(text)
        more = ": more than many terminals take; e writes a file" if len(text) > COPIED else ""
        self.notify(f"Copied {len(text):,} characters of Markdown{more}.")

    def action_export(self) -> None:
        """Write the sample to a file."""
        export_sample(self.app, self.pane.place, self.pane.record)

    def action_help(self) -> None:
        """The help."""
        self.app.push_screen(HelpScreen())
