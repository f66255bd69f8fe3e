"""Print the output of commands.

Text that a model, a tool, a server or a config file wrote may contain escape sequences, which would change the title,
the clipboard or the contents of the terminal.

Invariant: commands print only through this module, which sanitizes all text. Only rich's own styles and cursor
movements reach the terminal. `tests/cli/test_output.py` checks both.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from toolroll._internal.sanitize import escape_unsafe, sanitize


class SafeConsole(Console):
    """Console that sanitizes the text of everything it renders, before it is wrapped and styled."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object without control characters, except those of rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else sanitize(text), style, control)


class SafeFormatter(logging.Formatter):
    """Formatter that sanitizes log messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return sanitize(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formatter that writes a log record as one line of JSON, with the fields that were passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record. Its characters are ASCII, so that a terminal interprets none of them."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": moment.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        fields["message"] = record.getMessage()
        extra = vars(record).keys() - _STANDARD_FIELDS
        fields |= {name: vars(record)[name] for name in sorted(extra) if not name.startswith("_")}  # e.g. Ray's
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


_STANDARD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of text, sanitized."""
    typer.echo(sanitize(text), err=err)


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON. Characters that a terminal interprets are escaped, so the value is unchanged."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    typer.echo(escape_unsafe(text, lambda character: json.dumps(character)[1:-1]))


def write_output(text: str) -> None:
    """Write the output of a program or tool to stdout. It is sanitized for a terminal, and unchanged otherwise."""
    sys.stdout.write(sanitize(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_traceback() -> None:
    """Print the traceback of the current exception, sanitized."""
    echo(traceback.format_exc().rstrip("\n"), err=True)


def configure_logging(level: int | None = None, style: str | None = None, *, as_json: bool = False) -> None:
    """Sanitize log output.

    Args:
        level: Minimum level to print. By default, warnings are printed unless another handler is configured.
        style: Format of a line; the message alone by default.
        as_json: Print lines of JSON instead.
    """
    if level is None:
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(SafeFormatter(style))
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else SafeFormatter(style))
    logging.basicConfig(level=level, handlers=[handler])
