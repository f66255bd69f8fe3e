"""How a run looks while it runs: a panel in a terminal, a line now and then elsewhere. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolroll.run.status import Rates, Status, seconds_left

WINDOW = 15.0
"""Seconds that a rate is taken over, at least."""
TRAJECTORIES = 2.0
"""And trajectories' mean durations: they end in batches, and what they did is known when they end."""
MOMENTS = 60
"""About so many are remembered."""
LABEL = 8
"""Columns of the names at the left."""
MINUTE, HOUR, DAY = 60, 3600, 86400


class Pace:
    """How fast a run goes, by how it stood lately."""

    def __init__(self) -> None:
        self._lately: deque[Status] = deque()

    def at(self, status: Status) -> Rates:
        """The rates at this moment."""
        window = math.inf  # until something has ended
        if _has_begun_to_end(status):
            window = max(WINDOW, TRAJECTORIES * status.tally.get("seconds", {}).get("mean", 0.0))
        if self._lately and status.seconds < self._lately[-1].seconds:  # a board that died counts from when it is back
            self._lately.clear()
        if not self._lately or status.seconds - self._lately[-1].seconds >= window / MOMENTS:
            self._lately.append(replace(status, tally={}))
        while len(self._lately) > 1 and self._lately[1].seconds <= status.seconds - window:
            self._lately.popleft()
        return Rates.between(self._lately[0], status)


def panel(title: str, status: Status, rates: Rates) -> RenderableType:
    """All that is known, for a terminal of 80 columns or more."""
    tally = status.tally
    facts = Table.grid(padding=(0, 1), expand=True)
    for width, ratio in ((LABEL, 3), (9, 3), (7, 2)):
        facts.add_column(style="dim", width=width)
        facts.add_column(style="bold", ratio=ratio, no_wrap=True, overflow="ellipsis")
    facts.add_row("done", _count(status.done), "tokens/s", _rate(rates.tokens, status), "reward", _reward(tally))
    facts.add_row("running", _count(status.running), "calls/s", _rate(rates.calls, status), "solved", _solved(tally))
    facts.add_row("queued", _count(status.queued), "in flight", _in_flight(status), "time", clock(status.seconds))
    more = Table.grid(padding=(0, 1))
    more.add_column(style="dim", width=LABEL)
    more.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in _more(status):
        more.add_row(name, value)
    shown = Text(title, overflow="ellipsis", no_wrap=True)
    inside = Group(_bar(status), "", facts, more)
    return Panel(inside, title=shown, title_align="left", border_style="dim", padding=(1, 2, 0, 2))


def line(status: Status, rates: Rates) -> str:
    """The same in short, for a log."""
    of_total = "" if status.total is None else f" of {status.total:,}"
    parts = [
        clock(status.seconds),
        f"{status.done:,}{of_total} done, {status.running:,} running",
        f"{_rate(rates.tokens, status)} tokens/s",
        f"{_rate(rates.calls, status)} calls/s",
        f"reward {_reward(status.tally)}",
    ]
    if status.limit is not None:
        parts.append(f"in flight {_in_flight(status)}")
    faults = {whose: count for whose, count in status.tally.get("faults", {}).items() if count}
    if faults:
        parts.append(f"faults: {counted(faults)}")
    parts += (f"{count:,} × {error}" for error, count in _commonest_error(status.tally))
    if status.lost_workers:
        parts.append(f"{status.lost_workers} worker{'' if status.lost_workers == 1 else 's'} lost")
    left = seconds_left(status)
    return " · ".join([*parts, f"{clock(left)} left"] if left else parts)


def _bar(status: Status) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    if status.total is None:
        row.add_row(ProgressBar(total=None, pulse=True, animation_time=status.seconds), f"{status.done:,} done")
        return row
    left = seconds_left(status)
    said = [f"{status.done:,} of {status.total:,}", f"{part(status.done, status.total)}"]
    if left is not None and status.done < status.total:
        said.append(f"{clock(left)} left")
    bar = ProgressBar(total=max(1, status.total), completed=status.done, complete_style="cyan", finished_style="green")
    row.add_row(bar, "   ".join(said))
    return row


def _more(status: Status) -> Iterable[tuple[str, Text]]:
    """What isn't always there."""
    tally = status.tally
    if status.workers > 1 or status.lost_workers:
        lost = f" · {status.lost_workers} lost, and what they had is done by others" if status.lost_workers else ""
        yield "workers", Text(f"{status.workers}{lost}")
    if tally.get("finish_reasons"):
        yield "ended by", Text(counted(tally["finish_reasons"]))
    faults: Mapping[str, int] = tally.get("faults", {})
    if any(faults.values()):
        yield "faults", Text(counted(faults), style="yellow" if faults.get("infra") else "")
    for error, count in _commonest_error(tally):
        yield "", Text(f"{count:,} × {error}", style="yellow")
    if status.bad_rows:
        yield "bad rows", Text(f"{status.bad_rows:,} that can't be used", style="yellow")
    if status.resumed:
        yield "resumed", Text(f"{status.resumed:,} were done before")


def _commonest_error(tally: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What most often kept a trajectory from its end, if anything did."""
    return list(tally.get("errors", {}).items())[:1]


def counted(counts: Mapping[str, int]) -> str:
    """Counts by name, as a list."""
    return " · ".join(f"{name or 'unknown'} {count:,}" for name, count in counts.items())


def part(some: int, all_: int) -> str:
    """A part in percent. It isn't 100 before it is all."""
    return f"{min(100.0 * some / all_, 99.9 if some < all_ else 100.0):.1f} %" if all_ else "–"


def clock(seconds: float) -> str:
    """A time, as a clock shows it.

    >>> clock(83), clock(3723), clock(200_000)
    ('1:23', '1:02:03', '2 d 7:33:20')
    """
    days, rest = divmod(round(seconds), DAY)
    hours, rest = divmod(rest, HOUR)
    minutes, rest = divmod(rest, MINUTE)
    shown = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {shown}" if days else shown


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _rate(number: float, status: Status) -> str:
    if not _has_begun_to_end(status):
        return "–"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _has_begun_to_end(status: Status) -> bool:
    """Whether this run has a trajectory that ended: what they do is not known before."""
    return status.done > status.resumed


def _reward(tally: Mapping[str, Any]) -> str:
    mean = tally.get("mean_reward")
    return "–" if mean is None else f"{mean:.3f}"


def _solved(tally: Mapping[str, Any]) -> str:
    return part(tally.get("solved", 0), tally.get("scored", 0))


def _in_flight(status: Status) -> str:
    return "–" if status.limit is None else f"{_count(status.in_flight)} of {status.limit:,}"
