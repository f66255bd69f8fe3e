"""`toolroll records stats | convert | schema`: what is in a directory of dumps, in numbers and in other forms."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from toolroll.records.histogram import Histogram
    from toolroll.records.reader import Reading
    from toolroll.records.record import Record
    from toolroll.records.stats import Stats, Tally

app = typer.Typer(help="See what rollouts left on disk, in numbers, and convert it.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="The rollout_data_dir, or one file of it.")]
ROWS = 20
"""Of a table, at the most; steps are put together to keep to it."""


@app.command()
def stats(
    directory: Directory,
    plot: Annotated[Path | None, typer.Option(help="Write a picture too, e.g. stats.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs: every step.")] = False,
) -> None:
    """Rewards by step, tool calls, faults and latencies, finish reasons.

    Quantiles are right to within 2 %.
    """
    from toolroll.records.reader import read
    from toolroll.records.stats import Stats

    reading = read(directory)
    found = Stats(_watched(reading))
    if plot is not None:
        from toolroll.records.plot import plot as draw

        draw(found, plot)
    if as_json:
        typer.echo(json.dumps({"bad_lines": reading.bad, **found.as_dict()}))
        return
    console = Console()
    total = found.total
    bad = f", {_count(reading.bad, 'line')} that can't be read" if reading.bad else ""
    kept_out = f", {total.infra:,} kept out of the loss by the infrastructure" if total.infra else ""
    samples = f"{_count(total.samples, 'sample')} of {_count(len(found.steps), 'step')} in {escape(str(directory))}"
    console.print(f"{samples}{bad}{kept_out}", highlight=False, soft_wrap=True)
    for table in (_by_step(found), _by_tool(found), _faults(found), _endings(total)):
        if table.row_count:
            console.print(table)


@app.command()
def convert(
    directory: Directory, out: Annotated[Path, typer.Argument(help="The file to write, e.g. records.parquet.")]
) -> None:
    """Write all records to one Parquet file, tokens as lists."""
    from toolroll.records.parquet import convert as convert_records
    from toolroll.records.reader import read

    reading = read(directory)
    count = convert_records(_watched(reading), out)
    bad = f"; left out: {_count(reading.bad, 'line')} that can't be read" if reading.bad else ""
    typer.echo(f"{_count(count, 'record')} in {out}, {out.stat().st_size / 1e6:,.1f} MB{bad}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a line."""
    from toolroll.records.schema import json_schema

    typer.echo(json_schema(), nl=False)


def _watched(reading: Reading) -> Iterator[Record]:
    """The records, with a bar for those who wait for them at a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("reading", total=reading.size)
        for count, record in enumerate(reading):
            if count % 100 == 0:
                progress.update(task, completed=reading.done)
            yield record


def _table(title: str, *columns: str) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place), header_style="dim")
    return table


def _by_step(found: Stats) -> Table:
    latencies = ("wait p99", "run p99")
    table = _table("By step", "step", "samples", "reward", "turns", "calls", "policy", "infra", *latencies)
    for steps, tally in found.ranges(ROWS):
        first, last = ("–" if step is None else str(step) for step in (steps[0], steps[-1]))
        table.add_row(
            first if first == last else f"{first}–{last}",
            f"{tally.samples:,}",
            f"{tally.score.mean:.3f}" if tally.score.count else "",
            f"{tally.turns / tally.samples:.1f}",
            f"{tally.made / tally.samples:.1f}",
            _share(tally.calls.policy_faults, tally.calls.count),
            _share(tally.calls.infra_faults, tally.calls.count),
            _seconds(tally.calls.queue_wait, 0.99),
            _seconds(tally.calls.execution_time, 0.99),
        )
    return table


def _by_tool(found: Stats) -> Table:
    latencies = ("wait p50", "wait p99", "run p50", "run p99")
    table = _table(
        "Tool calls, those that failed, and whose fault that was", "tool", "calls", "policy", "infra", *latencies
    )
    for name, calls in sorted(found.tools.items(), key=lambda item: -item[1].count)[:ROWS]:
        table.add_row(
            escape(name),
            f"{calls.count:,}",
            _share(calls.policy_faults, calls.count),
            _share(calls.infra_faults, calls.count),
            *(_seconds(which, share) for which in (calls.queue_wait, calls.execution_time) for share in (0.5, 0.99)),
        )
    return table


def _faults(found: Stats) -> Table:
    table = _table("Faults", "fault", "calls", "what was said")
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    for (fault, kind), count in found.kinds.most_common(10):
        table.add_row(escape(fault), f"{count:,}", escape(kind))
    return table


def _endings(total: Tally) -> Table:
    table = _table("Ends", "finish reason", "samples", "share", "reward")
    for reason, count in total.endings.most_common():
        scores = total.finish_reasons[reason]
        reward = f"{scores.mean:.3f}" if scores.count else ""
        table.add_row(escape(reason), f"{count:,}", _share(count, total.samples), reward)
    return table


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}%" if of else ""


def _seconds(histogram: Histogram, share: float) -> str:
    value = histogram.quantile(share)
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
