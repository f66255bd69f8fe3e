"""`toolroll view`: display rollout dumps in the terminal or in a browser."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolroll.cli import output
from toolroll.errors import ConfigError, MissingExtra
from toolroll.viewer.formatting import DEFAULT_MASK


def view(
    directory: Annotated[Path, typer.Argument(help="Directory with dumps (a rollout_data_dir), or one of its files.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Path or name of the model's tokenizer, to show the text of tokens. Default: the run's model."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Start with the newest sample and follow the run.")] = False,
    mask_str: Annotated[
        str, typer.Option(help="Regular expression; text that matches it is shown as *. Use '' to mask nothing.")
    ] = DEFAULT_MASK,
    web: Annotated[bool, typer.Option("--web", help="Serve the viewer to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for --web on 127.0.0.1.")] = 8000,
) -> None:
    """Browse rollouts: conversations, tokens, rewards, search, filters and plots. Press ? for all keys."""
    tokenizer = tokenizer or _model_of(directory)
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise MissingExtra("textual", "viewer") from error
    if web:
        from toolroll.records.directory import dump_files
        from toolroll.viewer.web import WebViewer

        dump_files(directory)  # report a wrong directory here, not in the browser
        command = [sys.executable, "-m", "toolroll.cli", "view", str(directory.absolute()), "--mask-str", mask_str]
        command += ["--tokenizer", tokenizer] if tokenizer else []
        command += ["--follow"] if follow else []
        title = f"{directory.absolute().name} · toolroll view"
        WebViewer(command, title, port, lambda url: output.echo(f"{url}\nPress Ctrl+C to stop.")).run()
        return
    from toolroll.viewer.app import RolloutViewer

    viewer = RolloutViewer(directory, tokenizer=tokenizer, mask_str=mask_str, follow=follow)
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()  # Textual draws on stderr
    if not is_terminal and "TEXTUAL_DRIVER" not in os.environ:
        raise ConfigError("The viewer needs a terminal. Use `toolroll records stats` to print statistics without one.")
    viewer.run()


def _model_of(directory: Path) -> str | None:
    """Return the model of the run that wrote a directory, if its files are on this machine."""
    from toolroll.run.run_lock import RUN_IDENTITY_FILE

    try:
        model = json.loads((directory / RUN_IDENTITY_FILE).read_text()).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    return model if isinstance(model, str) and Path(model).is_dir() else None
