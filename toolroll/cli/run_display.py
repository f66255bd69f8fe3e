"""Display of a run: a panel for terminals and a status line for logs while it is in progress, and tables at its end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolroll.records.stats.alarm_messages import alarm_messages
from toolroll.run.status import RunRates, RunSnapshot, seconds_left
from toolroll.viewer.formatting import plural

MIN_RATE_WINDOW_S = 15.0
"""Minimum time over which rates are averaged."""
RATE_WINDOW_TRAJECTORIES = 2.0
"""Minimum window in mean trajectory durations: trajectories start and end in batches."""
RATE_WINDOW_SNAPSHOTS = 60
"""Approximate number of snapshots to keep."""
MIN_SHOWN_WAIT_S = 2.0
"""Outages and waits that are shorter are not shown."""
LABEL_COLUMNS = 8
"""Width of the labels at the left."""
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


class StartingPhase:
    """Description of a phase before the run, with the time since it started once that takes long."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock, self._start = name, clock, clock()

    def __rich__(self) -> Text:
        """Return the text for a refresh of the display."""
        elapsed = self._clock() - self._start
        return Text(f"{self._name} …" if elapsed < MIN_SHOWN_WAIT_S else f"{self._name}, {format_duration(elapsed)}")


class RateMeter:
    """Computes the rates of a run over a sliding window of snapshots."""

    def __init__(self) -> None:
        self._snapshots: deque[RunSnapshot] = deque()

    def update(self, status: RunSnapshot) -> RunRates:
        """Add a snapshot and return the current rates."""
        snapshots = self._snapshots
        window = math.inf
        if _has_finished_trajectories(status):
            mean_seconds = status.aggregates.get("seconds", {}).get("mean", 0.0)
            window = max(MIN_RATE_WINDOW_S, RATE_WINDOW_TRAJECTORIES * mean_seconds)
        if snapshots and status.seconds < snapshots[-1].seconds:  # the coordinator was restarted
            snapshots.clear()
        if not snapshots or status.seconds - snapshots[-1].seconds >= window / RATE_WINDOW_SNAPSHOTS:
            snapshots.append(replace(status, aggregates={}))
        while len(snapshots) > 1 and snapshots[1].seconds <= status.seconds - window:
            snapshots.popleft()
        return RunRates.between(snapshots[0], status)


def status_panel(title: str, status: RunSnapshot, rates: RunRates) -> RenderableType:
    """Return the full status, for a terminal of at least 80 columns."""
    aggregates = status.aggregates
    facts = Table.grid(padding=(0, 1), expand=True)
    for width, ratio in ((LABEL_COLUMNS, 3), (9, 3), (7, 2)):
        facts.add_column(style="dim", width=width)
        facts.add_column(style="bold", ratio=ratio, no_wrap=True, overflow="ellipsis")
    tokens, calls = _format_rate(rates.tokens, status), _format_rate(rates.calls, status)
    solved = format_percent(aggregates.get("solved", 0), aggregates.get("scored", 0))
    facts.add_row("done", _format_count(status.done), "tokens/s", tokens, "reward", _mean_reward(aggregates))
    facts.add_row("running", _format_count(status.running), "calls/s", calls, "solved", solved)
    elapsed = format_duration(status.seconds)
    facts.add_row("queued", _format_count(status.queued), "in flight", _in_flight(status), "time", elapsed)
    details = Table.grid(padding=(0, 1))
    details.add_column(style="dim", width=LABEL_COLUMNS)
    details.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in _details(status):
        details.add_row(name, value)
    content = Group(_progress_bar(status), "", facts, details)
    heading = Text(title, overflow="ellipsis", no_wrap=True)
    return Panel(content, title=heading, title_align="left", border_style="dim", padding=(1, 2, 0, 2))


