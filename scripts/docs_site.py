"""Hook of mkdocs (see mkdocs.yml): generates the reference pages from the code, so that they cannot be outdated.

`python scripts/docs_site.py DIRECTORY` writes the pages as Markdown files.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

import toolroll
from toolroll.run.reporting.metrics import RUN_METRICS, RunMetric

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/toolroll/toolroll/blob/main/"
API_GROUPS = {
    "Tools": ("tools", "schemas"),
    "Limits": ("limiter",),
    "Sandbox": ("sandbox",),
    "Rollouts": ("rollout",),
    "Rewards": ("rewards",),
    "Runs": ("run",),
    "Records": ("records",),
    "Tracing": ("tracing",),
    "Errors": ("errors",),
}
"""Headings of the API page, with the packages whose exported names belong there."""
INTEGRATIONS = {
    "verl": {"toolroll.integrations.verl.agent_loop": ("ToolrollAgentLoop",)},
    "TRL": {
        "toolroll.integrations.trl.trainer_rollout": ("TrainerRollout",),
        "toolroll.integrations.trl.reward": ("scored", "trajectory_reward"),
    },
}
"""Public names of the adapters. They are listed here because verl and TRL cannot be installed together."""
SETTINGS = {
    "toolroll.run.config.RunConfig": "The YAML file of `toolroll run`, and its `KEY=VALUE` arguments.",
    "toolroll.tools.sandbox_fusion_tool.SandboxFusionSettings": "`config` of the code interpreter in a tool config.",
    "toolroll.tools.base_tool.ToolSettings": "`config` that every tool in a tool config has.",
    "toolroll.tools.mcp.settings.McpServerSettings": "`config` of an entry with `type: mcp` in a tool config.",
    "toolroll.tools.cache_settings.CacheSettings": "`cache` of a tool in a tool config.",
    "toolroll.limiter.settings.ResourceLimits": "`limits` of a tool, of a reward function and of the engine.",
    "toolroll.rewards.grader.GraderSettings": "Arguments of `CodeGrader`, and of reward functions like `code_tests`.",
    "toolroll.sandbox.server.settings.ServerSettings": "Options of `toolroll sandbox serve`.",
    "toolroll.integrations.verl.settings.AgentSettings": "The agent loop's entry in verl's agent loop config.",
}
"""Settings models, with the place where a user writes them."""


def api_page() -> str:
    """Return the page with all exported names, for mkdocstrings."""
    modules: dict[str, str] = toolroll._MODULE_BY_EXPORT  # type: ignore[attr-defined]
    lines = ["# API", "", "All of these names are imported from `toolroll`, except those of the integrations."]
    for heading, packages in API_GROUPS.items():
        lines += ["", f"## {heading}"]
        for package in packages:
            names = (name for name, module in modules.items() if module.split(".")[0] == package)
            lines += [f"\n::: toolroll.{modules[name]}.{name}" for name in names]
    for trainer, names_by_module in INTEGRATIONS.items():
        lines += ["", f"## Integration with {trainer}"]
        lines += [
            f"\n::: {module}.{name}\n    options: {{show_root_full_path: true}}"
            for module, names in names_by_module.items()
            for name in names
        ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the page with all commands and their options."""
    from toolroll.cli.app import app

    lines = ["# Command line", "", inspect.getdoc(import_module("toolroll.cli.app")) or ""]
    for words, command in _commands(get_command(app), ("toolroll",)):
        arguments = [param for param in command.params if not _is_option(param)]
        usage = " ".join([*words, *(_usage(argument) for argument in arguments), "[OPTIONS]"])
        lines += ["", f"## `{' '.join(words)}`", "", "```text", usage, "```", "", inspect.cleandoc(command.help or "")]
        rows = [_parameter_row(param) for param in command.params if not getattr(param, "hidden", False)]
        if rows:
            lines += ["", *_table(("parameter", "default", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the command lines of all commands that do something."""
    subcommands = getattr(command, "commands", None)
    if not subcommands:
        yield words, command
    for name, subcommand in (subcommands or {}).items():
        yield from _commands(subcommand, (*words, name))


def _is_option(param: Any) -> bool:
    return str(param.opts[0]).startswith("-")


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _parameter_row(param: Any) -> tuple[str, str, str]:
    names = [*param.opts, *param.secondary_opts] if _is_option(param) else [param.metavar or param.name.upper()]
    shown = param.show_default if isinstance(param.show_default, str) else None
    if shown is None and param.default not in (None, False, (), []) and not param.required:
        shown = f"`{param.default}`"
    return ", ".join(f"`{name}`" for name in names), "required" if param.required else shown or "", param.help or ""


def settings_page() -> str:
    """Return the page with all keys of config files and all server options."""
    lines = ["# Settings"]
    for path, where in SETTINGS.items():
        module, _, name = path.rpartition(".")
        model: type[BaseModel] = getattr(import_module(module), name)
        lines += ["", f"## {name}", "", where, "", *_table(("key", "type", "default", "meaning"), _keys(model))]
    return "\n".join(lines) + "\n"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each key of a settings model, with the keys of nested models."""
    docs, types = _attribute_docs(model), _attribute_types(model)
    for name, field in model.model_fields.items():
        nested = field.annotation
        if field.exclude:  # not written by users
            continue
        if inspect.isclass(nested) and issubclass(nested, BaseModel):
            yield from _keys(nested, f"{prefix}{name}.")
        else:
            yield f"`{prefix}{name}`", f"`{types[name]}`", _default(field), docs[name]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "" if field.default_factory in (dict, list) else "computed"
    if field.default == sys.executable:
        return "this one"
    return "" if field.default is None else f"`{json.dumps(field.default, default=str)}`"


def _class_bodies(model: type) -> Iterator[list[ast.stmt]]:
    """Yield the bodies of a class and its bases, from the most general to the most specific."""
    for cls in reversed(model.__mro__):
        if cls.__module__.startswith("toolroll."):
            definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
            assert isinstance(definition, ast.ClassDef)
            yield definition.body


def _attribute_docs(model: type) -> dict[str, str]:
    """Return the docstrings below the attributes of a class."""
    docs = {}
    for body in _class_bodies(model):
        for attribute, doc in pairwise(body):
            if isinstance(attribute, ast.AnnAssign) and isinstance(doc, ast.Expr):
                docs[ast.unparse(attribute.target)] = " ".join(str(ast.literal_eval(doc.value)).split())
    return docs


def _attribute_types(model: type) -> dict[str, str]:
    attributes = (node for body in _class_bodies(model) for node in body if isinstance(node, ast.AnnAssign))
    return {ast.unparse(node.target): ast.unparse(node.annotation).replace(" | ", " or ") for node in attributes}


def metrics_page() -> str:
    """Return the page with all Prometheus metrics."""
    lines = ["# Metrics", ""]
    lines += ["The sandbox server and `toolroll run` export metrics at `/metrics`, workers and limiters through Ray."]
    sections = {"Run": [_run_metric(metric) for metric in RUN_METRICS]}
    for title, file, prefix in (
        ("Sandbox server", "sandbox/server/hub", "toolroll_sandbox_"),
        ("Workers of a cluster", "rollout/distributed", "ray_"),
        ("Limiters of a cluster", "limiter", "ray_"),
    ):
        paths = (ROOT / "toolroll" / file).glob("*.py")
        sections[title] = sorted(row for path in paths for row in _metrics(path, prefix))
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", *_table(("metric", "type", "labels", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _run_metric(metric: RunMetric) -> tuple[str, str, str, str]:
    total = "_total" if metric.kind == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`toolroll_{metric.name}{total}`", metric.kind, labels, metric.description


def _metrics(path: Path, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each metric that a module creates."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
            continue
        kind = ast.unparse(node.func).split(".")[-1].removeprefix("add_").lower()
        if kind in ("counter", "gauge", "histogram"):
            name, meaning = ast.literal_eval(node.args[0]), ast.literal_eval(node.args[1])
            tags = [word.value for word in node.keywords if word.arg == "tag_keys"]
            labels = tags or (node.args[2:3] if kind == "counter" else [])
            shown = ", ".join(f"`{label}`" for found in labels for label in ast.literal_eval(found))
            total = "_total" if kind == "counter" else ""
            yield f"`{prefix}{name}{total}`", kind, shown, meaning


def record_schema_page() -> str:
    """Return the page with all fields of a record."""
    schema = json.loads((ROOT / "docs" / "records.schema.json").read_text(encoding="utf-8"))
    lines = [
        "# Record schema",
        "",
        f"One line of a record file, as in [records.schema.json]({REPOSITORY}docs/records.schema.json). "
        "[Records](../records.md) explains the format.",
    ]
    for title, part in {"Record": schema, **schema["$defs"]}.items():
        lines += ["", f"## {title}", ""]
        if values := part.get("enum"):
            lines.append(f"One of {', '.join(f'`{value}`' for value in values)}.")
            continue
        fields = part["properties"].items()
        rows = [(f"`{name}`", _schema_type(field), field.get("description", "")) for name, field in fields]
        lines += _table(("field", "type", "meaning"), rows)
    return "\n".join(lines) + "\n"


def _schema_type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return f"[{field['$ref'].rpartition('/')[2]}](#{field['$ref'].rpartition('/')[2].lower()})"
    if "anyOf" in field:
        return " or ".join(_schema_type(choice) for choice in field["anyOf"])
    if field.get("type") == "array":
        return f"list of {_schema_type(field.get('items', {}))}"
    return " or ".join([kind] if isinstance(kind := field.get("type", "any"), str) else kind)


def _table(heading: Iterable[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    names = list(heading)
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *cells)]


PAGES = {
    "reference/api.md": api_page,
    "reference/cli.md": cli_page,
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/record-schema.md": record_schema_page,
}
"""Generated pages by their path in the site."""


def write_pages(directory: Path) -> None:
    """Write the generated pages. A page that is up to date is not touched, so that `mkdocs serve` does not loop."""
    for path, make in PAGES.items():
        target, page = directory / path, make()
        if not target.exists() or target.read_text(encoding="utf-8") != page:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page, encoding="utf-8")


def on_pre_build(config: Any) -> None:
    """Write the generated pages before mkdocs reads the directory. mkdocs-static-i18n needs them as files."""
    write_pages(Path(config.docs_dir))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside of docs/ lead to the repository."""
    depth = page.file.src_uri.count("/") + 1
    return re.sub(rf"\]\((?:\.\./){{{depth}}}(?!\.)", f"]({REPOSITORY}", markdown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the generated reference pages.")
    parser.add_argument("directory", type=Path, help="directory of the pages, for example docs")
    write_pages(parser.parse_args().directory)
