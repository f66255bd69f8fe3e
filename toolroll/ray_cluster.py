"""Connecting to a Ray cluster: what Ray leaves to its user, done; what it would try for minutes, said at once."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from toolroll.errors import ConfigError, MissingExtra


class NoCluster(ConfigError):
    """No Ray cluster answers."""


def connect(address: str) -> bool:
    """Connect this process to the cluster at an address, or to the one that this machine is in (`auto`).

    Whether that was done here; else the process was connected already, and stays so.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if ray.is_initialized():
        return False
    if address != "auto" or os.environ.get("RAY_ADDRESS"):  # with a cluster that Ray itself finds, it does the same
        _show_token()
    try:
        if "://" not in address and ":" in address:  # asked first, as Ray itself would try for minutes
            socket.create_connection((address.rpartition(":")[0], int(address.rpartition(":")[2])), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoCluster(
            f"No Ray cluster answers at {address!r}. Start one (`ray start --head`), or give its address."
        ) from error
    return True


def _show_token() -> None:
    """Ray secures clusters with this token by default, but a client shows it only if it is told to."""
    if "RAY_AUTH_MODE" in os.environ or not (Path.home() / ".ray" / "auth_token").exists():
        return
    from ray._raylet import Config  # type: ignore[attr-defined]

    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray has read the environment when it was imported, and must do so again
