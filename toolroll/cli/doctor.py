"""`toolroll doctor`: check which features work on this machine and in this environment, or whether a model works.

Each check reports its result and, if an optional feature is missing, the remedy.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from toolroll.cli import output
from toolroll.errors import ConfigError, MissingExtra
from toolroll.sandbox.server.isolation.syscalls import landlock_abi


@dataclass(frozen=True)
class DoctorCheck:
    """One check and its result."""

    name: str
    finding: Literal["ok", "missing"]
    """Missing if an optional feature is not available."""
    detail: str
    remedy: str = ""


EXTRA_BY_PACKAGE = {
    "ray": "ray",
    "transformers": "rollout",
    "pillow": "images",
    "prometheus-client": "sandbox",
    "ipython": "sandbox",
    "matplotlib": "records",
    "pyarrow": "records",
    "mcp": "mcp",
    "textual": "viewer",
}
"""Optional packages, and the extra that installs each."""


def doctor(
    model: Annotated[str | None, typer.Argument(help="Directory of a model: check whether tools work with it.")] = None,
    model_format: Annotated[str | None, typer.Option(help="Chat format to check, in place of the model's.")] = None,
    tool_prompt: Annotated[str | None, typer.Option(help="`hermes`: check the model with this tool prompt.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="URL of an inference server to check.")] = None,
    sandbox: Annotated[list[str] | None, typer.Option(help="URL of a sandbox server to check.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check which features work on this machine and in this environment, or whether tools work with a model."""
    if model is not None:
        _check_model(model, model_format, tool_prompt, as_json=as_json)
        return
    checks = [*run_checks(), *_check_servers(engine or (), sandbox or ())]
    if as_json:
        output.print_json([asdict(check) for check in checks], indent=2)
    else:
        table = Table("check", "", "found", "remedy")
        for check in checks:
            colour = "green" if check.finding == "ok" else "yellow"
            table.add_row(check.name, f"[{colour}]{check.finding}[/]", escape(check.detail), escape(check.remedy))
        output.SafeConsole().print(table)


def _check_model(model: str, model_format: str | None, tool_prompt: str | None, *, as_json: bool) -> None:
    """Print the checks of a model's chat format. Exit with status 1 if a rollout would refuse the model."""
    from toolroll.rollout.chat.formats import inspect_format

    if tool_prompt not in (None, "hermes"):
        raise ConfigError(f"Unknown tool prompt {tool_prompt!r}. The only one is 'hermes'.")
    report = inspect_format(model, model_format, tool_prompt="hermes" if tool_prompt else None)
    if as_json:
        summary = {
            "format": report.format,
            "call_form": report.call_form,
            "problem": report.problem,
            "image_problems": report.image_problems,
        }
        output.print_json({**summary, "checks": [asdict(check) for check in report.checks]}, indent=2)
    else:
        table = Table("check", "", "found")
        if report.format:
            table.add_row("chat format", "[green]ok[/]", escape(report.format))
            table.add_row("form of calls", "[green]ok[/]", escape(report.call_form or "as the format defines it"))
        for check in report.checks:
            table.add_row(check.name, "[green]ok[/]" if check.passed else "[red]failed[/]", escape(check.detail))
        for role, problem in report.image_problems.items():
            shown = "the prompt shows them" if problem is None else problem
            colour = "[green]ok[/]" if problem is None else "[yellow]refused[/]"
            table.add_row(f"images in {role} messages", colour, escape(shown))
        console = output.SafeConsole()
        console.print(table)
        if report.problem:
            console.print(report.problem, markup=False)
    if report.problem:
        raise typer.Exit(1)


def run_checks() -> Iterator[DoctorCheck]:
    """Run every check, in the order of display."""
    yield DoctorCheck("python", "ok", platform.python_version())
    yield DoctorCheck("toolroll", "ok", version("toolroll"))
    for package, extra in EXTRA_BY_PACKAGE.items():
        installed = next((distribution.version for distribution in distributions(name=package)), None)
        yield _check(package, installed, "not installed", f"pip install 'toolroll[{extra}]'")
    if sys.platform != "linux":
        from toolroll.sandbox.server.settings import ISOLATION_REMEDIES

        yield DoctorCheck("kernel", "missing", platform.system(), "the isolation of programs needs Linux")
        yield DoctorCheck("sandbox", "missing", "programs cannot be isolated", ISOLATION_REMEDIES)
        return
    yield DoctorCheck("kernel", "ok", f"Linux {platform.release()}, {os.cpu_count()} CPUs")
    remedy = "allow unprivileged user namespaces for the strongest isolation"
    yield _check("user namespaces", "available" if _has_user_namespaces() else None, "not permitted", remedy)
    abi, remedy = landlock_abi(), "use Linux 5.13 or newer, with landlock among its security modules"
    yield _check("landlock", f"ABI {abi}" if abi else None, "not in this kernel", remedy)
    has_seccomp = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
    remedy = "use a kernel with CONFIG_SECCOMP_FILTER"
    yield _check("seccomp", "filters available" if has_seccomp else None, "not in this kernel", remedy)
    cgroups = {"v1, writable": Path("/sys/fs/cgroup/memory"), "v2, writable": Path("/sys/fs/cgroup")}
    found = next((kind for kind, root in cgroups.items() if root.is_dir() and os.access(root, os.W_OK)), None)
    remedy = "delegate a cgroup to this user, to limit the memory of all processes of a program together"
    yield _check("cgroup", found, "not writable", remedy)
    yield _check_sandbox()


def _check_servers(engines: Sequence[str], sandboxes: Sequence[str]) -> Iterator[DoctorCheck]:
    from toolroll.run.preflight import CHAT_SERVERS, identify, is_reachable

    for name, urls in (("engine", engines), ("sandbox server", sandboxes)):
        for url in urls:
            if not asyncio.run(is_reachable(url)):
                yield DoctorCheck(name, "missing", f"{url} is unreachable", "start it, or correct the URL")
                continue
            found = asyncio.run(identify(url))
            is_right = found in CHAT_SERVERS if name == "engine" else found == "a sandbox"
            detail = f"{url} is {found or 'another server'}"
            yield (
                DoctorCheck(name, "ok", detail) if is_right else DoctorCheck(name, "missing", detail, "correct the URL")
            )


def _check(name: str, found: str | None, problem: str, remedy: str) -> DoctorCheck:
    """Return the check of a feature, which is missing if `found` is None."""
    return DoctorCheck(name, "missing", problem, remedy) if found is None else DoctorCheck(name, "ok", found)


def _has_user_namespaces() -> bool:
    # In a separate process, because a process cannot leave a namespace.
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"  # CLONE_NEWUSER
    return subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, timeout=30).returncode == 0


def _check_sandbox() -> DoctorCheck:
    """Find the isolation tier that `toolroll sandbox serve` would use."""
    try:
        from toolroll.sandbox.server.execution import isolation_tiers
        from toolroll.sandbox.server.settings import ServerSettings

        isolation = asyncio.run(isolation_tiers.find(ServerSettings()))
    except ConfigError as error:
        problem = "not installed" if isinstance(error, MissingExtra) else "programs cannot be isolated"
        return DoctorCheck("sandbox", "missing", problem, str(error))
    return DoctorCheck("sandbox", "ok", f"tier {isolation.tier}", "; ".join(isolation.notes))
