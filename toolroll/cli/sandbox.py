"""`toolroll sandbox serve | run`: run the model's code. See `sandbox_probe` for `toolroll sandbox probe`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from rich.markup import escape

from toolroll.cli import output
from toolroll.errors import ConfigError, InfraFault, validate

if TYPE_CHECKING:
    from toolroll.sandbox.execution import Execution
    from toolroll.sandbox.server.server import SandboxServer
    from toolroll.sandbox.server.settings import ServerSettings

logger = logging.getLogger(__name__)
app = typer.Typer(
    help="Run code in sandboxes: start a server, run a program, measure throughput.", no_args_is_help=True
)

T = TypeVar("T")

Unsafe = Annotated[
    bool, typer.Option("--unsafe", help="Start even if programs cannot be isolated, to run code that you trust.")
]
MIN_COMPILE_TIMEOUT_S = 30.0
TIER_DESCRIPTIONS = {
    "A": "tier A: namespaces, a cgroup, Landlock and seccomp for each program",
    "B": "tier B: namespaces, Landlock and seccomp for each program; memory is limited per process",
    "C": "tier C: Landlock and seccomp for each program; no namespaces, memory is limited per process",
    "unsafe": "[red]unsafe: programs are not isolated; they can read files and signal processes as this server[/red]",
    "none": "[red]none: programs are not isolated, and their memory is not limited; run only code that you trust[/red]",
}


class LogFormat(StrEnum):
    """Formats of the server's log."""

    TEXT = "text"
    JSON = "json"


def _option(text: str, default: str) -> Any:
    """Return an option whose default is that of the settings: None is not passed on."""
    return typer.Option(help=text, show_default=default)


@app.command(context_settings={"auto_envvar_prefix": "TOOLROLL_SANDBOX"})  # e.g. TOOLROLL_SANDBOX_CAPACITY
def serve(
    host: Annotated[str | None, _option("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 for a free port.", "8080")] = None,
    capacity: Annotated[int | None, _option("Number of programs that run concurrently.", "number of CPUs + 1")] = None,
    fronts: Annotated[str | None, _option("Processes that handle requests; auto for one per 4 CPUs.", "auto")] = None,
    queue: Annotated[int | None, _option("Maximum number of waiting requests; more get 429.", "1000")] = None,
    memory_mb: Annotated[int | None, _option("Memory limit of a program, in megabytes.", "1024")] = None,
    disk_mb: Annotated[int | None, _option("Maximum size of a program's files, in megabytes.", "512")] = None,
    max_timeout: Annotated[float | None, _option("Maximum timeout of a request, in seconds.", "300")] = None,
    output_kb: Annotated[int | None, _option("Kilobytes to keep of stdout, and of stderr.", "1024")] = None,
    request_mb: Annotated[int | None, _option("Maximum size of a request and its fetched files, in MB.", "64")] = None,
    sessions: Annotated[int | None, _option("Maximum number of sessions.", "64")] = None,
    session_ttl: Annotated[float | None, _option("Idle time after which a session ends, in seconds.", "600")] = None,
    python: Annotated[str | None, _option("Python interpreter of the programs.", "this one")] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line for each request.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log on stderr.")] = LogFormat.TEXT,
    unsafe: Unsafe = False,
) -> None:
    """Start a sandbox server. If TOOLROLL_SANDBOX_TOKEN is set, clients must send this token.

    The variable may contain several tokens, separated by commas. Each token has its own sessions. Every option can also
    be set by a variable, e.g. TOOLROLL_SANDBOX_CAPACITY=8.

    After SIGTERM or Ctrl+C the server waits for running programs and exits with status 0. A second signal stops it at
    once.
    """
    given = {name: value for name, value in locals().items() if value is not None and name != "log_format"}
    from toolroll.sandbox.protocol import TOKEN_ENV_VAR
    from toolroll.sandbox.server.settings import ServerSettings, require_isolation

    require_isolation(unsafe=unsafe)
    as_json = log_format is LogFormat.JSON
    output.configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s", as_json=as_json)
    if token := os.environ.pop(TOKEN_ENV_VAR, None):  # removed, so that no child process inherits it
        given["token"] = token
    settings = validate(ServerSettings, given, "sandbox serve")
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.token is None:
        warning = "Listening on %s without a token: anyone who can reach this port can run programs. Set %s."
        logger.warning(warning, settings.host, TOKEN_ENV_VAR)
    run_async(_serve(settings, as_json=as_json), as_server=True)


