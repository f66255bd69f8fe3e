"""Find the strongest isolation that works on this machine, by running a program in each tier.

| tier | isolation |
|---|---|
| A | namespaces and a cgroup for each program |
| B | namespaces for each program |
| C | Landlock and seccomp; as root a separate user for each program, otherwise Landlock ABI 6, which isolates signals |
| unsafe | resource limits only; must be requested explicitly |

If no tier works, the server does not start.
"""

from __future__ import annotations

import asyncio
import base64
import glob
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from toolroll.errors import ConfigError
from toolroll.sandbox.server.execution.job import Job, JobFailed
from toolroll.sandbox.server.execution.languages import SYSTEM_DIRECTORIES
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle, ZygoteStartError
from toolroll.sandbox.server.isolation import landlock, seccomp, syscalls
from toolroll.sandbox.server.isolation.cgroup import CgroupPool
from toolroll.sandbox.server.isolation.program_users import MAX_USERS, ProgramUsers
from toolroll.sandbox.server.isolation.scratch import ScratchDirectories
from toolroll.sandbox.server.job_spec import JailPlan, JobSpec
from toolroll.sandbox.server.settings import ISOLATION_REMEDIES, MEGABYTE, ServerSettings

PROGRAM_MAX_PROCESSES = 256
PROGRAM_MAX_OPEN_FILES = 1024
PROGRAM_MAX_INODES = 64 * 1024
INTERPRETER_TIMEOUT_S = 60
TRIAL_TIMEOUT_S = 30
TRIAL_MEMORY_BYTES = 256 * MEGABYTE
_TRIAL_CODE = "import colorsys, wave; print('it works')"  # modules that are not loaded yet, to check file access
_ETC_PATTERNS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "ssl/certs", "java*", "R",
    "php*", "perl", "lua*", "ldc2.conf", "dmd.conf", "racket", "julia", "dotnet", "ssl/openssl.cnf", "python3*",
    "fonts", "mime.types", "crypto-policies",
)  # fmt: skip
"""Files in /etc that interpreters and libraries read. None of them contains secrets, or names of people or machines."""


@dataclass(frozen=True)
class IsolationTier:
    """The strongest isolation that works on this machine."""

    plan: JailPlan
    cgroups: CgroupPool | None
    """Cgroups for the programs; None if the tier does not use cgroups."""
    users: ProgramUsers | None
    """User ids for the programs; None if all programs have the same."""
    notes: list[str]
    """Reasons why stronger tiers do not work."""

    @property
    def gaps(self) -> list[str]:
        """Ways in which a program can affect others in spite of the isolation."""
        if self.tier == "unsafe":
            return ["programs can read and change everything that the server's user can"]
        gaps = []
        if self.cgroups is None:
            gaps.append("the memory limit applies to each process of a program, not to all together")
        if self.users is None:
            gaps.append("a program can use up what the kernel counts per user: epoll watches, memory of pipes")
        if not self.plan["namespaces"]:
            gaps.append("the disk limit applies to each file of a program, so that a program can fill the disk")
            gaps.append("programs can see the command lines of all processes of the machine")
        return gaps

    @property
    def tier(self) -> str:
        """Name of the tier: A, B, C or unsafe."""
        return self.plan["tier"]


async def find(
    settings: ServerSettings, toolchain_paths: Iterable[str] = (), *, use_cgroups: bool = True
) -> IsolationTier:
    """Return the strongest isolation that works.

    Args:
        settings: Settings of the server.
        toolchain_paths: Paths that programs may read, in addition to those of the system and of Python.
        use_cgroups: Whether to create cgroups for the programs, which tier A needs.

    Raises:
        ConfigError: If no tier works, or the Python interpreter cannot be run. The message names what is missing.
    """
    if sys.platform != "linux" or not syscalls.SUPPORTED:
        raise ConfigError(
            "The sandbox server needs Linux on x86_64 or aarch64. Start it on another machine, and set "
            "SANDBOX_FUSION_URL to its address."
        )
    prefixes = await asyncio.to_thread(_python_prefixes, settings.python)
    readable = _readable_paths(settings.python, [*prefixes, *toolchain_paths])
    cgroups = CgroupPool.find(PROGRAM_MAX_PROCESSES, settings.capacity) if use_cgroups else None
    users = ProgramUsers.find()
    no_cgroup = "no cgroup can be created, so memory is limited per process (delegate one, e.g. systemd's Delegate=yes)"
    notes = [no_cgroup] if cgroups is None else []
    for plan in _plans(settings, readable, users):
        plan_cgroups = cgroups if plan["tier"] == "A" else None
        if plan["tier"] == "A" and plan_cgroups is None:
            continue
        try:
            tier = IsolationTier(plan, plan_cgroups, users if plan["tier"] != "unsafe" else None, notes)
            await _run_trial(tier, settings)
            return tier
        except (JobFailed, ZygoteStartError, OSError) as error:
            notes.append(f"tier {plan['tier']}: {error}")
    abi = syscalls.landlock_abi()
    if abi and abi < landlock.SIGNAL_SCOPE_ABI and users is None:
        notes.append("tier C: needs root with all user ids, or Linux 6.12 with Landlock ABI 6")
    elif not abi:
        notes.append("tier C: no Landlock in this kernel (needs Linux 5.13 or newer, with `landlock` in the lsm= list)")
    raise ConfigError(
        f"Programs cannot be isolated on this machine. Tried: {'; '.join(notes)}. Allow unprivileged user namespaces, "
        f"or use a kernel with Landlock. Otherwise: {ISOLATION_REMEDIES}"
    )


