"""ShelfScreen: steps and samples in lists, the sample beside or below them, and how one moves among them."""

from __future__ import annotations

import re
from typing import Literal

from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from toolroll.records.index import Shelf, StepFile
from toolroll.viewer import figures
from toolroll.viewer.background import Background
from toolroll.viewer.expression import Expression
from toolroll.viewer.harmless import one_line
from toolroll.viewer.key_bar import KeyBar
from toolroll.viewer.keys import KEYS
from toolroll.viewer.listing import Listing, Place
from toolroll.viewer.lists import SampleList, StepList
from toolroll.viewer.needle import Needle
from toolroll.viewer.ordering import COLUMNS, Order
from toolroll.viewer.prompt import Prompt
from toolroll.viewer.rows_view import RowsView, cut_left
from toolroll.viewer.sample_pane import SamplePane
from toolroll.viewer.token_text import TokenText

FIRST = 0.1
"""Seconds that may pass before the first rows are shown; the rest is listed by a thread."""
SURVEYED = 256_000_000
"""Bytes up to which all steps are counted unasked. What is larger is read when it is asked for."""

Target = Place | Literal["first", "last", "here"]
"""Where to be when the list is another: on a sample, at an end, or where one is if that is listed."""


class ShelfScreen(Screen[None]):
    """The lists and the sample."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 (as textual declares it)
    DEFAULT_CSS = """
    ShelfScreen { layout: vertical; }
    ShelfScreen #title, ShelfScreen #status { height: 1; background: $panel; padding: 0 1; }
    ShelfScreen #status { display: none; background: $primary 20%; }
    ShelfScreen #status.-said { display: block; }
    ShelfScreen #main { height: 1fr; layout: vertical; }
    ShelfScreen #lists { height: 40%; min-height: 5; max-height: 24; }
    ShelfScreen #steps { width: 21; border-right: solid $panel; }
    ShelfScreen #samples { width: 1fr; }
    ShelfScreen #sample { height: 1fr; width: 1fr; }
    ShelfScreen.-narrow.-reading #lists { display: none; }
    ShelfScreen.-wide #main { layout: horizontal; }
    ShelfScreen.-wide #lists { height: 1fr; max-height: 100%; width: 49%; max-width: 108; border-right: solid $panel; }
    """

    def __init__(
        self, shelf: Shelf, *, tokenizer: TokenText | None, mask: re.Pattern[str] | None, follow: bool, every: float
    ) -> None:
        super().__init__()
        self.following = follow
        self.shelf = shelf
        self.steps = shelf.steps
        self.step: StepFile | None = None
        """The one that is open."""
        self.all = False
        """Whether all steps are listed."""
        self.wanted: Expression | None = None
        self.order = Order()
        self.listing = Listing([])
        self.listed = True
        """Whether the list is whole."""
        self.background = Background(shelf)
        self.step_list = StepList(self.background.figures_of)
        self.sample_list = SampleList()
        self.pane = SamplePane(tokenizer, mask)
        self.prompt = Prompt()
        self._every = every
        self._target: Target = "here"
        self._surveyed: tuple[int, int] | None = None
        self._told: tuple[Content, str] | None = None

    def compose(self) -> ComposeResult:
        """The title, the lists, the sample, the keys."""
        yield Static("", id="title", markup=False)
        with Container(id="main"):
            with Horizontal(id="lists"):
                yield self.step_list
                yield self.sample_list
            yield self.pane
        yield Static("", id="status", markup=False)
        yield self.prompt
        yield KeyBar(KEYS)
        yield self.background

    def on_mount(self) -> None:
        """Show the first step, and begin to look for more."""
        self.directory_changed()
        self.sample_list.focus()
        self.set_interval(self._every, self.background.look)

    def on_resize(self) -> None:
        """The title has another width."""
        self.tell()

    @property
    def needle(self) -> Needle | None:
        """What is searched for."""
        return None

    # What is listed

    @on(Background.Looked)
    def _looked(self) -> None:
        self.directory_changed()

    def directory_changed(self) -> None:
        """Show the steps that there are now, and go on with the one that is open."""
        self.steps = self.shelf.steps
        self.step_list.show(self.steps)
        if not self.steps:
            self.step = None
            self.list_anew()
        elif self.following:
            self.open(self._newest(), "last")
        elif self.step not in self.steps:
            self.open(self.steps[0])
        else:
            self.list_anew()
        if self.is_small:
            self.background.survey(self.steps)

    @property
    def is_small(self) -> bool:
        """Whether all steps are counted unasked."""
        return sum(step.size for step in self.steps) <= SURVEYED

    def open(self, step: StepFile, target: Target = "first") -> None:
        """List a step."""
        self.step = step
        self.step_list.put_cursor(self.steps.index(step))
        self.list_anew(target)

    def list_anew(self, target: Target = "here") -> None:
        """List what is wanted now."""
        steps = self.steps if self.all else [self.step] if self.step is not None else []
        asked = (self.wanted, self.order)
        is_stale = self.listing.is_stale
        if is_stale or self.listing.steps != steps or (self.listing.wanted, self.listing.order) != asked:
            self.listing = Listing(steps, *asked)
        if is_stale:  # what is shown may be in its place no more
            self.pane.forget()
        self._target = target
        self.listed = self.listing.advance(FIRST)
        self._show_listing()
        if not self.listed or any(self.background.figures_of(step) is None for step in steps):
            self.background.list(self.listing)

    @on(Background.Listed)
    def _more_listed(self, event: Background.Listed) -> None:
        if event.listing is self.listing:
            self.listed = event.done
            self._show_listing()
            self.step_list.refresh()

    def _show_listing(self) -> None:
        self.sample_list.said_empty = "reading …" if not self.listed else "none matches" if self.wanted else "none"
        self.sample_list.show(self.listing, with_step=self.all)
        row = self._target_row()
        if row is not None:
            self.select(row)
        elif not len(self.listing) and self.listed:
            self.pane.nothing = self._why_empty()
            self.pane.show(None)
        self.tell()

    def _target_row(self) -> int | None:
        """The row to be on; None where it isn't listed yet, or there is none."""
        if not len(self.listing):
            return None
        if self._target == "first":
            self._target = "here"
            return 0
        if self._target == "last":
            self._target = "here" if self.listed else "last"
            return len(self.listing) - 1
        place = self.pane.place if self._target == "here" else self._target
        row = self.listing.find(place) if place is not None else 0
        if row is not None or self.listed:
            self._target = "here"
        return 0 if row is None and self.listed else row

    def _why_empty(self) -> str:
        if not self.steps:
            return (
                f"No dumps yet in {one_line(str(self.shelf.directory))}\n"
                "A run that has this as its rollout_data_dir writes one file per step, 1.jsonl, 2.jsonl, and so on. "
                "They appear here as they are written."
            )
        if self.wanted is not None:
            many = figures.plural(self.listing.looked_at, "sample")
            return f"No sample matches\n{one_line(self.wanted.source)}\n{many} were looked at. / changes the filter."
        if self.all or self.step is None:
            return "No samples in any step"
        return f"Step {one_line(self.step.name)} has no samples\nIts file is empty. N goes to the next step."

    def select(self, row: int) -> None:
        """Show a sample of the list."""
        if not 0 <= row < len(self.listing):
            return
        place = self.listing[row]
        self.sample_list.put_cursor(row)
        if place.step in self.steps:
            self.step = place.step
            self.step_list.put_cursor(self.steps.index(place.step))
        if place != self.pane.place or self.pane.record is None:
            self.pane.show(place, self.needle)
        self.tell()

    def go(self, place: Place) -> None:
        """Show a sample, wherever it is."""
        row = self.listing.find(place)
        if row is not None:
            self.select(row)
        elif self.all:
            self.list_anew(place)
        else:
            self.open(place.step, place)

    def _newest(self) -> StepFile:
        numbered = [step for step in self.steps if step.step is not None]
        return (numbered or self.steps)[-1]

    @on(RowsView.Chosen, "#steps")
    def _step_chosen(self, event: RowsView.Chosen) -> None:
        self.following = False
        self._go_to_step(self.steps[event.row])

    @on(RowsView.Chosen, "#samples")
    def _sample_chosen(self, event: RowsView.Chosen) -> None:
        self.following = False
        self.select(event.row)

    @on(SampleList.SortAsked)
    def _sort_asked(self, event: SampleList.SortAsked) -> None:
        if event.column in COLUMNS:
            same = event.column == self.order.column
            self.sort(self.order.turned() if same else Order(event.column))

    def sort(self, order: Order) -> None:
        """List in another order."""
        self.order = order
        self.list_anew("first")

    @on(Background.Surveyed)
    def _steps_counted(self, event: Background.Surveyed) -> None:
        self.surveyed(None if event.done == event.of else (event.done, event.of))

    def surveyed(self, count: tuple[int, int] | None) -> None:
        """Say how many steps of how many are counted; None: all that will be."""
        self._surveyed = count
        self.step_list.refresh()
        self.tell()

    # What is said

    def tell(self) -> None:
        """Say in the title and below what there is and what is going on."""
        size = sum(step.size for step in self.steps)
        parts = [f"{figures.size(size)} in {figures.plural(len(self.steps), 'step')}"]
        if len(self.listing):
            number = self.sample_list.cursor + 1
            parts.insert(0, f"sample {number:,} of {len(self.listing):,}{'' if self.listed else '+'}")
        if self.step is not None:
            parts.insert(0, f"step {one_line(self.step.name, 20)}")
        if self.following:
            parts.append("following")
        name, said = "toolroll  ", " · ".join(parts)
        room = self.size.width - len(name) - len(said) - 5
        where = cut_left(one_line(str(self.shelf.directory), 1000), room)
        title = Content.assemble((name, "bold $primary"), (said, ""), (f" · {where}" if where else "", "dim"))
        status = " · ".join(self.status())
        if (title, status) == self._told:
            return
        self._told = title, status
        self.query_one("#title", Static).update(title, layout=False)
        line = self.query_one("#status", Static)
        line.update(Content(status), layout=False)
        line.set_class(bool(status), "-said")

    def status(self) -> list[str]:
        """What is going on."""
        said = []
        if self.wanted is not None:
            found = f"{len(self.listing):,} of {self.listing.looked_at:,}"
            said.append(f"filter {one_line(self.wanted.source, 60)}: {found}{'' if self.listed else ' …'}")
        if self.order != Order() and not self.sample_list.shows(self.order.column):
            said.append(f"by {self.order.column}{' ↓' if self.order.descending else ' ↑'}")
        if self._surveyed is not None:
            said.append(f"counting steps: {self._surveyed[0]:,} of {self._surveyed[1]:,}")
        return said

    # Moving

    def action_next_sample(self) -> None:
        """The next sample; after the last, the first."""
        self._by_samples(1)

    def action_previous_sample(self) -> None:
        """The previous sample; before the first, the last."""
        self._by_samples(-1)

    def _by_samples(self, by: int) -> None:
        self.following = False
        if len(self.listing):
            self.select((self.sample_list.cursor + by) % len(self.listing))

    def action_next_step(self) -> None:
        """The next step; after the last, the first."""
        self._by_steps(1)

    def action_previous_step(self) -> None:
        """The previous step; before the first, the last."""
        self._by_steps(-1)

    def _by_steps(self, by: int) -> None:
        self.following = False
        if self.steps:
            now = self.steps.index(self.step) if self.step in self.steps else 0
            self._go_to_step(self.steps[(now + by) % len(self.steps)])

    def _go_to_step(self, step: StepFile) -> None:
        """To the first sample of a step."""
        if not self.all:
            self.open(step)
            return
        self.step = step
        self.step_list.put_cursor(self.steps.index(step))
        row = next((row for row in range(len(self.listing)) if self.listing[row].step is step), None)
        if row is not None:
            self.select(row)

    def action_page_down(self) -> None:
        """A page down in the sample."""
        self.pane.content.scroll_page_down(animate=False)

    def action_page_up(self) -> None:
        """A page up in the sample."""
        self.pane.content.scroll_page_up(animate=False)

    def action_page_home(self) -> None:
        """To the beginning of the sample."""
        self.pane.content.scroll_home(animate=False)

    def action_page_end(self) -> None:
        """To the end of the sample."""
        self.pane.content.scroll_end(animate=False)

    def action_next_pane(self) -> None:
        """To the next pane."""
        self._by_panes(1)

    def action_previous_pane(self) -> None:
        """To the previous pane."""
        self._by_panes(-1)

    def _by_panes(self, by: int) -> None:
        panes: list[Widget] = [self.step_list, self.sample_list, self.pane.content]
        now = panes.index(self.focused) if self.focused in panes else 1
        self.go_to_pane(panes[(now + by) % len(panes)])

    def go_to_pane(self, pane: Widget) -> None:
        """To a pane. On a narrow screen the sample has it to itself while one reads."""
        self.set_class(pane is self.pane.content, "-reading")
        pane.focus()

    def action_follow(self) -> None:
        """Go along with a run, or no longer."""
        self.following = not self.following
        if self.following and self.steps:
            self.open(self._newest(), "last")
        self.tell()
