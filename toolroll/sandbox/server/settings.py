"""What whoever runs a sandbox server may set. Everything has a default that is safe."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

MEGABYTE = 1 << 20


def cpus() -> int:
    """How many processors this process may use: those it may run on, or as many as a container's quota is worth."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


class ServerSettings(BaseModel):
    """The settings of `toolroll sandbox serve`, by the names of its options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0 for any free one."""
    token: SecretStr | None = None
    """What requests must show as `Authorization: Bearer …`; None for no such check."""
    capacity: int = Field(default_factory=lambda: cpus() + 1, ge=1)
    """How many programs run at once. One more than there are processors: while one comes or goes, none is idle."""
    queue: int = Field(default=1000, ge=0)
    """How many requests wait for their turn; more are refused with 429."""
    memory_mb: int = Field(default=1024, ge=32)
    """Megabytes for a program that doesn't say, and the most that one may ask for."""
    disk_mb: int = Field(default=512, ge=1)
    """Megabytes of files for a program. They count as its memory."""
    max_timeout: float = Field(default=300, gt=0)
    """The most seconds that a request may ask for."""
    output_kb: int = Field(default=1024, ge=1)
    """Kilobytes kept of what a program writes to stdout, and to stderr."""
    request_mb: int = Field(default=64, ge=1)
    """Megabytes of a request with its files, and of the files that it fetches."""
    sessions: int = Field(default=64, ge=0)
    """How many sessions are kept. The one that was idle longest makes room."""
    session_ttl: float = Field(default=600, gt=0)
    """Seconds after which an idle session ends."""
    python: str = sys.executable
    """The interpreter of the programs; its packages are theirs."""
    unsafe: bool = False
    """Start even where programs can't be isolated. For a server that stands in a virtual machine of its own."""