def _python_prefixes(python: str) -> list[str]:
    """Return the installation directories of a Python interpreter, or raise ConfigError if it cannot be run."""
    script = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix]))"
    command = [python, "-I", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"The Python interpreter for programs cannot be run: {python}: {error}") from error
    return [str(prefix) for prefix in json.loads(done.stdout)]


def _readable_paths(python: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that programs may read: these, and those of the system."""
    etc = [path for pattern in _ETC_PATTERNS for path in sorted(glob.glob(f"/etc/{pattern}"))]
    readable: list[str] = []
    for path in map(os.path.abspath, [*SYSTEM_DIRECTORIES, *etc, *paths, str(Path(python).parent)]):
        is_covered = any(Path(path).is_relative_to(other) for other in readable if not os.path.islink(other))
        if os.path.lexists(path) and not is_covered:
            readable.append(path)
    return readable


def _plans(settings: ServerSettings, readable: list[str], users: ProgramUsers | None) -> list[JailPlan]:
    """Return the plan of each tier that this kernel may support, strongest first."""
    abi = syscalls.landlock_abi()
    plan: JailPlan = {
        "tier": "A",
        "namespaces": True,
        "landlock": abi,
        "seccomp": base64.b64encode(seccomp.zygote_filter(namespaces=True)).decode(),
        "seccomp_of_program": base64.b64encode(seccomp.program_filter()).decode(),
        "readable": readable,
        "limits": {
            "processes": PROGRAM_MAX_PROCESSES,
            "open_files": PROGRAM_MAX_OPEN_FILES,
            "disk": settings.disk_mb * MEGABYTE,
            "inodes": PROGRAM_MAX_INODES,
        },
        "path": f"{Path(settings.python).parent}:/usr/local/bin:/usr/bin:/bin",
        "users": (users.first, MAX_USERS) if users else None,
    }
    plans: list[JailPlan] = [plan, {**plan, "tier": "B"}]
    without_namespaces: JailPlan = {**plan, "namespaces": False, "seccomp_of_program": ""}
    # Programs with the user of the server could kill it and each other, unless Landlock restricts signals.
    if abi >= landlock.SIGNAL_SCOPE_ABI or (abi and users is not None):
        zygote_filter = base64.b64encode(seccomp.zygote_filter(namespaces=False)).decode()
        plans.append({**without_namespaces, "tier": "C", "seccomp": zygote_filter})
    if settings.unsafe:
        plans.append({**without_namespaces, "tier": "unsafe", "landlock": 0, "seccomp": ""})
    return plans


async def _run_trial(isolation: IsolationTier, settings: ServerSettings) -> None:
    """Run a program with this isolation. Raises an exception if it fails."""
    plan, cgroups = isolation.plan, isolation.cgroups
    zygote = ZygoteHandle(plan, settings.python, [])
    await zygote.start()
    scratch = None if plan["namespaces"] else ScratchDirectories()
    cgroup = cgroups.acquire(TRIAL_MEMORY_BYTES) if cgroups else None
    try:
        spec: JobSpec = {
            "kind": "script", "filename": "main.py", "code": _TRIAL_CODE, "files": {}, "fetch": [], "fetch_limit": 0,
            "memory": TRIAL_MEMORY_BYTES, "memory_by_rlimit": False, "stages": [],
        }  # fmt: skip
        if isolation.users:
            spec["user"] = isolation.users.acquire()
        if scratch:
            scratch.assign(spec)
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            response = await Job(SandboxProcess(spec, cgroup), plan, b"", [20], 1 << 16).run(zygote)
    except TimeoutError:
        raise JobFailed(f"a program took longer than {TRIAL_TIMEOUT_S} s") from None
    finally:
        zygote.close()
        if cgroups and cgroup:
            cgroups.release(cgroup)
        if isolation.users:
            isolation.users.release(spec["user"])
        if scratch:
            await asyncio.to_thread(scratch.close)
    result = response.run_result
    if result is None or result.stdout != "it works\n":
        raise JobFailed(f"a program failed: {result and (result.stderr or result.return_code)}")
