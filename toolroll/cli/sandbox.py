"""`toolroll sandbox serve | run | probe`: run the model's code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape

from toolroll.cli.sandbox_probe import probe
from toolroll.errors import ConfigError, InfraFault, MissingExtra, explain

if TYPE_CHECKING:
    from toolroll.sandbox.execution import Execution
    from toolroll.sandbox.protocol import Language
    from toolroll.sandbox.server.server import Server
    from toolroll.sandbox.server.settings import ServerSettings

app = typer.Typer(help="Run code in sandboxes: serve them, try them, measure them.", no_args_is_help=True)

app.command()(probe)

TOKEN = "TOOLROLL_SANDBOX_TOKEN"  # noqa: S105 (its name)
SUFFIXES: dict[str, Language] = {
    ".py": "python", ".sh": "bash", ".cpp": "cpp", ".cc": "cpp", ".js": "nodejs", ".ts": "typescript", ".java": "java",
    ".rs": "rust", ".go": "go", ".pl": "perl", ".rb": "ruby", ".php": "php", ".lua": "lua", ".r": "R", ".sql": "sql",
    ".jl": "julia", ".scala": "scala", ".swift": "swift", ".rkt": "racket", ".kts": "kotlin_script",
}  # fmt: skip


def _option(text: str, default: str) -> Any:
    """An option that isn't passed on unless it is given; its default is the settings' own."""
    return typer.Option(help=text, show_default=default)


Url = Annotated[str | None, typer.Option(help="A running sandbox server; without it one is started for this.")]


@app.command()
def serve(
    host: Annotated[str | None, _option("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 for a free one.", "8080")] = None,
    capacity: Annotated[int | None, _option("Programs that run at once.", "number of CPUs + 1")] = None,
    queue: Annotated[int | None, _option("Requests that wait; more get 429.", "1000")] = None,
    memory_mb: Annotated[int | None, _option("Megabytes for a program.", "1024")] = None,
    disk_mb: Annotated[int | None, _option("Megabytes of files for a program.", "512")] = None,
    max_timeout: Annotated[float | None, _option("Most seconds that may be asked for.", "300")] = None,
    output_kb: Annotated[int | None, _option("Kilobytes kept of stdout, and of stderr.", "1024")] = None,
    request_mb: Annotated[int | None, _option("Megabytes of a request, or of fetched files.", "64")] = None,
    sessions: Annotated[int | None, _option("Sessions that are kept.", "64")] = None,
    session_ttl: Annotated[float | None, _option("Seconds until an idle session ends.", "600")] = None,
    python: Annotated[str | None, _option("Interpreter of the programs.", "this one")] = None,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Start even where programs can't be isolated.")] = False,
) -> None:
    """Serve sandboxes until interrupted. A token for clients is taken from the environment: TOOLROLL_SANDBOX_TOKEN.

    Ends with 0 after SIGTERM or Ctrl-C, when what was running has ended; a second signal doesn't wait.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {name: value for name, value in locals().items() if value is not None}
    token = os.environ.pop(TOKEN, None)  # so that nothing that is started here has it
    settings = _settings(given | ({"token": token} if token else {}))
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.token is None:
        logging.getLogger(__name__).warning(
            "Listening on %s without a token: whoever reaches this port can run programs here. Set %s.",
            settings.host,
            TOKEN,
        )
    _run(_serve(settings))


