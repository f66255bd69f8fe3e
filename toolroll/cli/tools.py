"""The commands `toolroll tools list | schema | call | serve`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from toolroll.cli import output
from toolroll.cli.completion import silenced
from toolroll.errors import ConfigError, Fault, fault_of, unknown_name
from toolroll.viewer.formatting import plural

if TYPE_CHECKING:
    from toolroll.tools.base_tool import BaseTool, ToolResult

app = typer.Typer(
    help="List the tools of a config file, print their schemas, call them, or serve them.", no_args_is_help=True
)

Config = Annotated[Path, typer.Argument(help="Path of a tool config (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    names: list[str] = []
    with silenced():
        names = [tool.name for tool in _load_tools(context.params["config"])]
    return [name for name in names if name.startswith(incomplete)]


@app.command("list")
def list_(config: Config, as_json: AsJson = False) -> None:
    """List the tools of a config file."""
    tools = _load_tools(config)
    if as_json:
        output.print_json([_describe(tool) for tool in tools], indent=2)
        return
    title = f"{plural(len(tools), 'tool')} in {escape(str(config))}"
    table = Table("name", "parameters", "description", title=title, title_justify="left")
    for tool in tools:
        description = (tool.tool_schema.function.description or "").split("\n")[0]
        table.add_row(*map(escape, (tool.name, _parameter_names(tool), description)))
    output.SafeConsole().print(table)


@app.command()
def schema(
    config: Config,
    name: Annotated[
        str | None, typer.Argument(help="Name of a tool. By default, all tools.", autocompletion=_complete_name)
    ] = None,
) -> None:
    """Print the schema of a tool, as the model sees it."""
    if name is None:
        output.print_json([tool.tool_schema.model_dump() for tool in _load_tools(config)], indent=2)
    else:
        output.print_json(_load_tool(config, name).tool_schema.model_dump(), indent=2)


@app.command()
def call(
    config: Config,
    name: Annotated[str, typer.Argument(help="Name of the tool.", autocompletion=_complete_name)],
    arguments: Annotated[
        str, typer.Argument(help="Arguments as JSON, as a model would write them. Use - to read them from stdin.")
    ] = "{}",
    create: Annotated[str, typer.Option(help="The trajectory's create_kwargs as JSON.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Call a tool once: create, execute, calc_reward, release.

    If the call fails, the exit status is 1 and the error is printed.
    """
    tool = _load_tool(config, name)
    text = sys.stdin.read() if arguments == "-" else arguments
    try:
        with redirect_stdout(sys.stderr):
            result, final_reward = asyncio.run(_call(tool, text, _parse_create_kwargs(create)))
    except KeyboardInterrupt:
        output.echo("Interrupted.", err=True)
        os._exit(130)  # sys.exit would wait for the thread of a sync tool that is still running
    except ConfigError:
        raise
    except Exception as error:
        _print_failure(tool, error, as_json)
        raise typer.Exit(1) from error
    from toolroll.images import read_image  # after the call, because it imports pydantic

    images = list(map(read_image, result.response.image or ()))
    if as_json:
        response = result.response.model_dump(exclude_none=True, exclude={"image"})
        response |= {"image": [{"width": one.width, "height": one.height} for one in images]} if images else {}
        fields = {"response": response, "reward": result.reward}
        output.print_json({**fields, "metrics": result.metrics, "final_reward": final_reward})
        return
    for image in images:
        output.write_output(f"(image, {image.width} × {image.height} pixels)\n")
    output.write_output(f"{result.response.text or '(no text)'}\n")
    metrics = {
        key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in result.metrics.items()
    }
    summary = f"reward {result.reward} · final reward {final_reward} · metrics {metrics}"
    output.SafeConsole().print(summary, style="dim", markup=False, highlight=False)


