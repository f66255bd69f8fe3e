"""Navigation among steps, samples and search matches: which samples are listed, and which one is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from toolroll._internal.sanitize import one_line
from toolroll.records.index import StepFile
from toolroll.viewer import formatting
from toolroll.viewer.documents.document import TextQuery
from toolroll.viewer.query.expression import FilterExpression
from toolroll.viewer.query.listing import SampleListing, SampleOrder
from toolroll.viewer.query.scan import SamplePosition
from toolroll.viewer.query.search import SampleSearch
from toolroll.viewer.widgets.background import BackgroundTasks
from toolroll.viewer.widgets.lists import SampleList, StepList
from toolroll.viewer.widgets.sample_pane import Display, SamplePane

FIRST_SLICE_S = 0.1
"""Time to work before the first results are shown. The rest is done in the background."""
MAX_AUTO_COUNT_BYTES = 256_000_000
"""Maximum size of a directory whose steps are all counted in advance. Larger ones are read on demand."""

Target = SamplePosition | Literal["first", "last", "current"]
"""Sample to select when the listing changes."""


class SampleNavigator:
    """Keeps the step list, the sample list and the sample pane consistent.

    Args:
        background: Completes listings of the directory.
        pane: Pane of the selected sample.
        is_following: Select the newest sample whenever the directory changes.
        on_change: Called when the selection, the listing or its progress changes.
    """

    def __init__(
        self, background: BackgroundTasks, pane: SamplePane, is_following: bool, on_change: Callable[[], None]
    ) -> None:
        self.pane = pane
        self.steps = background.directory.steps
        self.step: StepFile | None = None
        """The open step."""
        self.lists_all_steps = False
        self.expression: FilterExpression | None = None
        self.order = SampleOrder()
        self.listing = SampleListing([])
        self.is_complete = True
        """True if the listing is complete."""
        self.is_following = is_following
        self.step_list = StepList(background.trend_of)
        self.sample_list = SampleList()
        self.background = background
        self._on_change = on_change
        self._target: Target = "current"
        self._pending_match: tuple[SamplePosition, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Total size of all steps."""
        return sum(step.size for step in self.steps)

    @property
    def counts_all_steps(self) -> bool:
        """True if the directory is small enough to count all steps in advance."""
        return self.size_bytes <= MAX_AUTO_COUNT_BYTES

    def reload(self) -> None:
        """Show the current contents of the directory."""
        self.steps = self.background.directory.steps
        self.step_list.show(self.steps)
        if not self.steps:
            self.step = None
        if self.is_following and self.steps:
            self.open_newest()
        elif self.steps and self.step not in self.steps:
            self.open_step(self.steps[0])
        else:
            self.relist()
        if self.counts_all_steps:
            self.background.count_steps(self.steps)

    def open_step(self, step: StepFile, target: Target = "first") -> None:
        """List the samples of a step."""
        self._set_step(step)
        self.relist(target)

    def open_newest(self) -> None:
        """Open the newest step and select its last sample."""
        numbered = [step for step in self.steps if step.step is not None]
        self.open_step((numbered or self.steps)[-1], "last")

    def set_filter(self, expression: FilterExpression | None) -> None:
        """List only the samples that match an expression."""
        self.expression = expression
        self.relist()

    def sort(self, order: SampleOrder) -> None:
        """List the samples in another order."""
        self.order = order
        self.relist("first")

    def toggle_all_steps(self) -> None:
        """Switch between the samples of all steps and those of the open step."""
        self.lists_all_steps = not self.lists_all_steps
        self.relist()

    def relist(self, target: Target = "current") -> None:
        """Update the listing, and restart it if its steps, its filter or its order have changed."""
        steps = self.steps if self.lists_all_steps else [self.step] if self.step is not None else []
        is_stale = self.listing.is_stale
        listed = self.listing.steps, self.listing.expression, self.listing.order
        if is_stale or listed != (steps, self.expression, self.order):
            self.listing = SampleListing(steps, self.expression, self.order)
        if is_stale:
            self.pane.position = None  # so that the sample is read again even if its position is the same
        self._target = target
        self.is_complete = self.listing.advance(FIRST_SLICE_S)
        self._show_listing()
        if not self.is_complete or any(self.background.trend_of(step) is None for step in steps):
            self.background.list_samples(self.listing)

    def listing_advanced(self, is_complete: bool) -> None:
        """Show the progress of the listing."""
        self.is_complete = is_complete
        self._show_listing()
        self.step_list.refresh()

    def _show_listing(self) -> None:
        empty_text = "loading …" if not self.is_complete else "no matches" if self.expression else "no samples"
        self.sample_list.show_listing(self.listing, with_step=self.lists_all_steps, empty_text=empty_text)
        row = self._target_row()
        if row is not None:
            self.select(row)
        elif not len(self.listing) and self.is_complete:
            self.pane.show_placeholder(self._empty_explanation())
        self._on_change()

    def _target_row(self) -> int | None:
        """Return the row of the target, or None if it has not been listed yet."""
        if not len(self.listing):
            return None
        if self._target == "last":
            self._target = "current" if self.is_complete else "last"
            return len(self.listing) - 1
        position = self.pane.position if self._target == "current" else self._target
        row = self.listing.find(position) if isinstance(position, SamplePosition) else 0
        if row is None and not self.is_complete:
            return None
        self._target = "current"
        return row or 0

    def _empty_explanation(self) -> str:
        if not self.steps:
            return (
                f"No dumps in {one_line(str(self.background.directory.directory))} yet\n"
                "A run with this rollout_data_dir writes one file per step: 1.jsonl, 2.jsonl, and so on. "
                "They appear here as they are written."
            )
        if self.expression is not None:
            checked = f"{formatting.plural(self.listing.examined, 'sample')} checked. Press / to edit the filter."
            return f"No matching samples\n{one_line(self.expression.source)}\n{checked}"
        if self.lists_all_steps or self.step is None:
            return "No samples in any step"
        return f"No samples in step {one_line(self.step.name)}\nIts file is empty. Press N for the next step."

    def select(self, row: int) -> None:
        """Show the sample in a row of the list."""
        if not 0 <= row < len(self.listing):
            return
        position = self.listing[row]
        self.sample_list.set_cursor(row)
        if position.step in self.steps:
            self._set_step(position.step)
        if position != self.pane.position or self.pane.record is None:
            self.pane.show(position)
        if self._pending_match is not None and self._pending_match[0] == position:
            self.pane.document.go_to_match(self._pending_match[1])
            self._pending_match = None
        self._on_change()

    def go_to(self, position: SamplePosition, match: int | None = None) -> None:
        """Show a sample of any step.

        Args:
            position: The sample.
            match: Number of the search match in the sample to scroll to.
        """
        self._pending_match = None if match is None else (position, match)
        row = self.listing.find(position)
        if row is not None:
            self.select(row)
        elif self.lists_all_steps:
            self.relist(position)
        else:
            self.open_step(position.step, position)

    def move_sample(self, by: int) -> None:
        """Select a sample relative to the current one, wrapping around."""
        self.is_following = False
        if len(self.listing):
            self.select((self.sample_list.cursor + by) % len(self.listing))

    def move_step(self, by: int) -> None:
        """Go to a step relative to the current one, wrapping around."""
        if self.steps:
            current = self.steps.index(self.step) if self.step in self.steps else 0
            self.go_to_step((current + by) % len(self.steps))

    def go_to_step(self, index: int) -> None:
        """Go to the first sample of a step."""
        self.is_following = False
        step = self.steps[index]
        if not self.lists_all_steps:
            self.open_step(step)
            return
        self._set_step(step)
        row = next((row for row in range(len(self.listing)) if self.listing[row].step is step), None)
        if row is not None:
            self.select(row)

    def toggle_following(self) -> None:
        """Start or stop selecting the newest sample whenever the directory changes."""
        self.is_following = not self.is_following
        if self.is_following and self.steps:
            self.open_newest()

    def _set_step(self, step: StepFile) -> None:
        self.step = step
        self.step_list.set_cursor(self.steps.index(step))

    def summary(self) -> list[str]:
        """Return the current position, for the title."""
        parts = [f"step {one_line(self.step.name, 20)}"] if self.step is not None else []
        if len(self.listing):
            more = "" if self.is_complete else "+"
            parts.append(f"sample {self.sample_list.cursor + 1:,} of {len(self.listing):,}{more}")
        parts.append(f"{formatting.size(self.size_bytes)} in {formatting.plural(len(self.steps), 'step')}")
        return [*parts, "following"] if self.is_following else parts

    def status(self) -> list[str]:
        """Return the filter and a sort order that the list does not show, for the status line."""
        parts = []
        if self.expression is not None:
            found = f"{len(self.listing):,} of {self.listing.examined:,}{'' if self.is_complete else ' …'}"
            parts.append(f"filter {one_line(self.expression.source, 60)}: {found}")
        if self.order != SampleOrder() and not self.sample_list.shows_column(self.order.column):
            parts.append(f"sorted by {self.order.column} {'↓' if self.order.descending else '↑'}")
        return parts


