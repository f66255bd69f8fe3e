"""Background work of the viewer, done by threads in short slices and reported by messages.

At most one worker of each kind runs at a time; starting another one cancels it. Workers check for cancellation between
slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from textual import work
from textual.message import Message
from textual.widget import Widget
from textual.worker import get_current_worker

from toolroll.records.index import DumpDirectory, StepFile
from toolroll.viewer.query.listing import SampleListing
from toolroll.viewer.query.scan import SamplePosition, SampleScan
from toolroll.viewer.query.search import SampleSearch

_AVERAGED = ("score", "turns", "calls", "policy_faults", "infra_faults", "tokens")


@dataclass(frozen=True, slots=True)
class StepTrend:
    """Aggregates of one step. Means ignore samples with unknown values and are None if all are unknown."""

    samples: int
    unreadable: int
    """Number of lines that cannot be read."""
    score: float | None
    lowest: float | None
    highest: float | None
    turns: float | None
    calls: float | None
    policy_faults: float | None
    infra_faults: float | None
    tokens: float | None
    finish_reasons: Counter[str]
    """Number of samples by finish reason."""


def step_trend(step: StepFile) -> StepTrend:
    """Return the aggregates of the samples of a step that are indexed."""
    rows = range(len(step))
    columns = {name: step.column(name) for name in (*_AVERAGED, "finish_reason")}
    known = {name: [value for row in rows if (value := column[row]) is not None] for name, column in columns.items()}
    return StepTrend(
        samples=len(rows),
        unreadable=step.bad_rows,
        lowest=min(known["score"], default=None),
        highest=max(known["score"], default=None),
        finish_reasons=Counter(known["finish_reason"]),
        **{name: sum(known[name]) / len(known[name]) if known[name] else None for name in _AVERAGED},
    )


WORK_SLICE_S = 0.05


class BackgroundTasks(Widget):
    """Runs listings, searches, step counts and directory checks. As a widget, so that its workers end with the screen.

    Args:
        directory: Directory that is displayed.
    """

    DEFAULT_CSS = "BackgroundTasks { display: none; }"

    @dataclass
    class Advanced(Message):
        """Posted after each slice of a listing or a search."""

        scan: SampleScan
        is_complete: bool

    @dataclass
    class StepsCounted(Message):
        """Posted while steps are counted."""

        done: int
        total: int

    class DirectoryChanged(Message):
        """Posted when files were added, removed or changed."""

    @dataclass
    class RequestIdSearched(Message):
        """Posted with the position of a request ID, or None if no sample has it."""

        request_id: str
        position: SamplePosition | None

    def __init__(self, directory: DumpDirectory) -> None:
        super().__init__()
        self.directory = directory
        self._trends: dict[str, tuple[int, StepTrend]] = {}
        """By the name of the step: its version and its aggregates."""

    def trend_of(self, step: StepFile) -> StepTrend | None:
        """Return the aggregates of a step, or None if it has not been counted."""
        version, trend = self._trends.get(step.name, (None, None))
        return trend if version == step.version else None

    @work(thread=True, exclusive=True, group="list")
    def list_samples(self, listing: SampleListing) -> None:
        """Complete a listing, counting each of its steps once it is indexed."""
        uncounted = list(reversed(listing.steps))
        for _ in self._slices(listing):
            while uncounted and uncounted[-1].is_indexed and not get_current_worker().is_cancelled:
                self._count(uncounted.pop())

    @work(thread=True, exclusive=True, group="search")
    def search(self, search: SampleSearch) -> None:
        """Complete a search."""
        for _ in self._slices(search):
            pass

    def _slices(self, scan: SampleScan) -> Iterator[None]:
        worker = get_current_worker()
        is_complete = False
        while not is_complete and not worker.is_cancelled:
            is_complete = scan.advance(WORK_SLICE_S)
            yield
            self.post_message(self.Advanced(scan, is_complete))

    @work(thread=True, exclusive=True, group="search")
    def find_request_id(self, request_id: str, steps: Sequence[StepFile]) -> None:
        """Find the sample with a request ID. Hyphens are ignored."""
        wanted = request_id.replace("-", "")
        worker = get_current_worker()
        for step in steps:
            examined, is_complete = 0, False
            while not is_complete and not worker.is_cancelled:
                is_complete, column = step.index(seconds=WORK_SLICE_S), step.column("request_id")
                for row in range(examined, len(column)):
                    if (column[row] or "").replace("-", "") == wanted:
                        self.post_message(self.RequestIdSearched(request_id, SamplePosition(step, row)))
                        return
                examined = len(column)
        if not worker.is_cancelled:
            self.post_message(self.RequestIdSearched(request_id, None))

    @work(thread=True, exclusive=True, group="count")
    def count_steps(self, steps: Sequence[StepFile]) -> None:
        """Index and count all steps."""
        worker = get_current_worker()
        for number, step in enumerate(steps, 1):
            while not step.index(seconds=WORK_SLICE_S) and not worker.is_cancelled:
                self.post_message(self.StepsCounted(number - 1, len(steps)))
            if worker.is_cancelled:
                return
            if self._count(step) or number == len(steps):
                self.post_message(self.StepsCounted(number, len(steps)))

    def poll_directory(self) -> None:
        """Check the directory for changes, unless a check is in progress: the disk may be slow."""
        if not any(worker.group == "poll" for worker in self.workers):
            self._poll()

    @work(thread=True, group="poll")
    def _poll(self) -> None:
        if self.directory.refresh():
            self.post_message(self.DirectoryChanged())

    def cancel(self, group: Literal["search", "count"]) -> None:
        """Cancel a search or the counting of steps."""
        self.workers.cancel_group(self, group)

    def _count(self, step: StepFile) -> bool:
        """Update the aggregates of an indexed step. Return True if they changed."""
        version, known = step.version, self.trend_of(step)
        if not step.is_indexed or (known is not None and known.samples == len(step)):
            return False
        try:
            self._trends[step.name] = version, step_trend(step)
        except IndexError:  # rewritten in the meantime
            return False
        return True
