"""`toolroll doctor`: what this machine and this environment can do.

Each check says what it found and, where something is missing, what to do about it. Only a check that the base install
needs can fail; the rest are parts that one may do without.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolroll.errors import ConfigError, MissingExtra
from toolroll.sandbox.server.kernel import landlock_abi


class Finding(StrEnum):
    """How a check came out."""

    OK = "ok"
    MISSING = "missing"
    """Not there; needed only for the part that the remedy names."""
    BROKEN = "broken"
    """toolroll itself won't work."""


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    finding: Finding
    detail: str
    remedy: str = ""


PACKAGES = {
    "ray": "ray",
    "transformers": "rollout",
    "pyseccomp": "sandbox",
    "prometheus-client": "sandbox",
    "ipython": "sandbox",
    "textual": "viewer",
    "mcp": "mcp",
}
"""Packages that parts of toolroll stand on, and the extra that brings each."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> None:
    """Say what this machine and this environment can do. Ends with 1 where toolroll itself won't work."""
    checks = list(examine())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = Table("check", "", "found", "remedy")
        colour = {Finding.OK: "green", Finding.MISSING: "yellow", Finding.BROKEN: "red"}
        for check in checks:
            table.add_row(
                check.name, f"[{colour[check.finding]}]{check.finding}[/]", escape(check.detail), escape(check.remedy)
            )
        Console().print(table)
    if any(check.finding is Finding.BROKEN for check in checks):
        raise typer.Exit(1)


def examine() -> Iterator[Check]:
    """Every check, in the order in which they are shown."""
    yield _python()
    yield Check("toolroll", Finding.OK, version("toolroll"))
    for package, extra in PACKAGES.items():
        yield _package(package, extra)
    if sys.platform != "linux":
        yield Check("kernel", Finding.MISSING, platform.system(), "the sandbox server needs Linux")
        return
    yield Check("kernel", Finding.OK, f"Linux {platform.release()}, {os.cpu_count()} CPUs")
    yield _user_namespaces()
    yield _landlock()
    yield _seccomp()
    yield _cgroup()
    yield _sandbox()


def _python() -> Check:
    finding = Finding.OK if sys.version_info >= (3, 11) else Finding.BROKEN
    return Check(
        "python", finding, platform.python_version(), "" if finding is Finding.OK else "use Python 3.11 or newer"
    )


def _package(name: str, extra: str) -> Check:
    try:
        return Check(name, Finding.OK, version(name))
    except PackageNotFoundError:
        return Check(name, Finding.MISSING, "not installed", f"pip install 'toolroll[{extra}]'")


def _sandbox() -> Check:
    """What `toolroll sandbox serve` would do here, tried out."""
    try:
        from toolroll.sandbox.server import tier
        from toolroll.sandbox.server.server import prefixes
        from toolroll.sandbox.server.settings import ServerSettings

        settings = ServerSettings()
        readable = tier.readable_paths(settings.python, prefixes(settings.python), [])
        found = asyncio.run(tier.find(settings, readable))
    except MissingExtra as error:
        return Check("sandbox", Finding.MISSING, "not installed", str(error))
    except ConfigError as error:
        return Check("sandbox", Finding.MISSING, "programs can't be isolated", str(error))
    return Check("sandbox", Finding.OK, f"tier {found.tier}", "; ".join(found.notes))


def _user_namespaces() -> Check:
    # Tried in a process of its own: a namespace, once entered, can't be left.
    attempt = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"  # CLONE_NEWUSER
    if subprocess.run([sys.executable, "-I", "-c", attempt], capture_output=True, timeout=30).returncode == 0:
        return Check("user namespaces", Finding.OK, "can be made")
    return Check(
        "user namespaces", Finding.MISSING, "refused", "allow unprivileged user namespaces for the strongest sandbox"
    )


def _landlock() -> Check:
    if abi := landlock_abi():
        return Check("landlock", Finding.OK, f"ABI {abi}")
    return Check(
        "landlock",
        Finding.MISSING,
        "not in this kernel",
        "Linux 5.13 or newer, with landlock among its security modules",
    )


def _seccomp() -> Check:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if actions.exists():
        return Check("seccomp", Finding.OK, "filters available")
    return Check("seccomp", Finding.MISSING, "not in this kernel", "a kernel with CONFIG_SECCOMP_FILTER")


def _cgroup() -> Check:
    for root, kind in ((Path("/sys/fs/cgroup/memory"), "v1"), (Path("/sys/fs/cgroup"), "v2")):
        if root.is_dir() and os.access(root, os.W_OK):
            return Check("cgroup", Finding.OK, f"{kind}, writable")
    return Check(
        "cgroup",
        Finding.MISSING,
        "not writable",
        "delegate a cgroup to this user, for memory limits over several processes",
    )
