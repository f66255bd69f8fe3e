"""BrowseScreen: steps and samples in lists, and the sample beside or below them."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from toolroll.errors import did_you_mean
from toolroll.records.index import Shelf, StepFile
from toolroll.viewer import figures
from toolroll.viewer.background import Background
from toolroll.viewer.export import export_sample, sample_markdown
from toolroll.viewer.expression import Expression, ExpressionError
from toolroll.viewer.field_choice import FieldChoice
from toolroll.viewer.harmless import one_line
from toolroll.viewer.help import HelpScreen
from toolroll.viewer.key_bar import KeyBar
from toolroll.viewer.keys import KEYS, bindings
from toolroll.viewer.listing import NAMES, Listing, Place
from toolroll.viewer.lists import SampleList, StepList
from toolroll.viewer.needle import Needle
from toolroll.viewer.ordering import COLUMNS, Order
from toolroll.viewer.prompt import Prompt
from toolroll.viewer.rows_view import RowsView
from toolroll.viewer.sample_pane import CONVERSATION, PLAIN, REWARDS, TABLE, TOKENS, SamplePane
from toolroll.viewer.search import Search
from toolroll.viewer.token_text import TokenText

FIRST = 0.1
"""Seconds that may pass before the first rows are shown; the rest is listed by a thread."""
SURVEYED = 256_000_000
"""Bytes up to which all steps are counted unasked. What is larger is read when it is asked for."""
COPIED = 75_000
"""Characters that every terminal takes into its clipboard."""


class BrowseScreen(Screen[None]):
    """The first screen."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]
    CSS = """
    BrowseScreen { layout: vertical; }
    #title, #status { height: 1; background: $panel; padding: 0 1; }
    #status { display: none; background: $primary 20%; }
    #status.-said { display: block; }
    #main { height: 1fr; layout: vertical; }
    #lists { height: 40%; min-height: 5; max-height: 24; }
    #steps { width: 22; border-right: solid $panel; }
    #samples { width: 1fr; }
    #sample { height: 1fr; width: 1fr; }
    .-narrow.-reading #lists { display: none; }
    .-wide #main { layout: horizontal; }
    .-wide #lists { height: 1fr; max-height: 100%; width: 44%; max-width: 100; border-right: solid $panel; }
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        tokenizer: TokenText | None = None,
        mask: re.Pattern[str] | None = None,
        follow: bool = False,
        every: float = 1.0,
    ) -> None:
        super().__init__()
        self.following = follow
        self._shelf = shelf
        self._every = every
        self._steps = shelf.steps
        self._step: StepFile | None = None
        self._all = False
        self._wanted: Expression | None = None
        self._order = Order()
        self._listing = Listing([])
        self._listed = True
        self._target: Place | str | None = None
        """Where to go when it is listed: a place, or "last"."""
        self._search: Search | None = None
        self._searched = True
        self._surveyed: tuple[int, int] | None = None
        self._background = Background(shelf)
        self._step_list = StepList(self._background.figures_of)
        self._sample_list = SampleList()
        self._pane = SamplePane(tokenizer, mask)
        self._prompt = Prompt()

    def compose(self) -> ComposeResult:
        """The title, the lists, the sample, the keys."""
        yield Static("", id="title", markup=False)
        with Container(id="main"):
            with Horizontal(id="lists"):
                yield self._step_list
                yield self._sample_list
            yield self._pane
        yield Static("", id="status", markup=False)
        yield self._prompt
        yield KeyBar(KEYS)
        yield self._background

    def on_mount(self) -> None:
        """Show the first step, and begin to look for more."""
        self._show_steps()
        self._sample_list.focus()
        self.set_interval(self._every, self._background.look)
        if sum(step.size for step in self._steps) <= SURVEYED:
            self._background.survey(self._steps)

    # What is listed

    def _show_steps(self) -> None:
        """Show the steps that there are, and go on with the one that is open."""
        self._steps = self._shelf.steps
        self._step_list.show(self._steps)
        if not self._steps:
            self._step = None
            self._list_anew()
        elif self.following:
            self._open(self._newest(), "last")
        elif self._step not in self._steps:
            self._open(self._steps[0])
        else:
            self._list_anew(self._pane.place)
        self._tell()

    def _newest(self) -> StepFile:
        numbered = [step for step in self._steps if step.step is not None]
        return (numbered or self._steps)[-1]

    def _open(self, step: StepFile, target: Place | str | None = None) -> None:
        """List a step, from its first sample on or from where one wants to be."""
        self._step = step
        self._step_list.put_cursor(self._steps.index(step))
        self._list_anew(target)

    def _list_anew(self, target: Place | str | None = None) -> None:
        """List what is wanted now."""
        steps = self._steps if self._all else [self._step] if self._step is not None else []
        asked = (self._wanted, self._order)
        same = self._listing.steps == steps and (self._listing.wanted, self._listing.order) == asked
        if not same or self._listing.is_stale:
            self._listing = Listing(steps, *asked)
            self._pane.place = None if not isinstance(target, Place) else self._pane.place
        self._target = target
        self._listed = self._listing.advance(FIRST)
        self._show_listing()
        if not self._listed or any(self._background.figures_of(step) is None for step in steps):
            self._background.list(self._listing)

    @on(Background.Listed)
    def _more_listed(self, event: Background.Listed) -> None:
        if event.listing is self._listing:
            self._listed = event.done
            self._show_listing()
            self._step_list.refresh()

    def _show_listing(self) -> None:
        self._sample_list.said_empty = self._why_empty()
        self._sample_list.show(self._listing, with_step=self._all)
        row = self._target_row()
        if row is not None:
            self._select(row)
        elif not len(self._listing) and self._listed:
            self._pane.nothing = self._why_empty()
            self._pane.show(None)
        self._tell()

    def _target_row(self) -> int | None:
        """The row to go to now; None where one is there, or it isn't listed yet."""
        if not len(self._listing):
            return None
        if isinstance(self._target, Place):
            row = self._listing.find(self._target)
            if row is not None or self._listed:
                self._target = None
            return 0 if row is None and self._pane.place is None else row
        if self._target == "last":
            if self._listed:
                self._target = None
            return len(self._listing) - 1
        return 0 if self._pane.place is None else None

    def _why_empty(self) -> str:
        if not self._steps:
            return (
                f"No dumps yet in {one_line(str(self._shelf.directory))}.\n"
                "A run that has it as its rollout_data_dir writes one file per step, 1.jsonl, 2.jsonl, …\n"
                "They appear here as they are written."
            )
        if not self._listed:
            return "reading …"
        if self._wanted is not None:
            return f"No sample of {self._listing.looked_at:,} matches {one_line(self._wanted.source)}"
        if self._all:
            return "No samples in any step."
        return f"Step {one_line(self._step.name) if self._step else ''} has no samples: its file is empty."

    def _select(self, row: int) -> None:
        """Show a sample of the list."""
        if not 0 <= row < len(self._listing):
            return
        place = self._listing[row]
        self._sample_list.put_cursor(row)
        if place.step in self._steps:
            self._step = place.step
            self._step_list.put_cursor(self._steps.index(place.step))
        if place != self._pane.place or self._pane.record is None:
            self._pane.show(place, self._needle)
        self._tell()

    def _go(self, place: Place) -> None:
        """Show a sample wherever it is."""
        row = self._listing.find(place)
        if row is not None:
            self._select(row)
        else:
            self._open(place.step, place)

    @on(RowsView.Chosen, "#steps")
    def _step_chosen(self, event: RowsView.Chosen) -> None:
        step = self._steps[event.row]
        if self._all:
            self._go_to_step(step)
        elif step is not self._step:
            self._open(step)

    @on(RowsView.Chosen, "#samples")
    def _sample_chosen(self, event: RowsView.Chosen) -> None:
        self.following = False
        self._select(event.row)

    @on(SampleList.SortAsked)
    def _sort_asked(self, event: SampleList.SortAsked) -> None:
        if event.column in COLUMNS:
            same = event.column == self._order.column
            self._set_order(self._order.turned() if same else Order(event.column))

    # The directory

    @on(Background.Looked)
    def _directory_changed(self) -> None:
        self._show_steps()
        if sum(step.size for step in self._steps) <= SURVEYED:
            self._background.survey(self._steps)
        if self._search is not None:
            if self._search.is_stale or set(self._search.steps) != set(self._steps):
                self._start_search(self._search.needle, go=False)
            else:
                self._background.search(self._search)

    @on(Background.Surveyed)
    def _steps_counted(self, event: Background.Surveyed) -> None:
        self._surveyed = None if event.done == event.of else (event.done, event.of)
        self._step_list.refresh()
        self._tell()

    # What is said

    def _tell(self) -> None:
        """Say in the title and below what there is and what is going on."""
        size = sum(step.size for step in self._steps)
        parts = [f"toolroll · {one_line(str(self._shelf.directory))}", figures.plural(len(self._steps), "step")]
        parts.append(figures.size(size))
        if len(self._listing):
            number = self._sample_list.cursor + 1
            parts.append(f"sample {number:,} of {len(self._listing):,}{'' if self._listed else '+'}")
        if self.following:
            parts.append("following")
        self.query_one("#title", Static).update(Content(" · ".join(parts)))
        status = " · ".join(self._status())
        line = self.query_one("#status", Static)
        line.update(Content(status))
        line.set_class(bool(status), "-said")

    def _status(self) -> list[str]:
        said = []
        if self._wanted is not None:
            found = f"{len(self._listing):,} of {self._listing.looked_at:,}"
            said.append(f"filter {one_line(self._wanted.source, 60)}: {found}{'' if self._listed else ' …'}")
        if self._order != Order():
            said.append(f"by {self._order.column}{' ↓' if self._order.descending else ' ↑'}")
        if self._search is not None:
            said.append(self._search_status(self._search))
        if self._surveyed is not None:
            said.append(f"counting steps: {self._surveyed[0]:,} of {self._surveyed[1]:,}")
        return said

    def _search_status(self, search: Search) -> str:
        found = f"{figures.plural(search.matches, 'match', 'matches')} in {figures.plural(len(search), 'sample')}"
        here = self._pane.document.current_match
        if here is not None and self._pane.place is not None:
            number = search.find(self._pane.place)
            if number is not None:
                found = f"match {search.before(number) + here + 1:,} of {search.matches:,} in {len(search):,} samples"
        going = "" if self._searched else f", searching step {search.steps_done + 1:,} of {len(search.steps):,} …"
        return f"find {one_line(search.needle.text, 40)}: {found}{going}"

    # Moving: n p N P j k g G tab enter esc

    def action_next_sample(self) -> None:
        """The next sample; after the last, the first."""
        self._by_samples(1)

    def action_previous_sample(self) -> None:
        """The previous sample; before the first, the last."""
        self._by_samples(-1)

    def _by_samples(self, by: int) -> None:
        self.following = False
        if len(self._listing):
            self._select((self._sample_list.cursor + by) % len(self._listing))

    def action_next_step(self) -> None:
        """The next step; after the last, the first."""
        self._by_steps(1)

    def action_previous_step(self) -> None:
        """The previous step; before the first, the last."""
        self._by_steps(-1)

    def _by_steps(self, by: int) -> None:
        self.following = False
        if not self._steps:
            return
        now = self._steps.index(self._step) if self._step in self._steps else 0
        step = self._steps[(now + by) % len(self._steps)]
        if self._all:
            self._go_to_step(step)
        else:
            self._open(step)

    def _go_to_step(self, step: StepFile) -> None:
        """To the first sample of a step, in a list of all."""
        self._step = step
        self._step_list.put_cursor(self._steps.index(step))
        for row in range(len(self._listing)):
            if self._listing[row].step is step:
                self._select(row)
                return

    def action_page_down(self) -> None:
        """A page down in the sample."""
        self._pane.content.scroll_page_down(animate=False)

    def action_page_up(self) -> None:
        """A page up in the sample."""
        self._pane.content.scroll_page_up(animate=False)

    def action_page_home(self) -> None:
        """To the beginning of the sample."""
        self._pane.content.scroll_home(animate=False)

    def action_page_end(self) -> None:
        """To the end of the sample."""
        self._pane.content.scroll_end(animate=False)

    def action_next_pane(self) -> None:
        """To the next pane."""
        self._by_panes(1)

    def action_previous_pane(self) -> None:
        """To the previous pane."""
        self._by_panes(-1)

    def _by_panes(self, by: int) -> None:
        panes: list[Widget] = [self._step_list, self._sample_list, self._pane.content]
        now = panes.index(self.focused) if self.focused in panes else 1
        self._focus(panes[(now + by) % len(panes)])

    def _focus(self, pane: Widget) -> None:
        """Go to a pane. On a narrow screen the sample has it to itself while one reads."""
        self.set_class(pane is self._pane.content, "-reading")
        pane.focus()

    def action_open(self) -> None:
        """Open what the cursor is on; in a sample, the next match."""
        if self.focused is self._pane.content:
            self.action_next_match()
        elif self.focused is self._step_list:
            self._focus(self._sample_list)
        else:
            self._focus(self._pane.content)

    def action_back(self) -> None:
        """Close what was opened last."""
        if self._search is not None:
            self._search = None
            self._background.stop_searching()
            self._pane.document.mark(None)
        elif self._pane.display_name != CONVERSATION:
            self.action_show_display(CONVERSATION)
        elif self.focused is self._pane.content:
            self._focus(self._sample_list)
        elif self._wanted is not None:
            self._wanted = None
            self._list_anew(self._pane.place)
        self._tell()

    # Finding: f . , / o O a i

    @property
    def _needle(self) -> Needle | None:
        return self._search.needle if self._search is not None else None

    def action_find(self) -> None:
        """Ask what to find."""
        needle = self._needle
        self._prompt.open("find", _check_find, needle.text if needle else "")

    def action_filter(self) -> None:
        """Ask what to filter by."""
        self._prompt.open("filter", self._check_filter, self._wanted.source if self._wanted else "")

    def action_request_id(self) -> None:
        """Ask for a request id."""
        self._prompt.open("request id", lambda _: ("enter goes to it · hyphens don't count", False))

    def _check_filter(self, text: str) -> tuple[str, bool]:
        """What is wrong with a filter, while it is typed."""
        if not text.strip():
            return "e.g. score < 0.5 and 'Traceback' in output · enter with nothing: no filter · ? says more", False
        try:
            expression = Expression(text)
        except ExpressionError as error:
            return f"{'─' * min(error.column, 40)}^ {error}", True
        known = [*NAMES, *(self._pane.record.fields if self._pane.record else ())]
        unknown = sorted(expression.names - set(known))
        if unknown and self._pane.record is not None:
            return f"this sample has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}", False
        return f"enter: list what matches in {'all steps' if self._all else 'this step'}", False

    @on(Prompt.Given)
    def _prompt_given(self, event: Prompt.Given) -> None:
        self._focus(self._pane.content if event.kind == "find" else self._sample_list)
        if event.kind == "filter":
            self._wanted = Expression(event.text) if event.text.strip() else None
            self._list_anew(self._pane.place)
        elif event.kind == "find":
            if event.text:
                self._start_search(Needle(event.text))
            else:
                self.action_back()
        elif event.text.strip():
            self._background.find_id(event.text.strip(), self._steps)

    @on(Prompt.Closed)
    def _prompt_closed(self, event: Prompt.Closed) -> None:
        self._focus(self._sample_list)
        if event.kind == "find" and self._search is not None:
            self.action_back()

    def _start_search(self, needle: Needle, *, go: bool = True) -> None:
        if self._pane.display_name in (TOKENS, REWARDS):
            self.action_show_display(CONVERSATION)
        first = self._steps.index(self._step) if self._step in self._steps else 0
        self._search = Search(self._steps, first, needle, self._pane.searched, self._wanted)
        self._searched = self._search.advance(FIRST)
        self._pane.document.mark(needle)
        if go:
            self._to_first_match()
        if not self._searched:
            self._background.search(self._search)
        self._tell()

    @on(Background.Found)
    def _more_found(self, event: Background.Found) -> None:
        if event.search is self._search:
            self._searched = event.done
            if self._pane.document.current_match is None and not self._pane.document.matches:
                self._to_first_match()
            self._tell()

    def _to_first_match(self) -> None:
        """To a match in the sample that is shown, else to the first there is."""
        if self._search is None:
            return
        if self._pane.document.matches:
            self._pane.document.go_to_match(0)
        elif len(self._search):
            self._to_match(0)

    def _to_match(self, match: int) -> None:
        """To a match by its number in the whole search."""
        assert self._search is not None
        number = self._search.sample_of(match)
        place = self._search.sample(number)
        if place != self._pane.place:
            self._go(place)
        self._pane.document.go_to_match(match - self._search.before(number))
        self._tell()

    def action_next_match(self) -> None:
        """To the next match, here or in another sample."""
        self._by_matches(1)

    def action_previous_match(self) -> None:
        """To the previous match."""
        self._by_matches(-1)

    def _by_matches(self, by: int) -> None:
        search, view = self._search, self._pane.document
        if search is None:
            self.notify("Nothing is searched for: f asks for a text.")
            return
        if not search.matches:
            return
        number = search.find(self._pane.place) if self._pane.place is not None else None
        if number is None:
            self._to_match(0)
        elif view.current_match is None:
            view.go_to_match(0 if by > 0 else view.matches - 1)
        else:
            self._to_match((search.before(number) + view.current_match + by) % search.matches)
        self._tell()

    @on(Background.IdFound)
    def _id_found(self, event: Background.IdFound) -> None:
        if event.place is None:
            self.notify(f"No sample has the request id {one_line(event.text, 60)}.", severity="warning", markup=False)
            return
        if self._wanted is not None:
            self._wanted = None
            self.notify("The filter was dropped, to show it.")
        self._list_anew(event.place) if self._all else self._open(event.place.step, event.place)

    def action_sort(self) -> None:
        """By the next column."""
        self._set_order(self._order.next())

    def action_turn_order(self) -> None:
        """The other way around."""
        self._set_order(self._order.turned())

    def _set_order(self, order: Order) -> None:
        self._order = order
        self._pane.place = None
        self._list_anew()

    def action_all_steps(self) -> None:
        """All steps, or one."""
        self._all = not self._all
        self._list_anew(self._pane.place)

    # Looking: s d z t r c l

    def action_switch_display(self) -> None:
        """Conversation, plain text, table."""
        modes = (CONVERSATION, PLAIN, TABLE)
        now = modes.index(self._pane.display_name) if self._pane.display_name in modes else -1
        self.action_show_display(modes[(now + 1) % len(modes)])

    def action_show_display(self, name: str) -> None:
        """Show the sample in one of its displays."""
        before = self._pane.display_name in (PLAIN, TABLE)
        self._pane.set_display(name, self._needle)
        if self._search is not None and before != (name in (PLAIN, TABLE)):
            self._start_search(self._search.needle, go=False)

    def action_tokens(self) -> None:
        """The tokens, in one form or the other."""
        if self._pane.display_name == TOKENS:
            self._pane.switch_tokens()
        else:
            self.action_show_display(TOKENS)

    def action_rewards(self) -> None:
        """What it earned."""
        self.action_show_display(CONVERSATION if self._pane.display_name == REWARDS else REWARDS)

    def action_fold(self) -> None:
        """Unfold everything, or fold it again."""
        if self._pane.display_name == TOKENS or not self._pane.document.fold_all():
            self.notify("Nothing here can be folded.")

    def action_fields(self) -> None:
        """Choose the fields."""
        record = self._pane.record
        if record is None:
            self.notify("There is no sample to choose fields of.")
            return
        names = list(dict.fromkeys([*record.fields, *self._pane.hidden_fields]))
        self.app.push_screen(FieldChoice(names, self._pane.hidden_fields), self._fields_chosen)

    def _fields_chosen(self, hidden: frozenset[str] | None) -> None:
        if hidden is not None and hidden != self._pane.hidden_fields:
            self._pane.hidden_fields = hidden
            name = self._pane.display_name
            self._pane.set_display(name if name in (PLAIN, TABLE) else PLAIN, self._needle)

    def action_compare(self) -> None:
        """Beside another sample of its group."""
        from toolroll.viewer.compare import CompareScreen

        if self._pane.place is None or self._pane.record is None:
            self.notify("There is no sample to compare.")
            return
        screen = CompareScreen.of(self._pane.place, self._pane.record)
        if screen is None:
            self.notify("No other sample of its group is in this step.")
        else:
            self.app.push_screen(screen)

    def action_plots(self) -> None:
        """By step."""
        from toolroll.viewer.plots import PlotScreen

        self._background.survey(self._steps)
        self.app.push_screen(PlotScreen(lambda: self._shelf.steps, self._background.figures_of))

    # And: F y e ?

    def action_follow(self) -> None:
        """Go along with a run, or no longer."""
        self.following = not self.following
        if self.following and self._steps:
            self._open(self._newest(), "last")
        self._tell()

    def action_copy(self) -> None:
        """Copy the sample."""
        text = sample_markdown(self._pane.place, self._pane.record)
        if text is None:
            self.notify("There is no sample to copy.")
            return
        self.app.copy_to_clipboard(text)
        more = ": more than many terminals take; e writes a file" if len(text) > COPIED else ""
        self.notify(f"Copied {len(text):,} characters of Markdown{more}.")

    def action_export(self) -> None:
        """Write the sample to a file."""
        export_sample(self.app, self._pane.place, self._pane.record)

    def action_help(self) -> None:
        """The help."""
        self.app.push_screen(HelpScreen())


def _check_find(text: str) -> tuple[str, bool]:
    said = "enter finds it in every sample of every step · esc stops · small letters find capitals too"
    return said, False
