"""Commands that run MCP servers in the jail of the sandbox server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import toolroll.tools.mcp.jailed_server as launcher
from toolroll.errors import InfraFault
from toolroll.sandbox.server.execution import isolation_tiers
from toolroll.sandbox.server.job_spec import JailPlan, JobSpec
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings
from toolroll.tools.mcp.settings import McpServerSettings, ServerIsolation

LAUNCHER_IMPORT_ROOT = str(Path(launcher.__file__).parents[3])

_plans: dict[ServerIsolation, JailPlan] = {}


async def jailed_command(settings: McpServerSettings, isolation: ServerIsolation) -> list[str]:
    """Return a command that runs the command of a server in a jail.

    Args:
        settings: The server.
        isolation: Settings of the jail.

    Raises:
        ConfigError: If this machine cannot isolate programs.
        InfraFault: If it can do so only without namespaces, which the network would need.
    """
    if isolation not in _plans:
        found = await isolation_tiers.find(ServerSettings(), isolation.readable, use_cgroups=False)
        if not found.plan["namespaces"]:
            raise InfraFault(f"MCP servers need user namespaces to be isolated: {'; '.join(found.notes)}.")
        _plans[isolation] = found.plan
    spec: JobSpec = {
        "kind": "commands", "filename": "", "code": "", "files": {}, "stages": [], "fetch": [], "fetch_limit": 0,
        "memory": isolation.memory_mb * MEGABYTE, "memory_by_rlimit": True,
    }  # fmt: skip
    # Only the names: everyone on this machine can read command lines.
    config = json.dumps({"plan": _plans[isolation], "spec": spec, "environment": list(settings.env)})
    return [
        sys.executable,
        "-I",
        "-S",
        launcher.__file__,
        LAUNCHER_IMPORT_ROOT,
        config,
        settings.program,
        *settings.args,
    ]