@app.command()
def serve(
    config: Config,
    mcp: Annotated[bool, typer.Option("--mcp", help="Speak the Model Context Protocol, the only choice.")] = False,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve over HTTP. By default, over stdin and stdout.")
    ] = None,
    create: Annotated[
        str, typer.Option(help="create_kwargs of each session as JSON, for all tools or by tool name.")
    ] = "{}",
    records: Annotated[Path | None, typer.Option(help="Directory for a record of each session.")] = None,
    call_timeout: Annotated[float, typer.Option(help="Timeout of a call, in seconds.")] = 120.0,
    idle_timeout: Annotated[
        float, typer.Option(min=1, max=1e9, help="Idle time after which a session over HTTP ends, in seconds.")
    ] = 1800.0,
) -> None:
    """Serve the tools to another program, such as a coding agent.

    Each client session has its own instance of every tool. Over HTTP, clients must send the token in
    TOOLROLL_MCP_TOKEN, if it is set. After SIGTERM or Ctrl+C the server ends all sessions and exits with status 0.
    """
    if not mcp:
        raise ConfigError("tools serve: no protocol selected. Add --mcp.")
    from toolroll.integrations.mcp.process import ServeOptions, serve_mcp

    options = ServeOptions(
        create_kwargs=_parse_create_kwargs(create),
        records=records,
        call_timeout=call_timeout,
        idle_timeout=idle_timeout,
    )
    output.configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve_mcp(lambda: _load_tools(config), http, options)


async def _call(tool: BaseTool[Any], arguments: str, create_kwargs: dict[str, Any]) -> tuple[ToolResult, float]:
    from toolroll.tools.instance import ToolInstance

    warning = asyncio.create_task(_warn_of_missing_sandbox(tool))
    async with ToolInstance(tool, create_kwargs=create_kwargs) as instance:
        result = await instance.execute(arguments), await instance.calc_reward()
    warning.cancel()
    return result


async def _warn_of_missing_sandbox(tool: BaseTool[Any]) -> None:
    """Print a message at once if the call will wait for a sandbox that is not there."""
    from toolroll._internal.text import hide_credentials
    from toolroll.run.preflight import is_reachable
    from toolroll.sandbox.client import QUEUE_ALLOWANCE_S
    from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

    if not isinstance(tool, SandboxFusionTool):
        return
    urls = tool.settings.sandbox_fusion_url
    if not any(await asyncio.gather(*map(is_reachable, urls))):
        where = hide_credentials(", ".join(urls))
        output.echo(
            f"Cannot connect to the sandbox at {where}. Trying again for {QUEUE_ALLOWANCE_S:.0f} s. "
            "To start one: toolroll sandbox serve",
            err=True,
        )


def _load_tools(config: Path) -> list[BaseTool[Any]]:
    """Load the tools. Modules next to the config file and in the current directory can be imported."""
    from toolroll.tools.registry import initialize_tools_from_config

    directories = (str(config.resolve().parent), str(Path.cwd()))
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]
    with redirect_stdout(sys.stderr):  # keeps the output of imported modules separate
        return initialize_tools_from_config(config)


def _load_tool(config: Path, name: str) -> BaseTool[Any]:
    by_name = {tool.name: tool for tool in _load_tools(config)}
    if name not in by_name:
        raise ConfigError(f"{config}: {unknown_name('tool', name, by_name)}")
    return by_name[name]


def _parse_create_kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--create: invalid JSON: {error}.") from error
    if not isinstance(kwargs, dict):
        raise ConfigError('--create: expected a JSON object such as \'{"ground_truth": "72"}\'.')
    return kwargs


def _print_failure(tool: BaseTool[Any], error: Exception, as_json: bool) -> None:
    fault, message = fault_of(error), str(error) or type(error).__name__
    if as_json:
        output.print_json({"fault": fault, "error": message})
        return
    kind = {Fault.POLICY: "policy fault; the model would read", Fault.INFRA: "infra fault"}[fault]
    output.SafeConsole(stderr=True).print(f"[red]{escape(tool.name)} failed[/red] ({kind}):", highlight=False)
    output.echo(message, err=True)


def _parameter_names(tool: BaseTool[Any]) -> str:
    parameters = tool.tool_schema.function.parameters
    required = parameters.required or []
    return ", ".join(name if name in required else f"{name}?" for name in parameters.properties or {})


def _describe(tool: BaseTool[Any]) -> dict[str, Any]:
    from toolroll.tools.function_tool import FunctionTool

    implementation = tool.function if isinstance(tool, FunctionTool) else type(tool)
    path = f"{implementation.__module__}.{implementation.__qualname__}"
    return {"implementation": path, **tool.tool_schema.function.model_dump()}