class SearchController:
    """The current search, if any.

    Args:
        navigator: Shows the samples with matches.
    """

    def __init__(self, navigator: SampleNavigator) -> None:
        self.current: SampleSearch | None = None
        self.is_complete = True
        self._navigator = navigator
        self._pane = navigator.pane

    def start(self, query: TextQuery) -> None:
        """Search all steps, starting with the open one, and go to the first match."""
        if self._pane.current_display in (Display.TOKENS, Display.REWARDS):  # a search does not cover them
            self._pane.set_display(Display.CONVERSATION)
        self._pane.mark(query)
        self._run(query)
        self._go_to_first_match()

    def restart(self) -> None:
        """Repeat the search, because the steps or the searched text have changed, without moving."""
        if self.current is not None:
            self._run(self.current.query)

    def stop(self) -> None:
        """End the search and remove its marks."""
        if self.current is not None:
            self.current = None
            self._navigator.background.cancel("search")
            self._pane.mark(None)

    def directory_changed(self) -> None:
        """Search samples that have been added."""
        search = self.current
        if search is None:
            return
        if search.is_stale or set(search.steps) != set(self._navigator.steps):
            self.restart()
        else:
            self._navigator.background.search(search)

    def search_advanced(self, is_complete: bool) -> None:
        """Take note of progress, and go to the first match once there is one."""
        self.is_complete = is_complete
        if not self._pane.document.matches:
            self._go_to_first_match()

    def _run(self, query: TextQuery) -> None:
        navigator = self._navigator
        first = navigator.steps.index(navigator.step) if navigator.step in navigator.steps else 0
        render = self._pane.searched_document
        self.current = SampleSearch(navigator.steps, first, query, render, navigator.expression)
        self.is_complete = self.current.advance(FIRST_SLICE_S)
        if not self.is_complete:
            self._navigator.background.search(self.current)

    def _go_to_first_match(self) -> None:
        """Go to the first match in the shown sample, else to the first match of all."""
        if self._pane.document.matches:
            self._pane.document.go_to_match(0)
        elif self.current is not None and len(self.current):
            self._go_to_match(self.current, 0)

    def move(self, by: int) -> None:
        """Go to a match relative to the current one, in any sample, wrapping around."""
        search, view = self.current, self._pane.document
        if search is None or not search.match_count:
            return
        current = self._current_match()
        if current is not None:
            self._go_to_match(search, (current + by) % search.match_count)
        elif self._sample_index() is not None:
            view.go_to_match(0 if by > 0 else len(view.matches) - 1)
        else:
            self._go_to_match(search, 0)

    def _go_to_match(self, search: SampleSearch, match: int) -> None:
        index = search.sample_of_match(match)
        self._navigator.go_to(search[index], match - search.matches_before(index))

    def _sample_index(self) -> int | None:
        """Return the index of the shown sample among those with matches."""
        position = self._pane.position
        return self.current.find(position) if self.current is not None and position is not None else None

    def _current_match(self) -> int | None:
        """Return the number of the current match in the whole search."""
        index, match = self._sample_index(), self._pane.document.current_match
        if self.current is None or index is None or match is None:
            return None
        return self.current.matches_before(index) + match

    def status(self) -> list[str]:
        """Return the progress of the search, for the status line."""
        search, match = self.current, self._current_match()
        if search is None:
            return []
        found = formatting.plural(search.match_count, "match", "matches")
        if match is not None:
            found = f"match {match + 1:,} of {search.match_count:,}"
        progress = "" if self.is_complete else f", searching step {search.steps_done + 1:,} of {len(search.steps):,} …"
        samples = formatting.plural(len(search), "sample")
        return [f"find {one_line(search.query.text, 40)}: {found} in {samples}{progress}"]
