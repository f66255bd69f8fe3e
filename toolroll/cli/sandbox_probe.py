"""`toolroll sandbox probe`: how many executions at once a sandbox can take."""

from __future__ import annotations

import json
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
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolroll.errors import ConfigError

if TYPE_CHECKING:  # else what speaks HTTP is imported only for a probe, as it takes its time
    from toolroll.sandbox.probe import Acquaintance, Conclusion, Probe, Step

CLOCK_TOLERANCE = 1.0
"""Seconds that the server's clock may be off: deadlines have more room than that."""
BUSY = 0.9
"""Of a CPU, for the probe itself: it can't do much more then."""
SPARE_FILES = 64
"""Open files besides the connections."""


def probe(
    url: Annotated[str, typer.Argument(help="A running sandbox server, or what stands before several.")],
    code: Annotated[Path | None, typer.Option(help="A program like yours to run.", show_default="print(1 + 1)")] = None,
    language: Annotated[str | None, typer.Option(help="Its language.", show_default="by the file's name")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each concurrency.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that the program may run.")] = 10.0,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Executions at once, at the most.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Find out how many executions at once a sandbox can take: the rate_limit to set.

    Puts real load on the server, more and more, until it gives no more or fails: ask for it while nobody needs it. Any
    SandboxFusion server will do. A token is taken from the environment: TOOLROLL_SANDBOX_TOKEN. Ends with 1 where
    executions fail even one at a time.
    """
    import uvloop

    from toolroll.cli.sandbox import SUFFIXES, TOKEN  # which has this command
    from toolroll.sandbox.probe import Probe, conclude

    try:
        program = "print(1 + 1)" if code is None else code.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    chosen = language or SUFFIXES.get(code.suffix.lower() if code else "", "python")
    _allow_connections(max_concurrency)
    logging.getLogger("toolroll").addHandler(logging.NullHandler())  # what fails is counted, not shown one by one
    load = Probe(
        url,
        program,
        chosen,
        token=os.environ.get(TOKEN),
        seconds=seconds,
        timeout=timeout,
        maximum=max_concurrency,
    )
    console = Console(highlight=False, quiet=as_json)
    try:
        server, steps = uvloop.run(_climb(load, max_concurrency, seconds, console))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    found = conclude(steps)
    if as_json:
        typer.echo(json.dumps(_report(load.client.endpoints[0], server, steps, found), indent=2))
    else:
        _show(console, server, steps, found)
    raise typer.Exit(0 if found.knee else 1)


async def _climb(load: Probe, maximum: int, seconds: float, console: Console) -> tuple[Acquaintance, list[Step]]:
    from toolroll.sandbox.probe import WARM_UP, next_concurrency

    async with load:
        server = await load.meet()
        _greet(console, load.client.endpoints[0], server)
        steps: list[Step] = []
        with _Display(console, seconds * (1 + WARM_UP)) as display:
            while at_once := next_concurrency(steps, maximum):
                display.begin(at_once)
                steps.append(await load.measure(at_once))
                display.end(steps[-1])
    return server, steps


def _allow_connections(count: int) -> None:
    """Each takes an open file, of which a process has 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"{count} connections need as many open files, and this process may have {hard}. "
                f"Take --max-concurrency {hard - SPARE_FILES}, or raise the limit (ulimit -Hn)."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Display:
    """The steps as they come: a table that grows in a terminal, else a line for each."""

    def __init__(self, console: Console, expected: float) -> None:
        self.console = console
        self.expected = expected
        self.steps: list[Step] = []
        self.current: int | None = None
        self.began = 0.0
        self.live = Live(console=console, get_renderable=self.draw, refresh_per_second=8, transient=True)

    def __enter__(self) -> _Display:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.console.print(_line("at once", "executions/s", "p50 ms", "p99 ms", "errors"))
        return self

    def __exit__(self, *why: object) -> None:
        self.current = None
        if self.console.is_terminal:
            self.live.stop()
            self.console.print(table(self.steps))

    def begin(self, concurrency: int) -> None:
        self.current, self.began = concurrency, time.monotonic()

    def end(self, step: Step) -> None:
        self.steps.append(step)
        if not self.console.is_terminal:
            self.console.print(_line(*_cells(step)), soft_wrap=True)

    def draw(self) -> RenderableType:
        if self.current is None:
            return table(self.steps)
        done = min((time.monotonic() - self.began) / self.expected, 1.0)
        progress = Table.grid(padding=(0, 1))
        progress.add_row(f"[dim]measuring[/] {self.current} at once", ProgressBar(total=1.0, completed=done, width=30))
        return Group(table(self.steps), progress)


def table(steps: Sequence[Step]) -> Table:
    """The steps, by concurrency, and which is the knee so far."""
    from toolroll.sandbox.probe import conclude, latest

    knee = conclude(steps).knee if steps else None
    rows = latest(steps)
    most = max((step.throughput for step in rows), default=0.0)
    shown = Table("at once", "executions/s", "", "p50 ms", "p99 ms", "errors", box=None, padding=(0, 1))
    for column in (0, 1, 3, 4):
        shown.columns[column].justify = "right"
    for step in rows:
        style, colour = ("", "blue") if step.is_clean else ("red", "red")
        at_once, rate, p50, p99, note = _cells(step)
        if step == knee:
            style, colour, note = "bold green", "green", f"{note} ← knee".strip()
        bar = Bar(most or 1.0, 0, step.throughput, width=24, color=colour)
        shown.add_row(at_once, rate, bar, p50, p99, Text(note), style=style)
    return shown


def _cells(step: Step) -> tuple[str, ...]:
    errors = ", ".join(f"{count} × {what}" for what, count in step.errors.items())
    milliseconds = (f"{1000 * seconds:.1f}" if step.executions else "–" for seconds in (step.p50, step.p99))
    return (str(step.concurrency), _rate(step.throughput), *milliseconds, errors)


def _line(at_once: str, rate: str, p50: str, p99: str, errors: str) -> str:
    return f"{at_once:>7}  {rate:>12}  {p50:>8}  {p99:>8}  {escape(errors)}".rstrip()


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _ahead(seconds: float) -> str:
    return f"{_time(abs(seconds))} {'behind' if seconds < 0 else 'ahead of'}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _greet(console: Console, url: str, server: Acquaintance) -> None:
    """Who the server is, as far as it says."""
    about = [f"toolroll {server.version}"] if server.version else []
    about += [f"tier {server.tier}"] if server.tier else []
    about += [f"capacity {server.capacity}"] if server.capacity else []
    _say(console, "server", escape(", ".join([url, *about])))
    if server.clock is not None and server.clock_error is not None:
        _say(console, "clock", f"{_ahead(server.clock)} ours, ± {_time(server.clock_error)}")
    _say(console, "program", f"{_time(server.alone)} alone\n")


def _show(console: Console, server: Acquaintance, steps: Sequence[Step], found: Conclusion) -> None:
    """The conclusion, in words."""
    console.print()
    _say(console, "ended", escape(_why(steps, found)))
    if found.knee and found.best:
        _say(console, "best", f"{_rate(found.best.throughput)} executions/s, with {found.best.concurrency} at once")
        _say(console, "knee", f"{_rate(found.knee.throughput)} executions/s, with {found.knee.concurrency} at once")
        _say(console, "set", f"[bold]rate_limit: {found.knee.concurrency}[/]")
    for warning in _warnings(server, found):
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def _say(console: Console, what: str, text: str) -> None:
    console.print(f"[dim]{what:<8}[/] {text}", soft_wrap=True)


def _why(steps: Sequence[Step], found: Conclusion) -> str:
    from toolroll.sandbox.probe import End

    top = max(steps, key=lambda step: step.concurrency)
    match found.end:
        case End.FLAT:
            return "more at once gave no more"
        case End.MAXIMUM:
            return f"{top.concurrency} at once is the maximum; --max-concurrency sets a higher one"
    first = min((step for step in steps if not step.is_clean), key=lambda step: step.concurrency)
    return f"at {first.concurrency} at once executions failed ({', '.join(first.errors)})"


def _warnings(server: Acquaintance, found: Conclusion) -> list[str]:
    warnings = []
    if server.clock is not None and abs(server.clock) > CLOCK_TOLERANCE:
        what = "refused while somebody waits" if server.clock > 0 else "run though nobody waits any more"
        warnings.append(
            f"The server's clock is {_ahead(server.clock)} this machine's. Deadlines are held against it: requests are "
            f"{what}. Synchronise the two (NTP)."
        )
    if found.best and found.best.own_cpu > BUSY:
        warnings.append(
            f"The probe itself kept a CPU busy to {100 * found.best.own_cpu:.0f} %, so the server may well take more. "
            "Give it a program that takes as long as yours (--code), or a machine with faster cores."
        )
    return warnings


def _report(url: str, server: Acquaintance, steps: Sequence[Step], found: Conclusion) -> dict[str, object]:
    return {
        "url": url,
        "server": asdict(server),
        "steps": [asdict(replace(step, errors=dict(step.errors))) for step in steps],
        "end": found.end,
        "best_throughput": found.best.throughput if found.best else None,
        "knee": found.knee.concurrency if found.knee else None,
        "rate_limit": found.knee.concurrency if found.knee else None,
        "warnings": _warnings(server, found),
    }
