"""The `toolroll` command and its subcommands.

Exit status: 0 if the command succeeded; 1 if the requested action failed, e.g. a tool call or a check; 2 if it could
not start, because of wrong usage, an invalid config or a missing dependency.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.markup import escape

from toolroll.cli import output
from toolroll.cli.demo import demo
from toolroll.cli.doctor import doctor
from toolroll.cli.examples import app as examples_app
from toolroll.cli.limiter import app as limiter_app
from toolroll.cli.records import app as records_app
from toolroll.cli.run import run
from toolroll.cli.sandbox import app as sandbox_app
from toolroll.cli.sandbox_probe import probe
from toolroll.cli.tools import app as tools_app
from toolroll.cli.view import view
from toolroll.errors import ConfigError, ToolrollError

app = typer.Typer(
    name="toolroll",
    help="Tool calling for RL rollouts of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(examples_app, name="examples")
app.add_typer(tools_app, name="tools")
app.add_typer(limiter_app, name="limiter")
app.add_typer(sandbox_app, name="sandbox")
sandbox_app.command()(probe)
app.command()(run)
app.add_typer(records_app, name="records")
app.command()(doctor)
app.command()(view)


def _print_version(requested: bool) -> None:
    if requested:
        from toolroll import __version__

        output.echo(f"toolroll {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Errors of toolroll are printed on one line, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the terminal cannot encode must not raise
    output.configure_logging()
    try:
        app()
    except ToolrollError as error:
        output.SafeConsole(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False
        )
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except Exception:
        output.print_traceback()
        sys.exit(1)