def status_line(status: RunSnapshot, rates: RunRates) -> str:
    """Return the status on one line, for a log."""
    of_total = "" if status.total is None else f" of {status.total:,}"
    parts = [
        format_duration(status.seconds),
        f"{status.done:,}{of_total} done, {status.running:,} running",
        f"{_format_rate(rates.tokens, status)} tokens/s",
        f"{_format_rate(rates.calls, status)} calls/s",
        f"reward {_mean_reward(status.aggregates)}",
    ]
    parts += _unreachable(status)
    if wait := _first_wait(status):
        parts.append(wait)
    if status.exhausted is not None:
        parts.append(status.exhausted)
    if status.limit is not None:
        parts.append(f"in flight {_in_flight(status)}")
    parts += (f"alarm: {message}" for message in alarm_messages(status.alarms).values())
    faults = {kind: count for kind, count in status.aggregates.get("faults", {}).items() if count}
    if faults:
        parts.append(f"faults: {format_counts(faults)}")
    parts += (f"{count:,} × {error}" for error, count in _most_common_error(status.aggregates))
    if status.lost_workers:
        parts.append(f"{status.lost_workers} worker{'' if status.lost_workers == 1 else 's'} lost")
    if left := seconds_left(status):
        parts.append(f"{format_duration(left)} left")
    return " · ".join(parts)


def _progress_bar(status: RunSnapshot) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    if status.total is None:
        row.add_row(ProgressBar(total=None, pulse=True, animation_time=status.seconds), f"{status.done:,} done")
        return row
    parts = [f"{status.done:,} of {status.total:,}", format_percent(status.done, status.total)]
    if left := seconds_left(status):
        parts.append(f"{format_duration(left)} left")
    bar = ProgressBar(total=max(1, status.total), completed=status.done, complete_style="cyan", finished_style="green")
    row.add_row(bar, "   ".join(parts))
    return row


def _details(status: RunSnapshot) -> Iterable[tuple[str, Text]]:
    """Yield the rows that are shown only if they apply."""
    aggregates = status.aggregates
    if status.workers > 1 or status.lost_workers:
        lost = f" · {status.lost_workers} lost, their work was reassigned" if status.lost_workers else ""
        yield "workers", Text(f"{status.workers}{lost}")
    for problem in _unreachable(status):
        yield "", Text(problem, style="red")
    if wait := _first_wait(status):
        yield "", Text(wait, style="yellow")
    if status.exhausted is not None:
        finishing = " Finishing the running trajectories." if status.running else ""
        yield "", Text(f"{status.exhausted}{finishing}", style="yellow")
    if aggregates.get("finish_reasons"):
        yield "ended by", Text(format_counts(aggregates["finish_reasons"]))
    faults: Mapping[str, int] = aggregates.get("faults", {})
    if any(faults.values()):
        yield "faults", Text(format_counts(faults), style="yellow" if faults.get("infra") else "")
    for error, count in _most_common_error(aggregates):
        yield "", Text(f"{count:,} × {error}", style="yellow")
    for message in alarm_messages(status.alarms).values():
        yield "alarm", Text(message, style="red")
    if status.bad_rows:
        yield "bad rows", Text(f"{status.bad_rows:,} skipped", style="yellow")
    if status.resumed:
        yield "resumed", Text(f"{status.resumed:,} from earlier runs")


def _unreachable(status: RunSnapshot) -> list[str]:
    return [
        f"{name} unreachable for {format_duration(seconds)}"
        for name, seconds in status.unreachable.items()
        if seconds >= MIN_SHOWN_WAIT_S
    ]


def _first_wait(status: RunSnapshot) -> str | None:
    """Return a description of the wait for the engine's first answer, if it takes long."""
    is_waiting = status.running and not status.tokens and not _has_finished_trajectories(status)
    if not is_waiting or status.seconds < MIN_SHOWN_WAIT_S or _unreachable(status):
        return None
    return f"waiting for the engine's first answer, {format_duration(status.seconds)}"


