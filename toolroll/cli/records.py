"""The `toolroll records` command: statistics, conversion and re-scoring of recorded rollouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from toolroll.cli import output
from toolroll.cli.rescore import rescore
from toolroll.viewer.formatting import plural

if TYPE_CHECKING:
    from toolroll.records.reader import RecordIterator
    from toolroll.records.record import Record
    from toolroll.records.stats.histogram import Histogram
    from toolroll.records.stats.statistics import RunStats, StepStats, ToolCallStats

app = typer.Typer(help="Show statistics of recorded rollouts, convert them and score them again.", no_args_is_help=True)
app.command()(rescore)

Directory = Annotated[Path, typer.Argument(help="The rollout_data_dir, or one of its files.")]
MAX_TABLE_ROWS = 20
"""Maximum number of rows in a table. Steps are merged into ranges to stay within it."""


@app.command()
def stats(
    directory: Directory,
    plot: Annotated[Path | None, typer.Option(help="Also write a plot to this file, for example stats.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all steps instead of tables.")] = False,
) -> None:
    """Show rewards by step, tool calls, faults, latencies and finish reasons.

    Quantiles are accurate to 2 %.
    """
    from toolroll.records.reader import read_records
    from toolroll.records.stats.statistics import RunStats

    records = read_records(directory)
    run = RunStats(_with_progress(records))
    if plot is not None:
        from toolroll.records.stats.plot import plot as draw

        draw(run, plot)
    if as_json:
        output.print_json({"bad_lines": records.bad_lines, **run.as_dict()})
        return
    console = output.SafeConsole()
    total = run.total
    bad = f", {plural(records.bad_lines, 'unreadable line')}" if records.bad_lines else ""
    excluded = f", {total.infra:,} excluded from the loss (infra faults)" if total.infra else ""
    samples = f"{plural(total.samples, 'sample')} of {plural(len(run.steps), 'step')} in {escape(str(directory))}"
    console.print(f"{samples}{bad}{excluded}", highlight=False, soft_wrap=True)
    for step, messages in list(run.alarms().items())[:MAX_TABLE_ROWS]:
        for message in messages:
            console.print(f"[red]Step {step}: {message}[/red]", highlight=False, soft_wrap=True)
    for table in (_by_step(run), _by_tool(run), _programs(total), _faults(run), _finish_reasons(total)):
        if table.row_count:
            console.print(table)


@app.command()
def convert(
    directory: Directory, out: Annotated[Path, typer.Argument(help="File to write, for example records.parquet.")]
) -> None:
    """Convert all records to one Parquet file, with tokens as lists."""
    from toolroll.records.export.parquet import convert as convert_records
    from toolroll.records.reader import read_records

    records = read_records(directory)
    count = convert_records(_with_progress(records), out)
    bad = f"; skipped {plural(records.bad_lines, 'unreadable line')}" if records.bad_lines else ""
    output.echo(f"{plural(count, 'record')} in {out}, {out.stat().st_size / 1e6:,.1f} MB{bad}")


@app.command()
def export(
    directory: Directory,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL of an OpenTelemetry collector (OTLP over HTTP), for example http://localhost:4318.",
            show_default=False,
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Name of the model, for the attributes of the spans.")] = None,
) -> None:
    """Send a trace of each record to an OpenTelemetry collector.

    The traces are those that a run with the setting `tracing` sends, with the same ids.
    """
    from toolroll._internal.text import hide_credentials
    from toolroll.records.export.otlp import export as export_records
    from toolroll.records.reader import read_records

    records = read_records(directory)
    exported = export_records(_with_progress(records), otlp, model)
    skipped = records.bad_lines + exported.skipped
    bad = f"; {plural(skipped, 'line')} without timings skipped" if skipped else ""
    sent = f"{plural(exported.spans, 'span')} of {plural(exported.records, 'record')}"
    output.echo(f"{sent} sent to {hide_credentials(otlp)}{bad}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a record."""
    from toolroll.records.schema import json_schema

    output.write_output(json_schema())


def _with_progress(records: RecordIterator) -> Iterator[Record]:
    """Yield the records, with a progress bar if stderr is a terminal."""
    console = output.SafeConsole(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("reading", total=records.total_bytes)
        for count, record in enumerate(records):
            if count % 100 == 0:
                progress.update(task, completed=records.bytes_read)
            yield record


def _table(title: str, *columns: str) -> Table:
    """Return a table whose first column is left-aligned and whose other columns are right-aligned."""
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index), header_style="dim")
    return table


def _by_step(run: RunStats) -> Table:
    table = _table("By step", "step", "samples", "reward", "turns", "calls", "policy", "infra", "wait p99", "run p99")
    for steps, stats in run.ranges(MAX_TABLE_ROWS):
        first, last = ("–" if step is None else str(step) for step in (steps[0], steps[-1]))
        label = first if first == last else f"{first}–{last}"
        reward = f"{stats.score.mean:.3f}" if stats.score.count else ""
        per_sample = (f"{total / stats.samples:.1f}" for total in (stats.turns, stats.call_count))
        latencies = (_seconds(times, 0.99) for times in (stats.calls.queue_wait, stats.calls.execution_time))
        table.add_row(label, f"{stats.samples:,}", reward, *per_sample, *_fault_shares(stats.calls), *latencies)
    return table


def _by_tool(run: RunStats) -> Table:
    latencies = ("wait p50", "wait p99", "run p50", "run p99")
    table = _table("Tool calls and faults", "tool", "calls", "policy", "infra", *latencies)
    for name, calls in sorted(run.tools.items(), key=lambda item: -item[1].count)[:MAX_TABLE_ROWS]:
        waits = [_seconds(calls.queue_wait, fraction) for fraction in (0.5, 0.99)]
        runs = [_seconds(calls.execution_time, fraction) for fraction in (0.5, 0.99)]
        table.add_row(escape(name), f"{calls.count:,}", *_fault_shares(calls), *waits, *runs)
    return table


def _programs(total: StepStats) -> Table:
    table = _table("Programs", "outcome", "programs", "share")
    programs = total.calls.programs
    for outcome, count in programs.most_common() if set(programs) - {"ok"} else ():
        table.add_row(escape(outcome), f"{count:,}", _percent(count, programs.total()))
    return table


def _faults(run: RunStats) -> Table:
    table = _table("Faults", "fault", "calls", "error")
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    for (fault, kind), count in run.error_kinds.most_common(10):
        table.add_row(escape(fault), f"{count:,}", escape(kind))
    return table


def _finish_reasons(total: StepStats) -> Table:
    table = _table("Finish reasons", "finish reason", "samples", "share", "reward")
    for reason, count in total.finish_counts.most_common():
        scores = total.finish_scores[reason]
        reward = f"{scores.mean:.3f}" if scores.count else ""
        table.add_row(escape(reason), f"{count:,}", _percent(count, total.samples), reward)
    return table


def _fault_shares(calls: ToolCallStats) -> tuple[str, str]:
    return _percent(calls.policy_faults, calls.count), _percent(calls.infra_faults, calls.count)


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}%" if total else ""


def _seconds(histogram: Histogram, fraction: float) -> str:
    value = histogram.quantile(fraction)
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
