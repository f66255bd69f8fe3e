"""`toolroll sandbox probe`: measure how many concurrent executions a sandbox can handle."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolroll.cli import output
from toolroll.cli.sandbox import read_text, run_async
from toolroll.errors import ConfigError

if TYPE_CHECKING:  # the HTTP client is slow to import, so that only a probe imports it
    from toolroll.sandbox.load_probe import LoadProbe, LoadStep, ProbeConclusion, ServerFacts

MAX_CLOCK_OFFSET_S = 1.0
"""Offset of the server's clock above which a warning is printed. Deadlines have a larger margin."""
BUSY_CPU_FRACTION = 0.9
"""CPU use of the probe above which it may be the bottleneck itself."""
SPARE_OPEN_FILES = 320
"""Open files in addition to the connections. The HTTP client reserves 256 for the rest of the process."""


def probe(
    url: Annotated[str, typer.Argument(help="URL of a sandbox server or of a load balancer.")],
    code: Annotated[
        Path | None, typer.Option(help="Program to run, similar to yours.", show_default="print(1 + 1)")
    ] = None,
    language: Annotated[str | None, typer.Option(help="Language of the program.", show_default="by file name")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of each measurement, in seconds.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of the program, in seconds.")] = 10.0,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent executions.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how many concurrent executions a sandbox can handle, and print the rate_limit to set.

    The load increases until the throughput stops growing or executions fail, so do not probe a server that is in use.
    Works with any SandboxFusion server. The token is read from TOOLROLL_SANDBOX_TOKEN. Exits with status 1 if
    executions fail even without concurrency.
    """
    from toolroll.sandbox.load_probe import LoadProbe, conclude
    from toolroll.sandbox.protocol import LANGUAGE_BY_SUFFIX, TOKEN_ENV_VAR

    program = read_text(code) if code else "print(1 + 1)"
    language = language or LANGUAGE_BY_SUFFIX.get(code.suffix.lower() if code else "", "python")
    _raise_open_file_limit(max_concurrency)
    logging.getLogger("toolroll").addHandler(logging.NullHandler())  # failures are counted, not logged one by one
    token = os.environ.get(TOKEN_ENV_VAR)
    load = LoadProbe(url, program, language, token=token, seconds=seconds, timeout=timeout, maximum=max_concurrency)
    console = output.SafeConsole(highlight=False, quiet=as_json)
    server, steps = run_async(_measure(load, max_concurrency, seconds, console))
    conclusion = conclude(steps)
    if as_json:
        output.print_json(_report(load.client.endpoints[0], server, steps, conclusion), indent=2)
    else:
        _print_conclusion(console, server, steps, conclusion)
    raise typer.Exit(0 if conclusion.knee else 1)


async def _measure(
    load: LoadProbe, max_concurrency: int, seconds: float, console: output.SafeConsole
) -> tuple[ServerFacts, list[LoadStep]]:
    """Measure all steps, and show them: a live table in a terminal, otherwise one line per step."""
    from toolroll.sandbox.load_probe import WARM_UP_FRACTION, next_concurrency

    steps: list[LoadStep] = []
    async with load:
        server = await load.inspect_server()
        _print_server(console, load.client.endpoints[0], server)
        display = Live(console=console, refresh_per_second=8)
        with display if console.is_terminal else contextlib.nullcontext() as live:
            if live is None:
                console.print(_line("at once", "executions/s", "p50 ms", "p99 ms", "errors"))
            while concurrency := next_concurrency(steps, max_concurrency):
                if live is not None:
                    live.update(Group(_table(steps), _StepProgress(concurrency, seconds * (1 + WARM_UP_FRACTION))))
                steps.append(await load.measure(concurrency))
                if live is None:
                    console.print(_line(*_columns(steps[-1])), soft_wrap=True)
            if live is not None:
                live.update(_table(steps))
    return server, steps


def _raise_open_file_limit(connections: int) -> None:
    """Raise the limit of open files to that of the connections. The usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"{connections} connections exceed this process's limit of {hard} open files. "
                f"Use --max-concurrency {hard - SPARE_OPEN_FILES}, or raise the limit (ulimit -Hn)."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _StepProgress:
    """Progress bar of a step, which moves by time.

    Args:
        concurrency: Concurrency that is being measured.
        duration_s: Expected duration of the step.
    """

    def __init__(self, concurrency: int, duration_s: float) -> None:
        self._concurrency = concurrency
        self._duration_s = duration_s
        self._started_at = time.monotonic()

    def __rich__(self) -> RenderableType:
        progress = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._duration_s, completed=time.monotonic() - self._started_at, width=30)
        progress.add_row(f"[dim]measuring[/] {self._concurrency} at once", bar)
        return progress


def _table(steps: Sequence[LoadStep]) -> Table:
    """Return a table of the steps by concurrency, with the knee marked."""
    from toolroll.sandbox.load_probe import conclude, latest_steps

    knee = conclude(steps).knee if steps else None
    rows = latest_steps(steps)
    max_throughput = max((step.throughput for step in rows), default=0.0)
    table = Table("at once", "executions/s", "", "p50 ms", "p99 ms", "errors", box=None, padding=(0, 1))
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    for step in rows:
        style, colour = ("", "blue") if step.is_clean else ("red", "red")
        concurrency, rate, p50, p99, note = _columns(step)
        if step == knee:
            style, colour, note = "bold green", "green", f"{note} ← knee".strip()
        bar = Bar(max_throughput or 1.0, 0, step.throughput, width=24, color=colour)
        table.add_row(concurrency, rate, bar, p50, p99, Text(note), style=style)
    return table


def _columns(step: LoadStep) -> tuple[str, ...]:
    errors = ", ".join(f"{count} × {error}" for error, count in step.errors.items())
    milliseconds = (f"{1000 * seconds:.1f}" if step.executions else "–" for seconds in (step.p50, step.p99))
    return (str(step.concurrency), _rate(step.throughput), *milliseconds, errors)


def _line(concurrency: str, rate: str, p50: str, p99: str, errors: str) -> str:
    return f"{concurrency:>7}  {rate:>12}  {p50:>8}  {p99:>8}  {escape(errors)}".rstrip()


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _offset(seconds: float) -> str:
    return f"{_duration(abs(seconds))} {'behind' if seconds < 0 else 'ahead of'}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print_field(console: output.SafeConsole, name: str, text: str) -> None:
    console.print(f"[dim]{name:<8}[/] {text}", soft_wrap=True)


def _print_server(console: output.SafeConsole, url: str, server: ServerFacts) -> None:
    facts = {"toolroll": server.version, "tier": server.tier, "capacity": server.capacity}
    known = [f"{name} {value}" for name, value in facts.items() if value]
    _print_field(console, "server", escape(", ".join([url, *known])))
    if server.clock is not None and server.clock_error is not None:
        _print_field(console, "clock", f"{_offset(server.clock)} this machine, ± {_duration(server.clock_error)}")
    _print_field(console, "program", f"{_duration(server.alone)} without concurrency\n")


def _print_conclusion(
    console: output.SafeConsole, server: ServerFacts, steps: Sequence[LoadStep], conclusion: ProbeConclusion
) -> None:
    console.print()
    _print_field(console, "ended", escape(_reason(steps, conclusion)))
    if conclusion.knee and conclusion.best:
        for name, step in (("best", conclusion.best), ("knee", conclusion.knee)):
            _print_field(console, name, f"{_rate(step.throughput)} executions/s, with {step.concurrency} at once")
        _print_field(console, "set", f"[bold]rate_limit: {conclusion.knee.concurrency}[/]")
    for warning in _warnings(server, conclusion):
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def _reason(steps: Sequence[LoadStep], conclusion: ProbeConclusion) -> str:
    """Return why the probe ended."""
    from toolroll.sandbox.load_probe import ProbeEnd

    if conclusion.end is ProbeEnd.FLAT:
        return "higher concurrency did not increase the throughput"
    if conclusion.end is ProbeEnd.MAXIMUM:
        highest = max(step.concurrency for step in steps)
        return f"{highest} at once is the maximum; set a higher one with --max-concurrency"
    first = min((step for step in steps if not step.is_clean), key=lambda step: step.concurrency)
    return f"at {first.concurrency} at once executions failed ({', '.join(first.errors)})"


def _warnings(server: ServerFacts, conclusion: ProbeConclusion) -> list[str]:
    warnings = []
    if server.clock is not None and abs(server.clock) > MAX_CLOCK_OFFSET_S:
        effect = "rejected too early" if server.clock > 0 else "run after their deadline"
        warnings.append(
            f"The server's clock is {_offset(server.clock)} this machine's. Deadlines are checked against it, so that "
            f"requests are {effect}. Synchronize the clocks (NTP)."
        )
    if conclusion.best and conclusion.best.own_cpu > BUSY_CPU_FRACTION:
        warnings.append(
            f"The probe itself used {100 * conclusion.best.own_cpu:.0f} % of a CPU, so the server may handle more. "
            "Use a program that runs as long as yours (--code), or a machine with faster cores."
        )
    return warnings


def _report(url: str, server: ServerFacts, steps: Sequence[LoadStep], conclusion: ProbeConclusion) -> dict[str, object]:
    rate_limit = conclusion.knee.concurrency if conclusion.knee else None
    return {
        "url": url,
        "server": asdict(server),
        "steps": [asdict(replace(step, errors=dict(step.errors))) for step in steps],
        "end": conclusion.end,
        "best_throughput": conclusion.best.throughput if conclusion.best else None,
        "knee": rate_limit,
        "rate_limit": rate_limit,
        "warnings": _warnings(server, conclusion),
    }
