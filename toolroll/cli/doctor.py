"""`toolroll doctor`: check which features work on this machine and in this environment.

Each check reports its result and, if an optional feature is missing, the remedy.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
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
    "prometheus-client": "sandbox",
    "ipython": "sandbox",
    "textual": "viewer",
}
"""Optional packages, and the extra that installs each."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check which features work on this machine and in this environment."""
    checks = list(run_checks())
    if as_json:
        output.print_json([asdict(check) for check in checks], indent=2)
    else:
        table = Table("check", "", "found", "remedy")
        for check in checks:
            colour = "green" if check.finding == "ok" else "yellow"
            table.add_row(check.name, f"[{colour}]{check.finding}[/]", escape(check.detail), escape(check.remedy))
        output.SafeConsole().print(table)


def run_checks() -> Iterator[DoctorCheck]:
    """Run every check, in the order of display."""
    yield DoctorCheck("python", "ok", platform.python_version())
    yield DoctorCheck("toolroll", "ok", version("toolroll"))
    for package, extra in EXTRA_BY_PACKAGE.items():
        installed = next((distribution.version for distribution in distributions(name=package)), None)
        yield _check(package, installed, "not installed", f"pip install 'toolroll[{extra}]'")
    if sys.platform != "linux":
        yield DoctorCheck("kernel", "missing", platform.system(), "the sandbox server needs Linux")
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
