"""Connecting to a Ray cluster: what Ray leaves to its user, done; what it would try for minutes, said at once."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra


def connect(address: str) -> Any:
    """Connect this process to the cluster at an address, or to the one that this machine is in (`auto`).

    Gives `ray`. Where the process is connected already, it stays so.
    """
    if (Path.home() / ".ray" / "auth_token").exists():
        # Ray secures clusters with this token by default, but a client shows it only if it is told to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if ray.is_initialized():
        return ray
    try:
        if "://" not in address and ":" in address:  # asked first, as Ray itself would try for minutes
            socket.create_connection((address.rpartition(":")[0], int(address.rpartition(":")[2])), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address!r}. Start one (`ray start --head`), or give its address."
        ) from error
    return ray
