"""Settings of the sandbox server. Every default is safe."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from toolroll.errors import ConfigError

MEGABYTE = 1 << 20
CPUS_PER_FRONT = 4
"""Number of CPUs that one front can keep busy with the shortest programs."""
ISOLATION_REMEDIES = (
    "Start the server in a Linux container (docs/operations/deploy.md), set SANDBOX_FUSION_URL to the address of a "
    "server on another machine, or use --unsafe to run code that you trust without isolation."
)
"""What to do if programs cannot be isolated."""


def can_isolate() -> bool:
    """Return True if this system may be able to isolate programs."""
    return sys.platform == "linux"


def require_isolation(*, unsafe: bool) -> None:
    """Raise ConfigError, with the remedies, if this system cannot isolate programs and `unsafe` is False."""
    if not can_isolate() and not unsafe:
        raise ConfigError(f"The sandbox server cannot isolate programs on {sys.platform}. {ISOLATION_REMEDIES}")


def cpu_count() -> int:
    """Return the number of CPUs that this process may use: its affinity mask, limited by the cgroup's quota."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


def fronts_for(cpus: int) -> int:
    """Return how many processes are needed to handle the requests of a machine with this number of CPUs."""
    return max(1, cpus // CPUS_PER_FRONT)


class ServerSettings(BaseModel):
    """Settings of `toolroll sandbox serve`, named after its options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 for a free port."""
    token: SecretStr | None = None
    """Token that requests must send as `Authorization: Bearer …`, or several separated by commas.

    None for no authentication.
    """
    capacity: int = Field(default_factory=lambda: cpu_count() + 1, ge=1)
    """Number of programs that run at the same time. One more than the CPUs, so that no CPU idles while one starts."""
    fronts: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of processes that handle requests. "auto" for one per `CPUS_PER_FRONT` CPUs."""
    queue: int = Field(default=1000, ge=0)
    """Maximum number of waiting requests. Further requests are rejected with 429."""
    memory_mb: int = Field(default=1024, ge=32)
    """Default and maximum memory limit of a program, in megabytes."""
    disk_mb: int = Field(default=512, ge=1)
    """Maximum size of a program's files, in megabytes. They count towards its memory."""
    max_timeout: float = Field(default=300, gt=0)
    """Maximum timeout that a request may set, in seconds."""
    output_kb: int = Field(default=1024, ge=1)
    """Kilobytes to keep of a program's stdout, and of its stderr."""
    request_mb: int = Field(default=64, ge=1)
    """Maximum size of a request, and of the files that it fetches, in megabytes."""
    sessions: int = Field(default=64, ge=0)
    """Maximum number of sessions. The session that was idle longest is evicted."""
    session_ttl: float = Field(default=600, gt=0)
    """Idle time after which a session ends, in seconds."""
    python: str = sys.executable
    """Python interpreter of the programs. They can import its packages."""
    access_log: bool = False
    """Whether to log a line for each request."""
    unsafe: bool = False
    """Whether to start even if programs cannot be isolated. Use it in a dedicated virtual machine, or for code that you
    trust."""

    @property
    def front_count(self) -> int:
        """Number of processes that handle requests. More than one need Linux."""
        if not can_isolate():
            return 1
        return min(self.capacity, fronts_for(cpu_count()) if self.fronts == "auto" else self.fronts)