@app.command()
def run(
    file: Annotated[str, typer.Argument(help="A file with the program; - for standard input.")],
    language: Annotated[str | None, _option("Its language.", "by the file's name, else python")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may run.")] = 10.0,
    stdin: Annotated[Path | None, typer.Option(help="A file to give it as its standard input.")] = None,
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Run a program once in a sandbox, and show what it did. Ends with the program's own status."""
    from toolroll.sandbox.protocol import Language

    try:
        code = sys.stdin.read() if file == "-" else Path(file).read_text(errors="replace")
        given = stdin.read_text(errors="replace") if stdin else None
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    chosen = language or SUFFIXES.get(Path(file).suffix.lower(), "python")
    if chosen not in get_args(Language):
        raise ConfigError(f"There is no language {chosen!r}. The languages are: {', '.join(get_args(Language))}.")
    options = {"language": chosen, "stdin": given, "run_timeout": timeout, "compile_timeout": max(timeout, 30.0)}
    try:
        done = _run(_run_once(url, code, options))
    except InfraFault as error:
        raise ConfigError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(asdict(done), indent=2, default=str))
    else:
        _show(done)
    raise typer.Exit(0 if done.fault is None else (done.return_code or 1) & 0xFF or 1)


def _settings(given: dict[str, Any]) -> ServerSettings:
    from pydantic import ValidationError

    try:
        from toolroll.sandbox.server.settings import ServerSettings
    except ImportError as error:
        raise MissingExtra(str(error.name), "sandbox") from error
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        raise ConfigError(explain(error, ServerSettings.model_fields)) from error


def _run(work: Any) -> Any:
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(work)
    raise typer.Exit(130)


def _server(settings: ServerSettings) -> Server:
    from toolroll.sandbox.server.server import Server

    return Server(settings)


async def _serve(settings: ServerSettings) -> None:
    from toolroll.sandbox.server.languages import Missing

    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    async with _server(settings) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        console = Console(highlight=False)
        for note in server.isolation.notes:
            console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
        found = sorted(name for name, one in server.toolchains.items() if not isinstance(one, Missing))
        console.print(f"isolation  {_TIERS[server.isolation.tier]}", soft_wrap=True)
        console.print(f"languages  {', '.join(found)}", soft_wrap=True)
        console.print(f"capacity   {settings.capacity} at once, {settings.queue} waiting, {settings.memory_mb} MB each")
        console.print(f"[bold]serving on {server.url}[/bold]")
        await told.wait()
        told.clear()
        console.print(f"ending: {server.front.admission.running} still run; once more ends them now")
        waiting = [asyncio.create_task(server.drain()), asyncio.create_task(told.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


_TIERS = {
    "A": "tier A: namespaces, a cgroup, Landlock and seccomp for each program",
    "B": "tier B: namespaces, Landlock and seccomp for each program; memory is limited per process",
    "C": "tier C: Landlock and seccomp for each program; no namespaces, memory is limited per process",
    "unsafe": "[red]unsafe: programs can read and signal whatever this server can[/red]",
}


async def _run_once(url: str | None, code: str, options: dict[str, Any]) -> Execution:
    from toolroll.sandbox.client import SandboxClient

    async with contextlib.AsyncExitStack() as stack:
        is_ours = url is None
        if url is None:
            url = (await stack.enter_async_context(_server(_settings({"port": 0})))).url
        client = await stack.enter_async_context(SandboxClient(url, token=os.environ.get(TOKEN)))
        if not is_ours:
            await client.ping()  # within seconds, where a program would be tried for longer
        return await client.run(code, **options)


def _show(done: Execution) -> None:
    """What the program wrote, where it would have written it; then one line on how it ended."""
    from toolroll.sandbox.execution import Outcome

    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    console = Console(stderr=True, highlight=False)
    if done.stderr:
        console.print(escape(done.stderr.rstrip("\n")), style="red", soft_wrap=True)
    result = done.run_result or done.compile_result
    ended = {
        Outcome.OK: "[green]done[/green]",
        Outcome.FAILED: f"[red]failed[/red] with {done.return_code}",
        Outcome.COMPILE_FAILED: "[red]did not compile[/red]",
        Outcome.TIMEOUT: "[red]out of time[/red]",
        Outcome.COMPILE_TIMEOUT: "[red]out of time while it compiled[/red]",
        Outcome.OUT_OF_MEMORY: "[red]out of memory[/red]",
    }[done.outcome]
    seconds = f" after {result.execution_time:.3f} s" if result and result.execution_time is not None else ""
    cut = [name for name, is_cut in (("stdout", done.stdout_truncated), ("stderr", done.stderr_truncated)) if is_cut]
    console.print(f"{ended}{seconds}{'; ' + ' and '.join(cut) + ' cut' if cut else ''}")
