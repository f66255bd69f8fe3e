"""`toolroll examples`: list the examples that come with the package, and copy one to change it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from toolroll.cli import output
from toolroll.errors import ConfigError, unknown_name

app = typer.Typer(help="Copy an example to change it.", no_args_is_help=True)

PACKAGE = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "rollouts", ".*")


def examples_dir() -> Path:
    """Return the directory of the examples: in the package or, in a checkout, beside it."""
    installed = PACKAGE / "_examples"
    return installed if installed.is_dir() else PACKAGE.parent / "examples"


def _names() -> list[str]:
    return sorted(path.name for path in examples_dir().iterdir() if path.is_dir() and not path.name.startswith("_"))


@app.command("list")
def list_examples() -> None:
    """List the names of the examples."""
    for name in _names():
        output.echo(name)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="Name of the example.", autocompletion=_names)],
    directory: Annotated[Path | None, typer.Argument(help="Directory to create. Default: the example's name.")] = None,
) -> None:
    """Copy an example to a new directory."""
    if name not in _names():
        raise ConfigError(unknown_name("example", name, _names()))
    target = directory or Path(name)
    try:
        shutil.copytree(examples_dir() / name, target, ignore=IGNORED)
    except FileExistsError:
        raise ConfigError(f"{target} exists already. Choose another directory.") from None
    for file in sorted(target.rglob("*")):
        if file.is_file():
            output.echo(str(file))
