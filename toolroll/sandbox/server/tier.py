"""How well programs can be isolated on this machine: tried out, not guessed.

A: namespaces and a cgroup for each program. B: namespaces. C: Landlock and seccomp, with a user of its own for each
program (as root) or a kernel that keeps signals inside (Landlock ABI 6). Each is tried from the best down, by running a
program in it. Where none works nothing is served, unless the user insists: "unsafe" has limits on resources only.
"""

from __future__ import annotations

import asyncio
import base64
import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from toolroll.errors import ConfigError
from toolroll.sandbox.server import kernel, landlock, seccomp
from toolroll.sandbox.server.cgroup import Cgroups
from toolroll.sandbox.server.interpreter import Interpreter, StartError
from toolroll.sandbox.server.job import Job, JobFailed
from toolroll.sandbox.server.languages import SYSTEM
from toolroll.sandbox.server.scratch import Scratch
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings
from toolroll.sandbox.server.spec import Limits, Plan, Spec

PROCESSES = 256
_TRIAL = "import colorsys, wave; print('it works')"  # modules that nothing has imported yet: are they in reach?
OPEN_FILES = 1024
_ETC = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "ssl/certs", "java*", "R",
    "php*", "perl", "lua*", "ldc2.conf", "dmd.conf", "racket", "julia", "dotnet", "ssl/openssl.cnf", "python3*",
    "fonts", "mime.types", "crypto-policies",
)  # fmt: skip
"""What interpreters and their libraries look for there. Nothing of it is secret, nothing names people or machines."""


@dataclass(frozen=True)
class Isolation:
    """What was found: the plan that works, and why nothing better does."""

    plan: Plan
    cgroups: Cgroups | None
    notes: list[str]

    @property
    def tier(self) -> str:
        """A, B, C or unsafe."""
        return self.plan["tier"]


class Unsafe(ConfigError):
    """Programs can't be isolated on this machine. The message says what is missing."""


async def find(settings: ServerSettings, readable: list[str]) -> Isolation:
    """The best isolation that works here. Raises Unsafe where there is none."""
    if sys.platform != "linux" or not kernel.SUPPORTED:
        raise Unsafe("The sandbox server needs Linux on x86_64 or aarch64.")
    notes = []
    cgroups = Cgroups.find(PROCESSES, settings.capacity)
    if cgroups is None:
        notes.append("no cgroup can be made: memory is limited per process (delegate one, e.g. systemd's Delegate=yes)")
    for plan in _plans(settings, readable):
        used = cgroups if plan["tier"] == "A" else None
        if plan["tier"] == "A" and used is None:
            continue
        try:
            await _try_out(plan, settings, used)
        except (JobFailed, StartError, OSError) as error:
            notes.append(f"tier {plan['tier']}: {error}")
            continue
        return Isolation(plan, used, notes)
    abi = kernel.landlock_abi()
    if abi and abi < landlock.SIGNALS_FROM and os.geteuid() != 0:
        notes.append("tier C: needs root, or Linux 6.12 with Landlock ABI 6")
    elif not abi:
        notes.append("tier C: this kernel has no Landlock (Linux 5.13 or newer, `landlock` in the lsm= list)")
    raise Unsafe(
        "Programs can't be isolated here, so nothing is served. What was tried: "
        + "; ".join(notes)
        + ". Allow unprivileged user namespaces, or use a kernel with Landlock; or, in a virtual machine that holds "
        "nothing else, say --unsafe."
    )


def readable_paths(python: str, prefixes: list[str], more: list[str]) -> list[str]:
    """The parts of the file system that programs may read: the system's, the interpreter's, those of toolchains."""
    wanted = [*SYSTEM, *(path for name in _ETC for path in sorted(glob.glob(f"/etc/{name}"))), *prefixes, *more]
    wanted.append(str(Path(python).parent))
    kept: list[str] = []
    for path in map(os.path.abspath, wanted):
        inside = any(path == other or path.startswith(f"{other}/") for other in kept if not os.path.islink(other))
        if os.path.lexists(path) and not inside:
            kept.append(path)
    return kept


def _plans(settings: ServerSettings, readable: list[str]) -> list[Plan]:
    abi = kernel.landlock_abi()
    limits: Limits = {
        "processes": PROCESSES,
        "open_files": OPEN_FILES,
        "disk": settings.disk_mb * MEGABYTE,
        "inodes": 64 * 1024,
    }
    plan: Plan = {
        "tier": "A",
        "namespaces": True,
        "landlock": abi,
        "seccomp": base64.b64encode(seccomp.large_filter(namespaces=True)).decode(),
        "seccomp_of_program": base64.b64encode(seccomp.small_filter()).decode(),
        "readable": readable,
        "limits": limits,
        "path": f"{Path(settings.python).parent}:/usr/local/bin:/usr/bin:/bin",
    }
    plans: list[Plan] = [plan, {**plan, "tier": "B"}]
    bare: Plan = {**plan, "namespaces": False, "seccomp_of_program": ""}
    if abi >= landlock.SIGNALS_FROM or (abi and os.geteuid() == 0):
        without = base64.b64encode(seccomp.large_filter(namespaces=False)).decode()
        plans.append({**bare, "tier": "C", "seccomp": without})
    if settings.unsafe:
        plans.append({**bare, "tier": "unsafe", "landlock": 0, "seccomp": ""})
    return plans


async def _try_out(plan: Plan, settings: ServerSettings, cgroups: Cgroups | None) -> None:
    """Run a program. Raises where that isn't possible."""
    interpreter = Interpreter(plan, settings.python, [])
    await interpreter.start()
    scratch = None if plan["namespaces"] else Scratch()
    cgroup = cgroups.take(256 * MEGABYTE) if cgroups else None
    try:
        spec: Spec = {
            "kind": "script", "filename": "main.py", "code": _TRIAL, "files": {}, "fetch": [], "fetch_limit": 0,
            "memory": 256 * MEGABYTE, "memory_by_rlimit": False, "stages": [],
        }  # fmt: skip
        if scratch:
            spec["directory"], user = scratch.take()
            if user is not None:
                spec["user"] = user
        async with asyncio.timeout(30):
            done = await Job(plan, spec, b"", [20], 1 << 16, cgroup).run(interpreter)
    except TimeoutError:
        raise JobFailed("a program took longer than 30 s") from None
    finally:
        interpreter.close()
        if cgroups and cgroup:
            cgroups.give_back(cgroup)
        if scratch:
            await asyncio.to_thread(scratch.close)
    if done.commands[0].stdout != "it works\n":
        raise JobFailed(f"a program failed: {done.commands[0].stderr or done.commands[0].return_code}")
