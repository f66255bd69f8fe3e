"""The `toolroll run` command: run a data set and show its progress."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.live import Live

from toolroll.cli import output
from toolroll.cli.completion import complete_setting
from toolroll.cli.run_display import (
    MIN_SHOWN_WAIT_S,
    RateMeter,
    StartingPhase,
    status_line,
    status_panel,
    summary_tables,
)
from toolroll.errors import ConfigError

if TYPE_CHECKING:
    from toolroll.run.config import RunConfig
    from toolroll.run.run import Run
    from toolroll.run.status import RunSnapshot

STATUS_POLL_INTERVAL_S = 0.5
"""Interval at which the panel in a terminal is updated."""
STATUS_LINE_INTERVAL_S = 5.0
"""Interval between status lines if the output is not a terminal."""
EXIT_BUDGET_SPENT = 3
"""Exit status of a run that stopped because a budget is spent."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    config: Annotated[Path, typer.Argument(help="Config file of the run (YAML).")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings that override the file, e.g. n=8.",
            autocompletion=complete_setting,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON to stdout, and the progress to stderr.")
    ] = False,
) -> None:
    """Run all prompts of a data set and record every trajectory.

    Run the same command again to resume an interrupted run. The exit status is 0 if the run is complete, 1 if every
    trajectory failed because of the infrastructure, and 3 if the run stopped because a budget is spent.
    """
    import uvloop

    from toolroll.rollout.gc_tuning import infrequent_full_gc
    from toolroll.run.config import RunConfig
    from toolroll.run.run import Run

    for setting in settings or ():
        if "=" not in setting:
            raise ConfigError(f"Invalid setting {setting!r}. Expected key=value, e.g. n=8.")
    # Custom tools and reward functions are found next to the config, and in the working directory as for `python -m`.
    import_paths = (str(config.resolve().parent), str(Path.cwd()))
    sys.path[:0] = [path for path in import_paths if path not in sys.path]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # toolroll uses only its tokenizers, without torch
    os.environ.setdefault("TQDM_DISABLE", "1")  # the panel shows the progress
    loaded = RunConfig.load(config, settings or ())
    console = output.SafeConsole(stderr=as_json)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), infrequent_full_gc():
        job = Run(loaded)
        status, signum = uvloop.run(follow(loaded, console, title=str(config), job=job))
    complete = not signum and status.exhausted is None
    has_cluster = loaded.cluster is not None and not job.started_cluster
    print_result(loaded, status, console, complete=complete, as_json=as_json, has_cluster=has_cluster)
    if signum:
        raise typer.Exit(128 + signum)
    if status.exhausted is not None:
        raise typer.Exit(EXIT_BUDGET_SPENT)
    if not status.aggregates["outcomes"].get("ok"):
        raise typer.Exit(1)


