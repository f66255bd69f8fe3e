"""Background: what takes time, done in threads, a slice at a time, and told by messages.

Each of these is one worker at the most; a new one takes the place of the old. All end soon after they are cancelled,
as they look between slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual import work
from textual.message import Message
from textual.widget import Widget
from textual.worker import get_current_worker

from toolroll.records.index import Shelf, StepFile
from toolroll.viewer.listing import Listing, Place
from toolroll.viewer.search import Search
from toolroll.viewer.trends import StepFigures, step_figures

SLICE = 0.05
"""Seconds of work between two looks at whether it is still wanted."""


class Background(Widget):
    """Does the work. It is a widget so that its workers end with the screen."""

    DEFAULT_CSS = "Background { display: none; }"

    class Listed(Message):
        """More samples are listed."""

        def __init__(self, listing: Listing, done: bool) -> None:
            super().__init__()
            self.listing = listing
            self.done = done

    class Found(Message):
        """A search went on."""

        def __init__(self, search: Search, done: bool) -> None:
            super().__init__()
            self.search = search
            self.done = done

    class Surveyed(Message):
        """Steps were counted; so many of so many."""

        def __init__(self, done: int, of: int) -> None:
            super().__init__()
            self.done = done
            self.of = of

    class Looked(Message):
        """The directory was looked at, and something changed."""

    class IdFound(Message):
        """The sample of a request id, or None."""

        def __init__(self, text: str, place: Place | None) -> None:
            super().__init__()
            self.text = text
            self.place = place

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf
        self._figures: dict[str, tuple[int, int, StepFigures]] = {}
        self._looking = False

    def figures_of(self, step: StepFile) -> StepFigures | None:
        """What a step comes to, where it was counted."""
        known = self._figures.get(step.name)
        return known[2] if known is not None and known[0] == step.version else None

    @work(thread=True, exclusive=True, group="list")
    def list(self, listing: Listing) -> None:
        """Go on with a listing until its end."""
        worker = get_current_worker()
        done, counted = False, 0
        while not done and not worker.is_cancelled:
            done = listing.advance(SLICE)
            for step in listing.steps[counted:]:
                if not step.is_indexed or worker.is_cancelled:
                    break
                self._count(step)
                counted += 1
            self.post_message(self.Listed(listing, done))

    @work(thread=True, exclusive=True, group="search")
    def search(self, search: Search) -> None:
        """Go on with a search until its end."""
        worker = get_current_worker()
        done = False
        while not done and not worker.is_cancelled:
            done = search.advance(SLICE)
            self.post_message(self.Found(search, done))

    @work(thread=True, exclusive=True, group="search")
    def find_id(self, text: str, steps: Sequence[StepFile]) -> None:
        """Find the sample of a request id. Hyphens don't count."""
        wanted = text.replace("-", "")
        worker = get_current_worker()
        for step in steps:
            looked, ended = 0, False
            while not ended and not worker.is_cancelled:
                ended, column = step.index(seconds=SLICE), step.column("request_id")
                for row in range(looked, len(column)):
                    if (column[row] or "").replace("-", "") == wanted:
                        self.post_message(self.IdFound(text, Place(step, row)))
                        return
                looked = len(column)
        if not worker.is_cancelled:
            self.post_message(self.IdFound(text, None))

    @work(thread=True, exclusive=True, group="survey")
    def survey(self, steps: Sequence[StepFile]) -> None:
        """Count all steps."""
        worker = get_current_worker()
        for number, step in enumerate(steps, 1):
            while not step.index(seconds=SLICE):
                if worker.is_cancelled:
                    return
                self.post_message(self.Surveyed(number - 1, len(steps)))
            if worker.is_cancelled:
                return
            if self._count(step) or number == len(steps):
                self.post_message(self.Surveyed(number, len(steps)))

    def look(self) -> None:
        """Look at the directory, unless the last look still goes on: a disk may be slow."""
        if not self._looking:
            self._looking = True
            self._look()

    @work(thread=True, group="look")
    def _look(self) -> None:
        try:
            if self._shelf.refresh():
                self.post_message(self.Looked())
        finally:
            self._looking = False

    def stop_survey(self) -> None:
        """Count no more."""
        self.workers.cancel_group(self, "survey")

    def stop_searching(self) -> None:
        """End a search."""
        self.workers.cancel_group(self, "search")

    def _count(self, step: StepFile) -> bool:
        """Count a step. Whether that is new."""
        known = self._figures.get(step.name)
        if not step.is_indexed or (known is not None and known[:2] == (step.version, len(step))):
            return False
        version, rows = step.version, len(step)
        try:
            self._figures[step.name] = version, rows, step_figures(step)
        except IndexError:  # begun anew meanwhile
            return False
        return True
