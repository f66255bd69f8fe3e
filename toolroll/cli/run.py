"""`toolroll run`: a whole run, from a config to records, watched while it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from toolroll.cli.run_display import Pace, line, panel
from toolroll.cli.run_summary import summary
from toolroll.errors import ConfigError, ToolrollError

if TYPE_CHECKING:
    from toolroll.run.config import RunConfig
    from toolroll.run.status import Status

LOOK_EVERY = 0.5
"""Seconds between two looks at a run, in a terminal."""
SAY_EVERY = 5.0
"""Seconds between two lines, elsewhere."""


def run(
    config: Annotated[Path, typer.Argument(help="What to run (YAML).")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="In place of what the file says, e.g. n=8.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON at the end, for programs; progress goes to stderr.")
    ] = False,
) -> None:
    """Run all prompts of a data set, and write a record of every trajectory.

    The same command again goes on where an earlier run was interrupted. Ends with 0 when all is done, with 1 where
    nothing but the infrastructure's failures came of it.
    """
    from toolroll.run.config import RunConfig

    for word in settings or ():
        if "=" not in word:
            raise ConfigError(f"{word!r} is no setting. Write it as key=value, e.g. n=8.")
    # Tools and reward functions are found beside the config, where people keep their own, and as `python -m` does it.
    places = (str(config.resolve().parent), str(Path.cwd()))
    sys.path[:0] = [folder for folder in places if folder not in sys.path]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its tokenizers are all that is wanted of it
    loaded = RunConfig.load(config, settings or ())
    watch = _Watch(loaded, Console(stderr=as_json), title=str(config))
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            signalled = _event_loop(watch.follow())
    except ConfigError:
        raise
    except ToolrollError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error
    assert watch.last is not None
    _tell(loaded, watch.last, watch.console, signalled, as_json)
    if signalled:
        raise typer.Exit(128 + signalled)
    if not watch.last.tally["outcomes"].get("ok"):
        raise typer.Exit(1)


def _event_loop(work: Any) -> int:
    import uvloop

    signalled: int = uvloop.run(work)
    return signalled


class _Watch:
    """A run, looked at until it ends or is told to."""

    def __init__(self, config: RunConfig, console: Console, title: str) -> None:
        self.config = config
        self.console = console
        self.last: Status | None = None
        self._title = title
        self._pace = Pace()
        self._stop = asyncio.Event()
        self._signal = 0

    async def follow(self) -> int:
        """Run it to its end. The signal that ended it before that, else 0."""
        from toolroll.run.preflight import check
        from toolroll.run.run import Run

        with self._signals(), self._display() as live:
            await check(self.config)
            async with Run(self.config) as run:
                ending = asyncio.create_task(run.wait())
                stopping = asyncio.create_task(self._stop.wait())
                said = 0.0
                while not ending.done() and not stopping.done():
                    status = await run.status()
                    rates = self._pace.at(status)
                    if live is not None:
                        live.update(panel(self._title, status, rates))
                    elif status.seconds >= said:
                        self._say(line(status, rates))
                        said = status.seconds + SAY_EVERY
                    await asyncio.wait({ending, stopping}, timeout=LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not ending.done():
                    ending.cancel()
                    self._say("Stopping: what is done is kept. Once more, and it stops at once.")
                else:
                    ending.result()
            self.last = await run.status()
            if live is not None:
                live.update(panel(self._title, self.last, self._pace.at(self.last)))
        return self._signal

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _display(self) -> Iterator[Live | None]:
        if not self.console.is_terminal:
            yield None
            return
        with Live("Beginning …", console=self.console, refresh_per_second=4) as live:
            yield live

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the run, and the second one doesn't wait for that."""
        loop = asyncio.get_running_loop()

        def told(number: int) -> None:
            if self._signal:
                os._exit(128 + number)
            self._signal = number
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _tell(config: RunConfig, status: Status, console: Console, signalled: int, as_json: bool) -> None:
    """What came of it."""
    complete = not signalled
    directory = config.rollout_data_dir
    if as_json:
        told = {"complete": complete, "rollout_data_dir": directory, **asdict(status)}
        typer.echo(json.dumps({name: value for name, value in told.items() if name not in ("running", "queued")}))
    elif status.tally["trajectories"]:
        console.print(summary(status))
    elif complete:
        console.print(f"There was nothing to do: {status.bad_rows:,} rows that can't be used, and no others.")
    if not complete:
        of_total = "" if status.total is None else f" of {status.total:,}"
        again = escape(shlex.join(["toolroll", *sys.argv[1:]]))
        console.print(
            f"Stopped with {status.done:,}{of_total} done. The same command goes on from there:\n  {again}",
            soft_wrap=True,
            highlight=False,
        )
    if status.tally["trajectories"]:
        view = escape(shlex.join(["toolroll", "view", directory]))
        console.print(
            f"Records: {escape(directory)}\nLook at them: [bold]{view}[/bold]", soft_wrap=True, highlight=False
        )
