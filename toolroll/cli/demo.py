"""`toolroll demo`: a rollout on this machine, without a GPU, an engine or a download."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolroll.cli import output
from toolroll.cli.examples import examples_dir
from toolroll.cli.run import follow, print_result
from toolroll.cli.sandbox import Unsafe, run_async
from toolroll.errors import MissingExtra

if TYPE_CHECKING:
    from toolroll.run.config import RunConfig
    from toolroll.run.status import RunSnapshot
    from toolroll.sandbox.server.settings import ServerSettings

REQUIRED = ("transformers", "renderers", "textual", "prometheus_client")
SANDBOX_URL = "SANDBOX_FUSION_URL"
"""Variable from which the example's tool config reads the URL of the sandbox."""
MAX_IN_FLIGHT = 16
"""Few enough that the panel changes while one watches."""
INTRODUCTION = """\
16 word problems, 4 samples each. A scripted model plays the part of the engine;
the code interpreter, the sandbox, the rewards and the records are real.
"""
NEXT_STEPS = """\
The same with a real model, whose directory is PATH:
  toolroll examples copy gsm8k
  toolroll sandbox serve       # in another terminal
  toolroll run gsm8k/run.yaml engine.kind=transformers model=PATH data.limit=4
"""


def demo(
    show: Annotated[bool, typer.Option("--view/--no-view", help="Open the viewer at the end.")] = True,
    directory: Annotated[Path | None, typer.Option(help="Directory of the records. Default: a temporary one.")] = None,
    unsafe: Unsafe = False,
) -> None:
    """Run word problems with a scripted model and a real sandbox, and view the result. Takes half a minute."""
    from toolroll.sandbox.server.settings import ServerSettings, can_isolate, require_isolation

    starts_sandbox = can_isolate() or unsafe or SANDBOX_URL not in os.environ
    if starts_sandbox:
        require_isolation(unsafe=unsafe)
    for package in REQUIRED:
        if find_spec(package) is None:
            raise MissingExtra(package, "demo")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    target = (directory or Path(tempfile.mkdtemp(prefix="toolroll-demo-"))).absolute()
    console = output.SafeConsole(highlight=False)
    console.print(INTRODUCTION, markup=False)
    if not can_isolate() and starts_sandbox:
        console.print("Programs are not isolated on this system (--unsafe). Those of this demo only compute.\n")
    sandbox = ServerSettings(port=0, fronts=1, unsafe=unsafe) if starts_sandbox else None
    config, status, signum = run_async(_run(target, console, sandbox), as_server=starts_sandbox)
    print_result(config, status, console, complete=not signum, as_json=False)
    if signum:
        raise typer.Exit(128 + signum)
    if show and sys.stdin.isatty() and sys.stderr.isatty():
        from toolroll.viewer.app import RolloutViewer

        RolloutViewer(target, tokenizer=config.model).run()
    console.print()
    console.print(NEXT_STEPS, markup=False)


async def _run(
    directory: Path, console: output.SafeConsole, sandbox: ServerSettings | None
) -> tuple[RunConfig, RunSnapshot, int]:
    """Run the example with the scripted model and a temporary sandbox."""
    from toolroll.demo.demo_model import MODEL_DIR
    from toolroll.run.config import EngineConfig, RunConfig

    example = examples_dir() / "gsm8k"
    async with _start_sandbox(sandbox):
        engine = EngineConfig(
            kind="toolroll.demo.demo_model.DemoModel", options={"problems": str(example / "problems.jsonl")}
        )
        changes = {
            "engine": engine,
            "model": str(MODEL_DIR),
            "rollout_data_dir": str(directory),
            "max_in_flight": MAX_IN_FLIGHT,
        }
        config = RunConfig.load(example / "run.yaml").model_copy(update=changes)
        return config, *await follow(config, console, title="toolroll demo")


@asynccontextmanager
async def _start_sandbox(settings: ServerSettings | None) -> AsyncIterator[None]:
    """Start a sandbox and set its address in the environment. Without settings, use the address that is set."""
    if settings is None:
        yield
        return
    from toolroll.sandbox.server.server import SandboxServer

    async with SandboxServer(settings) as sandbox:
        os.environ[SANDBOX_URL] = sandbox.url
        yield
