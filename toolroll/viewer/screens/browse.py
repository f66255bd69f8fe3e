"""The main screen: steps, samples and the selected sample, with all keys."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from toolroll._internal.sanitize import one_line
from toolroll.errors import did_you_mean
from toolroll.records.index import DumpDirectory
from toolroll.viewer.documents.document import TextQuery
from toolroll.viewer.export import export_sample, markdown
from toolroll.viewer.formatting import truncate_left
from toolroll.viewer.keys import BROWSE_KEYS, KeyBar, bindings
from toolroll.viewer.query.expression import ExpressionError, FilterExpression
from toolroll.viewer.query.listing import SORT_COLUMNS, SampleOrder
from toolroll.viewer.query.scan import FIELD_NAMES
from toolroll.viewer.screens.dialogs import FieldChoice
from toolroll.viewer.screens.navigator import SampleNavigator, SearchController
from toolroll.viewer.widgets.background import BackgroundTasks
from toolroll.viewer.widgets.input_bar import InputBar, InputRemark
from toolroll.viewer.widgets.lists import RowsView, SampleList
from toolroll.viewer.widgets.sample_pane import Display, SamplePane

MAX_CLIPBOARD_CHARS = 75_000
"""Number of characters that every terminal accepts for its clipboard."""


class BrowseScreen(Screen[None]):
    """Main screen. Handles keys and messages; the navigator and the search controller hold the state.

    Args:
        directory: Directory to display.
        pane: Pane of the selected sample.
        follow: Start with the newest sample and follow the run.
        refresh_interval_s: Interval between two checks of the directory.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(BROWSE_KEYS)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 (declared so by Textual)
    DEFAULT_CSS = """
    BrowseScreen #title, BrowseScreen #status { height: 1; background: $panel; padding: 0 1; }
    BrowseScreen #status { display: none; background: $primary 20%; }
    BrowseScreen #status.-visible { display: block; }
    BrowseScreen #lists { height: 40%; min-height: 5; max-height: 24; }
    BrowseScreen #steps { width: 21; border-right: solid $panel; }
    BrowseScreen.-narrow.-reading #lists { display: none; }
    BrowseScreen.-wide #main { layout: horizontal; }
    BrowseScreen.-wide #lists { height: 1fr; max-height: 100%; width: 49%; max-width: 108; border-right: solid $panel; }
    """

    def __init__(self, directory: DumpDirectory, pane: SamplePane, follow: bool, refresh_interval_s: float) -> None:
        super().__init__()
        self.background = BackgroundTasks(directory)
        self.pane = pane
        self.navigator = SampleNavigator(self.background, pane, follow, self._update_status)
        self.search = SearchController(self.navigator)
        self._input = InputBar()
        self._refresh_interval_s = refresh_interval_s
        self._counting: list[str] = []
        """Progress of counting, for the status line."""

    def compose(self) -> ComposeResult:
        """Compose the title, the lists, the sample, the status line, the input bar and the footer."""
        yield Static("", id="title", markup=False)
        with Container(id="main"):
            with Horizontal(id="lists"):
                yield self.navigator.step_list
                yield self.navigator.sample_list
            yield self.pane
        yield Static("", id="status", markup=False)
        yield self._input
        yield KeyBar(BROWSE_KEYS)
        yield self.background

    def on_mount(self) -> None:
        """Show the directory and start checking it for changes."""
        self.navigator.reload()
        self.navigator.sample_list.focus()
        self.set_interval(self._refresh_interval_s, self.background.poll_directory)

    def on_resize(self) -> None:
        """Fit the title to the width."""
        self._update_status()

    def _update_status(self) -> None:
        name, summary = "toolroll  ", " · ".join(self.navigator.summary())
        room = self.size.width - len(name) - len(summary) - 5
        path = truncate_left(one_line(str(self.background.directory.directory), 1000), room)
        title = Content.assemble((name, "bold $primary"), (summary, ""), (f" · {path}" if path else "", "dim"))
        status = " · ".join([*self.navigator.status(), *self._counting, *self.search.status()])
        self.query_one("#title", Static).update(title, layout=False)
        line = self.query_one("#status", Static)
        line.update(Content(status), layout=False)
        line.set_class(bool(status), "-visible")

    def _focus_pane(self, pane: Widget) -> None:
        """Focus a pane. On a narrow screen, the sample hides the lists while it has the focus."""
        self.set_class(pane is self.pane.content, "-reading")
        pane.focus()

    # Messages

    @on(BackgroundTasks.DirectoryChanged)
    def _directory_changed(self) -> None:
        self.navigator.reload()
        self.search.directory_changed()

    @on(BackgroundTasks.Advanced)
    def _scan_advanced(self, event: BackgroundTasks.Advanced) -> None:
        if event.scan is self.navigator.listing:
            self.navigator.listing_advanced(event.is_complete)
        elif event.scan is self.search.current:
            self.search.search_advanced(event.is_complete)
            self._update_status()

    @on(BackgroundTasks.StepsCounted)
    def _steps_counted(self, event: BackgroundTasks.StepsCounted) -> None:
        is_done = event.done == event.total
        self._show_counting([] if is_done else [f"counting steps: {event.done:,} of {event.total:,}"])

    def _show_counting(self, progress: list[str]) -> None:
        self._counting = progress
        self.navigator.step_list.refresh()
        self._update_status()

    @on(BackgroundTasks.RequestIdSearched)
    def _request_id_searched(self, event: BackgroundTasks.RequestIdSearched) -> None:
        if event.position is None:
            problem = f"No sample has the request ID {one_line(event.request_id, 60)}."
            self.notify(problem, severity="warning", markup=False)
            return
        if self.navigator.expression is not None:
            self.navigator.expression = None
            self.notify("Filter cleared to show the sample.")
        self.navigator.go_to(event.position)

    @on(RowsView.RowSelected)
    def _row_selected(self, event: RowsView.RowSelected) -> None:
        self.navigator.is_following = False
        select = self.navigator.go_to_step if event.view is self.navigator.step_list else self.navigator.select
        select(event.row)

    @on(SampleList.SortRequested)
    def _sort_requested(self, event: SampleList.SortRequested) -> None:
        if event.column == self.navigator.order.column:
            self.action_reverse_order()
        elif event.column in SORT_COLUMNS:
            self.navigator.sort(SampleOrder(event.column))

    # Navigation

    def action_move_sample(self, by: int) -> None:
        """Go to the next or the previous sample."""
        self.navigator.move_sample(by)

    def action_move_step(self, by: int) -> None:
        """Go to the next or the previous step."""
        self.navigator.move_step(by)

    def action_scroll(self, to: str) -> None:
        """Scroll the sample: `page_down`, `page_up`, `home` or `end`."""
        getattr(self.pane.content, f"scroll_{to}")(animate=False)

    def action_move_pane(self, by: int) -> None:
        """Focus the next or the previous pane."""
        panes: list[Widget] = [self.navigator.step_list, self.navigator.sample_list, self.pane.content]
        current = panes.index(self.focused) if self.focused in panes else 1
        self._focus_pane(panes[(current + by) % len(panes)])

    def action_open(self) -> None:
        """Open the selected row; in a sample, go to the next match."""
        if self.focused is self.pane.content:
            self.action_move_match(1)
        elif self.focused is self.navigator.step_list:
            self._focus_pane(self.navigator.sample_list)
        else:
            self._focus_pane(self.pane.content)

    def action_back(self) -> None:
        """Close the search, the display, the sample or the filter, whichever is first in this order."""
        if self.search.current is not None:
            self.search.stop()
        elif self.pane.current_display is not Display.CONVERSATION:
            self.action_show_display(Display.CONVERSATION)
        elif self.focused is self.pane.content:
            self._focus_pane(self.navigator.sample_list)
        elif self.navigator.expression is not None:
            self.navigator.set_filter(None)
        self._update_status()

    def action_follow(self) -> None:
        """Start or stop following the run."""
        self.navigator.toggle_following()
        self._update_status()

    # Search, filter and order

    def action_find(self) -> None:
        """Ask for a text to find."""
        search = self.search.current
        hint = InputRemark("enter: search all steps · lower case ignores case · esc: cancel")
        self._input.open("find", lambda _: hint, self._find, search.query.text if search is not None else "")

    def _find(self, text: str | None) -> None:
        self._focus_pane(self.pane.content if text else self.navigator.sample_list)
        self.search.stop()
        if text:
            self.search.start(TextQuery(text))
        self._update_status()

    def action_filter(self) -> None:
        """Ask for a filter expression."""
        expression = self.navigator.expression
        self._input.open("filter", self._check_filter, self._filter, expression.source if expression else "")

    def _filter(self, text: str | None) -> None:
        self._focus_pane(self.navigator.sample_list)
        if text is not None:
            self.navigator.set_filter(FilterExpression(text) if text.strip() else None)

    def _check_filter(self, text: str) -> InputRemark:
        if not text.strip():
            return InputRemark("e.g. score < 0.5 and 'Traceback' in output · empty: no filter · ?: help")
        try:
            expression = FilterExpression(text)
        except ExpressionError as error:
            return InputRemark(str(error), error.column)
        if self.pane.record is not None:
            known = (*FIELD_NAMES, *self.pane.record.fields)
            for name in sorted(expression.names - set(known)):
                return InputRemark(f"this sample has no field {name!r}{did_you_mean(name, known)}")
        return InputRemark(f"enter: list matches in {'all steps' if self.navigator.lists_all_steps else 'this step'}")

    def action_request_id(self) -> None:
        """Ask for a request ID."""
        hint = InputRemark("enter: go to the sample · hyphens are ignored")
        self._input.open("request id", lambda _: hint, self._find_request_id)

    def _find_request_id(self, text: str | None) -> None:
        self._focus_pane(self.navigator.sample_list)
        if text is not None and text.strip():
            self.background.find_request_id(text.strip(), self.navigator.steps)

    def action_move_match(self, by: int) -> None:
        """Go to the next or the previous match."""
        if self.search.current is None:
            self.notify("No search. Press f to find text.")
        self.search.move(by)
        self._update_status()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.navigator.sort(self.navigator.order.next())

    def action_reverse_order(self) -> None:
        """Reverse the order."""
        self.navigator.sort(self.navigator.order.reversed())

    def action_all_steps(self) -> None:
        """Switch between all steps and one."""
        self.navigator.toggle_all_steps()

    # Displays

    def action_cycle_display(self) -> None:
        """Switch between conversation, plain text and table."""
        following = {Display.CONVERSATION: Display.PLAIN, Display.PLAIN: Display.TABLE}
        self.action_show_display(following.get(self.pane.current_display, Display.CONVERSATION))

    def action_show_display(self, name: str) -> None:
        """Show the sample in a display."""
        shown, display = self.pane.current_display, Display(name)
        self.pane.set_display(display)
        if shown.shows_fields != display.shows_fields:  # another text is searched
            self.search.restart()
            self._update_status()

    def action_tokens(self) -> None:
        """Show the tokens, or switch between text and one token per line."""
        if self.pane.current_display is Display.TOKENS:
            self.pane.tokens.toggle_one_per_line()
        else:
            self.action_show_display(Display.TOKENS)

    def action_rewards(self) -> None:
        """Show or hide the rewards."""
        is_shown = self.pane.current_display is Display.REWARDS
        self.action_show_display(Display.CONVERSATION if is_shown else Display.REWARDS)

    def action_fold(self) -> None:
        """Unfold all blocks, or fold them."""
        if self.pane.current_display is Display.TOKENS or not self.pane.document.fold_all():
            self.notify("Nothing to fold.")

    def action_fields(self) -> None:
        """Choose the fields that the plain and table displays show."""
        if self.pane.record is None:
            self.notify("No sample selected.")
            return
        names = list(dict.fromkeys([*self.pane.record.fields, *self.pane.hidden_fields]))
        self.app.push_screen(FieldChoice(names, self.pane.hidden_fields), self._hide_fields)

    def _hide_fields(self, hidden: frozenset[str] | None) -> None:
        if hidden is not None and hidden != self.pane.hidden_fields:
            self.pane.hidden_fields = hidden
            display = self.pane.current_display
            self.action_show_display(display if display.shows_fields else Display.PLAIN)

    def action_compare(self) -> None:
        """Compare with another sample of the group."""
        from toolroll.viewer.screens.compare import CompareScreen, group_rows

        if self.pane.position is None or self.pane.record is None:
            self.notify("No sample selected.")
        elif len(rows := group_rows(*self.pane.position)) > 1:
            self.app.push_screen(CompareScreen(rows, self.pane.position))
        else:
            self.notify("This step has no other sample of the group.")

    def action_plots(self) -> None:
        """Show the plots. Large directories are counted only while they are shown."""
        from toolroll.viewer.screens.plots import PlotScreen  # imports plotext, which is slow

        self.background.count_steps(self.navigator.steps)
        self.app.push_screen(PlotScreen(self.navigator), self._plots_closed)

    def _plots_closed(self, _: None) -> None:
        if not self.navigator.counts_all_steps:
            self.background.cancel("count")
            self._show_counting([])

    # Export

    def _markdown(self) -> str | None:
        """Return the sample as Markdown, or notify the user if there is none."""
        if self.pane.position is None or self.pane.record is None:
            self.notify("No sample selected.")
            return None
        step, row = self.pane.position
        return markdown(self.pane.record, f"step {step.name}, sample {row + 1}")

    def action_copy(self) -> None:
        """Copy the sample as Markdown."""
        text = self._markdown()
        if text is not None:
            self.app.copy_to_clipboard(text)
            is_long = len(text) > MAX_CLIPBOARD_CHARS
            hint = " Your terminal may reject that much; press e to save a file instead." if is_long else ""
            self.notify(f"Copied {len(text):,} characters of Markdown.{hint}")

    def action_export(self) -> None:
        """Save the sample as Markdown."""
        text = self._markdown()
        if text is not None and self.pane.position is not None:
            export_sample(self.app, self.pane.position, text)
