"""The command `toolroll`: its subcommands, and how it ends.

Exit status: 0 done; 1 what was asked for failed (a tool call, a check); 2 it could not be begun (wrong usage, a wrong
config, a missing part).
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from toolroll import __version__
from toolroll.cli.doctor import doctor
from toolroll.cli.limiter import app as limiter_app
from toolroll.cli.records import app as records_app
from toolroll.cli.sandbox import app as sandbox_app
from toolroll.cli.tools import app as tools_app
from toolroll.cli.view import view
from toolroll.errors import ConfigError

app = typer.Typer(
    name="toolroll",
    help="Tools for language models that learn by reinforcement: try them, run rollouts with them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(tools_app, name="tools")
app.add_typer(limiter_app, name="limiter")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(records_app, name="records")
app.command()(doctor)
app.command()(view)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"toolroll {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. An error that is the user's to mend is said in one line, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another, and goes on
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
