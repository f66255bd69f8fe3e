"""FindingScreen: the lists, and how one finds something in them: search, filter, order, request id."""

from __future__ import annotations

import re

from textual import on

from toolroll.errors import did_you_mean
from toolroll.records.index import Shelf
from toolroll.viewer import figures
from toolroll.viewer.background import Background
from toolroll.viewer.expression import Expression, ExpressionError
from toolroll.viewer.harmless import one_line
from toolroll.viewer.listing import NAMES, Place
from toolroll.viewer.needle import Needle
from toolroll.viewer.prompt import Prompt, Remark
from toolroll.viewer.sample_pane import CONVERSATION, SEARCHED
from toolroll.viewer.search import Search
from toolroll.viewer.shelf_screen import FIRST, ShelfScreen
from toolroll.viewer.token_text import TokenText

FIND, FILTER, REQUEST_ID = "find", "filter", "request id"


class FindingScreen(ShelfScreen):
    """Finding."""

    def __init__(
        self, shelf: Shelf, *, tokenizer: TokenText | None, mask: re.Pattern[str] | None, follow: bool, every: float
    ) -> None:
        super().__init__(shelf, tokenizer=tokenizer, mask=mask, follow=follow, every=every)
        self.search: Search | None = None
        self.searched = True
        """Whether the search is through."""
        self._wanted_match: tuple[Place, int] | None = None

    @property
    def needle(self) -> Needle | None:
        """What is searched for."""
        return self.search.needle if self.search is not None else None

    def status(self) -> list[str]:
        """What is going on."""
        said = super().status()
        return said if self.search is None else [*said, self._search_status(self.search)]

    def _search_status(self, search: Search) -> str:
        found = f"{figures.plural(search.matches, 'match', 'matches')} in {figures.plural(len(search), 'sample')}"
        here = self.pane.document.current_match
        number = search.find(self.pane.place) if self.pane.place is not None else None
        if here is not None and number is not None:
            found = f"match {search.before(number) + here + 1:,} of {search.matches:,} in {len(search):,} samples"
        going = "" if self.searched else f", in step {search.steps_done + 1:,} of {len(search.steps):,} …"
        return f"find {one_line(search.needle.text, 40)}: {found}{going}"

    # Asking

    def action_find(self) -> None:
        """Ask what to find."""
        self.prompt.open(FIND, _remark_on_find, self.needle.text if self.needle else "")

    def action_filter(self) -> None:
        """Ask what to filter by."""
        self.prompt.open(FILTER, self._remark_on_filter, self.wanted.source if self.wanted else "")

    def action_request_id(self) -> None:
        """Ask for a request id."""
        self.prompt.open(REQUEST_ID, lambda _: Remark("enter goes to its sample · hyphens don't count"))

    def _remark_on_filter(self, text: str) -> Remark:
        """What is wrong with a filter, while it is typed."""
        if not text.strip():
            return Remark("e.g. score < 0.5 and 'Traceback' in output · empty: no filter · ? says more")
        try:
            expression = Expression(text)
        except ExpressionError as error:
            return Remark(str(error), error.column)
        record = self.pane.record
        known = [*NAMES, *(record.fields if record else ())]
        unknown = sorted(expression.names - set(known))
        if unknown and record is not None:
            return Remark(f"this sample has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        return Remark(f"enter lists what matches in {'all steps' if self.all else 'this step'}")

    @on(Prompt.Given)
    def _prompt_given(self, event: Prompt.Given) -> None:
        self.go_to_pane(self.pane.content if event.kind == FIND and event.text else self.sample_list)
        if event.kind == FILTER:
            self.wanted = Expression(event.text) if event.text.strip() else None
            self.list_anew()
        elif event.kind == FIND:
            self.stop_search()
            if event.text:
                self.start_search(Needle(event.text))
        elif event.text.strip():
            self.background.find_id(event.text.strip(), self.steps)
        self.tell()

    @on(Prompt.Closed)
    def _prompt_closed(self, event: Prompt.Closed) -> None:
        self.go_to_pane(self.sample_list)
        if event.kind == FIND:
            self.stop_search()
        self.tell()

    @on(Background.IdFound)
    def _id_found(self, event: Background.IdFound) -> None:
        if event.place is None:
            self.notify(f"No sample has the request id {one_line(event.text, 60)}.", severity="warning", markup=False)
            return
        if self.wanted is not None:
            self.wanted = None
            self.notify("The filter was dropped, to show it.")
        self.go(event.place)

    # Searching

    def start_search(self, needle: Needle, *, go: bool = True) -> None:
        """Search everything, what is near first. Without `go`, where one is stays as it is, with its marks."""
        if self.pane.display_name not in SEARCHED:
            self.pane.set_display(CONVERSATION)
        first = self.steps.index(self.step) if self.step in self.steps else 0
        self.search = Search(self.steps, first, needle, self.pane.searched, self.wanted)
        self.searched = self.search.advance(FIRST)
        if go:
            self.pane.document.mark(needle)
            self._to_first_match()
        if not self.searched:
            self.background.search(self.search)
        self.tell()

    def stop_search(self) -> None:
        """Search no more, and mark nothing."""
        if self.search is not None:
            self.search = None
            self.background.stop_searching()
            self.pane.document.mark(None)

    def directory_changed(self) -> None:
        """Show what there is now, and search what was added."""
        super().directory_changed()
        if self.search is None:
            return
        if self.search.is_stale or set(self.search.steps) != set(self.steps):
            self.start_search(self.search.needle, go=False)
        else:
            self.background.search(self.search)

    @on(Background.Found)
    def _more_found(self, event: Background.Found) -> None:
        if event.search is self.search:
            self.searched = event.done
            if not self.pane.document.matches:
                self._to_first_match()
            self.tell()

    def _to_first_match(self) -> None:
        """To a match in the sample that is shown, else to the first there is."""
        if self.pane.document.matches:
            self.pane.document.go_to_match(0)
        elif self.search is not None and len(self.search):
            self._to_match(self.search, 0)

    def action_next_match(self) -> None:
        """To the next match, here or in another sample."""
        self._by_matches(1)

    def action_previous_match(self) -> None:
        """To the previous match."""
        self._by_matches(-1)

    def _by_matches(self, by: int) -> None:
        search, view = self.search, self.pane.document
        if search is None:
            self.notify("Nothing is searched for: f asks for a text.")
            return
        if not search.matches:
            return
        number = search.find(self.pane.place) if self.pane.place is not None else None
        if number is None:
            self._to_match(search, 0)
        elif view.current_match is None:
            view.go_to_match(0 if by > 0 else view.matches - 1)
        else:
            self._to_match(search, (search.before(number) + view.current_match + by) % search.matches)
        self.tell()

    def _to_match(self, search: Search, match: int) -> None:
        """To a match by its number in the whole search."""
        number = search.sample_of(match)
        place = search.sample(number)
        self._wanted_match = place, match - search.before(number)
        self.go(place)
        self._arrive()

    def select(self, row: int) -> None:
        """Show a sample of the list."""
        super().select(row)
        self._arrive()

    def _arrive(self) -> None:
        """Go to the match for which one came to this sample."""
        if self._wanted_match is not None and self._wanted_match[0] == self.pane.place:
            self.pane.document.go_to_match(self._wanted_match[1])
            self._wanted_match = None

    # Order

    def action_sort(self) -> None:
        """By the next column."""
        self.sort(self.order.next())

    def action_turn_order(self) -> None:
        """The other way around."""
        self.sort(self.order.turned())

    def action_all_steps(self) -> None:
        """All steps, or one."""
        self.all = not self.all
        self.list_anew()


def _remark_on_find(_: str) -> Remark:
    return Remark("enter finds it in every sample of every step · small letters find capitals too · esc stops")