@app.command()
def run(
    file: Annotated[str, typer.Argument(help="File of the program; - for standard input.")],
    language: Annotated[str | None, _option("Language of the program.", "by file name, else python")] = None,
    timeout: Annotated[float, typer.Option(help="Timeout of the program, in seconds.")] = 10.0,
    stdin: Annotated[Path | None, typer.Option(help="File to use as the program's standard input.")] = None,
    url: Annotated[str | None, typer.Option(help="URL of a sandbox server. Default: a temporary server.")] = None,
    unsafe: Unsafe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a program in a sandbox and print its output. Exits with the program's status."""
    from toolroll.sandbox.protocol import LANGUAGE_BY_SUFFIX, Language
    from toolroll.sandbox.server.settings import require_isolation

    if url is None:
        require_isolation(unsafe=unsafe)

    code = sys.stdin.read() if file == "-" else read_text(Path(file))
    language = language or LANGUAGE_BY_SUFFIX.get(Path(file).suffix.lower(), "python")
    if language not in get_args(Language):
        raise ConfigError(f"Unknown language {language!r}. Available languages: {', '.join(get_args(Language))}.")
    timeouts = {"run_timeout": timeout, "compile_timeout": max(timeout, MIN_COMPILE_TIMEOUT_S)}
    options = {"language": language, "stdin": read_text(stdin) if stdin else None, **timeouts}
    try:
        execution = run_async(_run_once(url, code, options, unsafe=unsafe), as_server=url is None)
    except InfraFault as error:
        raise ConfigError(str(error)) from error
    if as_json:
        output.print_json(asdict(execution), indent=2)
    else:
        _print_execution(execution)
    raise typer.Exit(0 if execution.fault is None else (execution.return_code or 1) & 0xFF or 1)


def read_text(file: Path) -> str:
    """Return the text of a file. Raises ConfigError if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def run_async(work: Coroutine[Any, Any, T], *, as_server: bool = False) -> T:
    """Run a coroutine and return its result, with the event loop of a server if it starts one.

    Ctrl+C ends the command with status 130.
    """
    if as_server:
        from toolroll.sandbox.server.event_loop import new_event_loop
    else:
        from uvloop import new_event_loop

    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
    raise typer.Exit(130)


async def _serve(settings: ServerSettings, *, as_json: bool) -> None:
    from toolroll.sandbox.server.server import SandboxServer

    stop = asyncio.Event()
    async with SandboxServer(settings) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if as_json:
            found, capacity = server.description, settings.capacity
            fields = {"url": server.url, "tier": found.tier, "gaps": found.gaps, "capacity": capacity}
            logger.info("serving on %s", server.url, extra=fields)
        else:
            _describe_server(server)
        await stop.wait()
        stop.clear()
        message = f"Stopping; waiting for {server.hub.state.running} running programs."
        if as_json:
            logger.info("%s", message)
        else:
            output.echo(f"{message} Press Ctrl+C again to force quit.")
        tasks = [asyncio.create_task(server.drain()), asyncio.create_task(stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def _describe_server(server: SandboxServer) -> None:
    """Print how the server isolates programs, what it can run, and its address."""
    settings, found, console = server.settings, server.description, output.SafeConsole(highlight=False)
    for note in found.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    for gap in found.gaps:
        console.print(f"[yellow]gap:[/yellow] {escape(gap)}", soft_wrap=True)
    console.print(f"isolation  {TIER_DESCRIPTIONS[found.tier]}", soft_wrap=True)
    console.print(f"languages  {', '.join(found.languages)}", soft_wrap=True)
    memory = "" if found.tier == "none" else f" of {settings.memory_mb} MB"
    console.print(f"capacity   {settings.capacity} programs{memory}, {settings.queue} waiting requests")
    if settings.front_count > 1:
        console.print(f"fronts     {settings.front_count} processes")
    console.print(f"[bold]serving on {server.url}[/bold]")


async def _run_once(url: str | None, code: str, options: dict[str, Any], *, unsafe: bool) -> Execution:
    from toolroll.sandbox.client import SandboxClient
    from toolroll.sandbox.protocol import TOKEN_ENV_VAR

    if url is None:
        from toolroll.sandbox.server.server import SandboxServer
        from toolroll.sandbox.server.settings import ServerSettings

        settings = ServerSettings(port=0, fronts=1, unsafe=unsafe)
        async with SandboxServer(settings) as server, SandboxClient(server.url) as client:
            return await client.run(code, **options)
    async with SandboxClient(url, token=os.environ.get(TOKEN_ENV_VAR)) as client:
        await client.ping()  # fails sooner than a program, which would be retried
        return await client.run(code, **options)


def _print_execution(execution: Execution) -> None:
    """Print the output of a program to the same streams, then one line about its end."""
    from toolroll.sandbox.execution import ExecutionOutcome

    output.write_output(execution.stdout)
    console = output.SafeConsole(stderr=True, highlight=False)
    if execution.stderr:
        console.print(escape(execution.stderr.rstrip("\n")), style="red", soft_wrap=True)
    outcome = {
        ExecutionOutcome.OK: "[green]done[/green]",
        ExecutionOutcome.FAILED: f"[red]failed[/red] with status {execution.return_code}",
        ExecutionOutcome.COMPILE_FAILED: "[red]compilation failed[/red]",
        ExecutionOutcome.TIMEOUT: "[red]timed out[/red]",
        ExecutionOutcome.COMPILE_TIMEOUT: "[red]compilation timed out[/red]",
        ExecutionOutcome.OUT_OF_MEMORY: "[red]out of memory[/red]",
    }[execution.outcome]
    result = execution.run_result or execution.compile_result
    duration = f" after {result.execution_time:.3f} s" if result and result.execution_time is not None else ""
    streams = (("stdout", execution.stdout_truncated), ("stderr", execution.stderr_truncated))
    truncated = "".join(f"; {name} truncated" for name, is_truncated in streams if is_truncated)
    console.print(f"{outcome}{duration}{truncated}")