async def follow(
    config: RunConfig, console: output.SafeConsole, title: str, job: Run | None = None
) -> tuple[RunSnapshot, int]:
    """Start a run and show its status until it ends or a signal stops it.

    Args:
        config: Configuration of the run.
        console: Output for the status.
        title: Title of the panel.
        job: The run. Default: a new one.

    Returns:
        The final status, and the number of the signal that stopped the run, or 0 if it is complete.
    """
    from toolroll.run.preflight import check
    from toolroll.run.run import Run

    rate_meter, next_line_at = RateMeter(), 0.0
    with _stop_signal() as stopped, _live_display(console) as live, _Phases(console, live) as phases:
        await check(config, phases.start)
        model = "model" if config.engine.kind == "transformers" else "tokenizer"
        phases.start("Connecting to Ray" if config.cluster else f"Loading the {model}")
        async with job or Run(config) as run:
            phases.end()
            if run.retried:
                _print(console, f"{run.retried:,} samples failed before and are attempted again.")
            ended = asyncio.create_task(run.wait())
            ends: set[asyncio.Future[Any]] = {ended, stopped}
            while not ended.done() and not stopped.done():
                status = await run.status()
                rates = rate_meter.update(status)
                if live is not None:
                    live.update(status_panel(title, status, rates))
                elif status.seconds >= next_line_at:
                    _print(console, status_line(status, rates))
                    next_line_at = status.seconds + STATUS_LINE_INTERVAL_S
                await asyncio.wait(ends, timeout=STATUS_POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            else:
                ended.cancel()
                _print(console, "Stopping; completed samples are saved. Press Ctrl+C again to force quit.")
        status = await run.status()
        if live is not None:
            live.update(status_panel(title, status, rate_meter.update(status)))
    return status, stopped.result() if stopped.done() else 0


@contextlib.contextmanager
def _live_display(console: output.SafeConsole) -> Iterator[Live | None]:
    """Yield a display that is redrawn in place, or None if the output is not a terminal."""
    if not console.is_terminal:
        yield None
        return
    with _hidden_control_keys(), Live("", console=console, refresh_per_second=4) as live:
        yield live


class _Phases:
    """Shows the phases before a run: in the display, or as a line in a log if a phase takes long."""

    def __init__(self, console: output.SafeConsole, live: Live | None) -> None:
        self._console, self._live = console, live
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def start(self, name: str) -> None:
        """Start a phase, which ends the one before."""
        self.end()
        if self._live is not None:
            self._live.update(StartingPhase(name))
            return
        # A thread, because loading a tokenizer blocks the event loop.
        self._timer = threading.Timer(MIN_SHOWN_WAIT_S, _print, (self._console, f"{name} …"))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """End the last phase."""
        if self._timer is not None:
            self._timer.cancel()


@contextlib.contextmanager
def _hidden_control_keys() -> Iterator[None]:
    """Keep the terminal from writing ^C behind the panel, which would shift the lines that are redrawn."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    local_modes = 3
    quiet = [*before]
    quiet[local_modes] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextlib.contextmanager
def _stop_signal() -> Iterator[asyncio.Future[int]]:
    """Yield a future of the SIGINT or SIGTERM that asks to stop. A second signal ends the process immediately."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def on_signal(signum: int) -> None:
        if stopped.done():
            os._exit(128 + signum)
        stopped.set_result(signum)

    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        yield stopped
    finally:
        for signum in STOP_SIGNALS:
            loop.remove_signal_handler(signum)


def print_result(
    config: RunConfig,
    status: RunSnapshot,
    console: output.SafeConsole,
    *,
    complete: bool,
    as_json: bool,
    has_cluster: bool = False,
) -> None:
    """Print the result of a run, how to resume it, and how to view its records.

    Args:
        config: Configuration of the run.
        status: Final status of the run.
        console: Output for the result.
        complete: Whether all samples are recorded.
        as_json: Whether to print JSON.
        has_cluster: Whether the run used a Ray cluster that is still running, and that has the limits.
    """
    directory = config.rollout_data_dir
    trajectories = status.aggregates["trajectories"]
    if as_json:
        result = {"complete": complete, "rollout_data_dir": directory, **asdict(status)}
        result["tally"] = result.pop("aggregates")
        output.print_json({name: value for name, value in result.items() if name not in ("running", "queued", "slots")})
    elif trajectories:
        console.print(summary_tables(status))
    elif complete:
        console.print(f"Nothing to run: all {status.bad_rows:,} rows are invalid.")
    if not complete:
        of_total = "" if status.total is None else f" of {status.total:,}"
        if status.exhausted is not None:
            _print(console, f"{status.exhausted} {_spent(status)}")
        where = "with `toolroll limiter set`" if has_cluster else "in the config"
        remedy = "" if status.exhausted is None else f"raise the budget {where} and "
        _print(console, f"Stopped with {status.done:,}{of_total} done. To resume, {remedy}run the same command again:")
        _print(console, f"  {shlex.join(['toolroll', *sys.argv[1:]])}")
    if trajectories:
        _print(console, f"Records: {directory}\nTo view them: ", end="")
        _print(console, shlex.join(["toolroll", "view", directory]), style="bold")


def _spent(status: RunSnapshot) -> str:
    """Return a sentence with the amounts spent, and one with the number of samples that were refused."""
    amounts = [
        f"{amount:g} {unit} of {resource!r}"
        for resource, units in status.spent.items()
        for unit, amount in units.items()
    ]
    spent = f"Spent: {', '.join(amounts)}. " if amounts else ""
    return f"{spent}Samples refused and not recorded: {status.refused:,}."


def _print(console: output.SafeConsole, text: str, **options: Any) -> None:
    """Print a text unchanged: without markup, and without line breaks, so that commands can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, **options)
