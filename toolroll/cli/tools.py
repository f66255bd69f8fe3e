"""`toolroll tools list | schema | call`: what a tool config gives, tried from the shell."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolroll.errors import ConfigError, Fault, did_you_mean, fault_of

if TYPE_CHECKING:
    from toolroll.tools.base_tool import BaseTool, ToolResult

app = typer.Typer(help="List the tools of a config, print their schemas, call them.", no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="A tool config (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("list")
def list_(config: Config, as_json: AsJson = False) -> None:
    """List the tools that a config gives."""
    tools = _load(config)
    if as_json:
        _print_json(
            [{"implementation": _implementation(tool), **tool.tool_schema.model_dump()["function"]} for tool in tools]
        )
        return
    title = f"{len(tools)} {'tool' if len(tools) == 1 else 'tools'} in {escape(str(config))}"
    table = Table("name", "parameters", "description", title=title, title_justify="left")
    for tool in tools:
        description = (tool.tool_schema.function.description or "").split("\n")[0]
        table.add_row(*map(escape, (tool.name, _signature(tool), description)))
    Console().print(table)


@app.command()
def schema(
    config: Config, name: Annotated[str | None, typer.Argument(help="The tool; all of them if left out.")] = None
) -> None:
    """Print what the model is told about a tool."""
    tools = _load(config)
    _print_json(
        [tool.tool_schema.model_dump() for tool in tools]
        if name is None
        else _find(tools, name, config).tool_schema.model_dump()
    )


@app.command()
def call(
    config: Config,
    name: Annotated[str, typer.Argument(help="The tool to call.")],
    arguments: Annotated[
        str, typer.Argument(help="Its arguments as JSON, as a model would write them; - reads standard input.")
    ] = "{}",
    create: Annotated[str, typer.Option(help="The trajectory's create_kwargs as JSON.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Call a tool once: create, execute, calc_reward, release.

    Ends with 1 where the call failed; then what the model would read, or what broke, is printed.
    """
    tool = _find(_load(config), name, config)
    text = sys.stdin.read() if arguments == "-" else arguments
    try:
        with redirect_stdout(sys.stderr):
            result, final = asyncio.run(_call(tool, text, _create_kwargs(create)))
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        os._exit(130)  # not sys.exit: a sync tool may sleep on in its thread, and the interpreter would wait for it
    except ConfigError:
        raise
    except Exception as error:
        _print_failure(tool, error, as_json)
        raise typer.Exit(1) from error
    if as_json:
        response = result.response.model_dump(exclude_none=True)
        _print_json(
            {"response": response, "reward": result.reward, "metrics": result.metrics, "final_reward": final},
            indent=None,
        )
        return
    typer.echo(result.response.text or "(no text)")
    metrics = {
        key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in result.metrics.items()
    }
    Console().print(
        f"[dim]reward {result.reward} · final reward {final} · metrics {escape(str(metrics))}[/dim]",
        highlight=False,
    )


async def _call(tool: BaseTool[Any], arguments: str, create_kwargs: dict[str, Any]) -> tuple[ToolResult, float]:
    from toolroll.tools.instance import ToolInstance

    async with ToolInstance(tool, create_kwargs=create_kwargs) as instance:
        return await instance.execute(arguments), await instance.calc_reward()


def _load(config: Path) -> list[BaseTool[Any]]:
    """The tools, with modules found beside the config, where people keep their own, and as `python -m` finds them."""
    from toolroll.tools.registry import initialize_tools_from_config

    sys.path[:0] = [folder for folder in (str(config.resolve().parent), str(Path.cwd())) if folder not in sys.path]
    with redirect_stdout(sys.stderr):  # what tools print must not get between the lines of our answer
        return initialize_tools_from_config(config)


def _find(tools: list[BaseTool[Any]], name: str, config: Path) -> BaseTool[Any]:
    by_name = {tool.name: tool for tool in tools}
    if name not in by_name:
        raise ConfigError(f"{config}: there is no tool {name!r}{did_you_mean(name, by_name)}.")
    return by_name[name]


def _create_kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--create is not valid JSON: {error}.") from error
    if not isinstance(kwargs, dict):
        raise ConfigError('--create must be a JSON object, like \'{"ground_truth": "72"}\'.')
    return kwargs


def _print_failure(tool: BaseTool[Any], error: Exception, as_json: bool) -> None:
    fault, said = fault_of(error), str(error) or type(error).__name__
    if as_json:
        _print_json({"fault": fault, "error": said}, indent=None)
        return
    whose = {Fault.POLICY: "the model's fault; it would read", Fault.INFRA: "not the model's fault"}[fault]
    Console(stderr=True).print(f"[red]{tool.name} failed[/red], {whose}:", highlight=False)
    typer.echo(said, err=True)


def _signature(tool: BaseTool[Any]) -> str:
    parameters = tool.tool_schema.function.parameters
    required = parameters.required or []
    return ", ".join(name if name in required else f"{name}?" for name in parameters.properties or {})


def _implementation(tool: BaseTool[Any]) -> str:
    from toolroll.tools.function_tool import FunctionTool

    made_of = tool.function if isinstance(tool, FunctionTool) else type(tool)
    return f"{made_of.__module__}.{made_of.__qualname__}"


def _print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent, ensure_ascii=False, default=str))
