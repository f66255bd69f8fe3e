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
    if (Path.home() / ".ray" / "auth_token").exists():
        # Ray secures clusters with this token by default, but a client shows it only if it is told to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if ray.is_initialized():
        return False
    try:
        if "://" not in address and ":" in address:  # asked first, as Ray itself would try for minutes
            socket.create_connection((address.rpartition(":")[0], int(address.rpartition(":")[2])), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoCluster(
            f"No Ray cluster answers at {address!r}. Start one (`ray start --head`), or give its address."
        ) from error
    return True
