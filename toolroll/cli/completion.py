"""Shell completion that depends on a config file. Users install it with `toolroll --install-completion`."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer


@contextmanager
def silenced() -> Iterator[None]:
    """Hide output and errors, for example of a config file that is not valid yet. The shell would show them."""
    with suppress(Exception), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def complete_setting(context: typer.Context, incomplete: str) -> list[str]:
    """Return the settings of a run that start with the incomplete word.

    The values of a setting are proposed once no other setting matches. They are its choices, or else its value in the
    file or its default. The shell appends no space to `key=`, because there are several proposals.
    """
    values = _setting_values(context.params.get("config"))
    words: list[str] = ["", *(context.params.get("settings") or [])]
    # bash splits `key=value` into three words and replaces the last one. Click drops an incomplete word that is `=`.
    if words[-1] == "=":
        return [value for value in values.get(words[-2], ()) if value.startswith(incomplete)]
    if not incomplete and words[-1] in values and words[-2] != "=":
        return values[words[-1]]
    keys = [key for key in values if f"{key}=".startswith(incomplete) or incomplete.startswith(f"{key}=")]
    if len(keys) != 1:
        return [f"{key}=" for key in keys]
    proposals = (f"{keys[0]}={value}" for value in ("", *values[keys[0]]))
    return [proposal for proposal in proposals if proposal.startswith(incomplete)]


def _setting_values(config: Path | None) -> dict[str, list[str]]:
    """Return the values to propose for each setting of the schema and of the file."""
    from omegaconf import OmegaConf

    from toolroll.run.config import ENGINE_CLASSES, RunConfig, setting_fields

    values: dict[str, list[str]] = {}
    fields = setting_fields(RunConfig)
    for key, field in fields.items():
        values[key] = [] if field.is_required() else [_format(field.get_default(call_default_factory=True))]
    with silenced():
        for key, value in _flatten(OmegaConf.to_container(OmegaConf.load(str(config)))):
            values[key] = [_format(value)]
    values |= {key: choices for key, field in fields.items() if (choices := _choices(field.annotation))}
    values["engine.kind"] = list(ENGINE_CLASSES)
    sections = {key.rpartition(".")[0] for key in values}
    return {key: found for key, found in values.items() if key not in sections}


def _choices(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _format(value: Any) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value, default=str))