def _most_common_error(aggregates: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(aggregates.get("errors", {}).items())[:1]


def format_counts(counts: Mapping[str, int]) -> str:
    """Return counts by name as a list, e.g. "stop 54 · infra 6"."""
    return " · ".join(f"{name or 'unknown'} {count:,}" for name, count in counts.items())


def format_percent(count: int, total: int) -> str:
    """Return a share in percent. It is rounded to 100.0 % only if the count equals the total."""
    return f"{min(100.0 * count / total, 99.9 if count < total else 100.0):.1f} %" if total else "–"


def format_duration(seconds: float) -> str:
    """Return a duration in days, hours, minutes and seconds.

    >>> format_duration(83), format_duration(3723), format_duration(200_000)
    ('1:23', '1:02:03', '2 d 7:33:20')
    """
    days, rest = divmod(round(seconds), DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    minutes, rest = divmod(rest, MINUTE_S)
    time_of_day = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {time_of_day}" if days else time_of_day


def _format_count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _format_rate(rate: float, status: RunSnapshot) -> str:
    if not status.tokens and not _has_finished_trajectories(status):
        return "–"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _has_finished_trajectories(status: RunSnapshot) -> bool:
    """Return True if this run has finished a trajectory."""
    return status.done > status.resumed


def _mean_reward(aggregates: Mapping[str, Any]) -> str:
    mean = aggregates.get("mean_reward")
    return "–" if mean is None else f"{mean:.3f}"


def _in_flight(status: RunSnapshot) -> str:
    return "–" if status.limit is None else f"{_format_count(status.in_flight)} of {status.limit:,}"


DURATION_LABELS = {"seconds": "trajectory", "tool_seconds": "all its tool calls", "queue_wait": "their wait for a slot"}


def summary_tables(status: RunSnapshot) -> RenderableType:
    """Return a table of the outcomes and a table of the durations."""
    aggregates = status.aggregates
    duration = format_duration(status.seconds)
    trajectories = plural(aggregates["trajectories"], "trajectory", "trajectories")
    title = f"{trajectories} of {plural(aggregates['prompts'], 'prompt')} in {duration}"
    if status.resumed:
        title += f", {status.resumed:,} of them resumed"
    outcomes = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    outcomes.add_column(style="dim", no_wrap=True)
    outcomes.add_column(overflow="fold")
    for name, value in _outcomes(status, aggregates):
        outcomes.add_row(name, escape(value))
    return Group(outcomes, _durations(aggregates))


def _outcomes(status: RunSnapshot, aggregates: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    solved, scored, trajectories = aggregates["solved"], aggregates["scored"], aggregates["trajectories"]
    if aggregates["pass_at_k"]:
        estimates = aggregates["pass_at_k"].items()
        yield "pass@k", " · ".join(f"pass@{k} {100 * estimate:.1f} %" for k, estimate in estimates)
    if aggregates["mean_reward"] is not None:
        share = format_percent(solved, scored)
        yield "reward", f"mean {aggregates['mean_reward']:.3f} · solved {solved:,} of {scored:,} ({share})"
    if trajectories > scored:
        yield "no reward", f"{trajectories - scored:,} trajectories"
    yield "ended by", format_counts(aggregates["finish_reasons"])
    if any(aggregates["faults"].values()):
        yield "faults", format_counts(aggregates["faults"])
    if set(aggregates["programs"]) - {"ok"}:
        yield "programs", format_counts(aggregates["programs"])
    for error, count in aggregates["errors"].items():
        yield "", f"{count:,} × {error}"
    for message in alarm_messages(status.alarms).values():
        yield "alarm", message
    totals = {"turns": "turns", "calls": "calls", "sampled_tokens": "tokens sampled"}
    means = (f"{aggregates[key] / trajectories:,.1f} {label}" for key, label in totals.items() if aggregates[key])
    yield "per trajectory", " · ".join(means)
    if aggregates["sampled_tokens"] or aggregates["tokens"]:  # a chat server may report none
        yield "tokens", f"{aggregates['sampled_tokens']:,} sampled · {aggregates['tokens']:,} in total"
    if set(aggregates["fidelity"]) - {"exact"}:
        yield "fidelity", format_counts(aggregates["fidelity"])
    if status.lost_workers:
        yield "workers", f"{status.lost_workers} lost, their work was reassigned"
    if status.bad_rows:
        yield "bad rows", f"{status.bad_rows:,} skipped"


def _durations(aggregates: Mapping[str, Any]) -> Table:
    table = Table("seconds", "mean", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, label in DURATION_LABELS.items():
        if key == "seconds" or aggregates["calls"]:
            table.add_row(label, *(f"{value:,.2f}" for value in aggregates[key].values()))
    return table
