"""`toolroll view`: what rollouts left on disk, looked at in the terminal or in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolroll.errors import ConfigError, MissingExtra
from toolroll.viewer.harmless import DEFAULT_MASK


def view(
    directory: Annotated[Path, typer.Argument(help="Where the dumps are: a rollout_data_dir, or one file of it.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's tokenizer: a path or a name. Shows the texts of tokens.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Begin with the newest sample, and go along with the run.")
    ] = False,
    mask_str: Annotated[
        str, typer.Option(help="What this regular expression matches is shown as *; '' for nothing.")
    ] = DEFAULT_MASK,
    web: Annotated[bool, typer.Option("--web", help="Serve it to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where --web listens, on 127.0.0.1.")] = 8000,
) -> None:
    """Look at rollouts: samples, conversations, tokens, rewards, searches, plots. Press ? in it for its keys."""
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise MissingExtra("textual", "viewer") from error
    if web:
        _serve(directory, tokenizer, follow, mask_str, port)
        return
    from toolroll.viewer.app import RolloutViewer

    viewer = RolloutViewer(directory, tokenizer=tokenizer, mask_str=mask_str, follow=follow)
    if not (sys.stdin.isatty() and sys.stderr.isatty()) and "TEXTUAL_DRIVER" not in os.environ:  # it draws on stderr
        raise ConfigError("The viewer needs a terminal. `toolroll records stats` prints figures without one.")
    viewer.run()


def _serve(directory: Path, tokenizer: str | None, follow: bool, mask_str: str, port: int) -> None:
    from toolroll.records.directory import dump_files
    from toolroll.viewer.web import WebViewer

    dump_files(directory)  # what is wrong with it is better said here than in the browser
    command = [sys.executable, "-m", "toolroll.cli", "view", str(directory.absolute()), "--mask-str", mask_str]
    command += ["--tokenizer", tokenizer] if tokenizer else []
    command += ["--follow"] if follow else []
    WebViewer(command, port, lambda address: typer.echo(f"{address}\nCtrl+C ends it.")).run()
