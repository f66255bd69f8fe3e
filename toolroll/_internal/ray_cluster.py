"""Connect to a Ray cluster, failing fast if the address is unreachable, or start one."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)
_START_ATTEMPTS = 3


class NoCluster(ConfigError):
    """Raised when no Ray cluster can be reached."""


def connect(address: str) -> bool:
    """Connect this process to a Ray cluster, unless it is already connected.

    Args:
        address: Address of the cluster (`host:port`), or `auto` for the cluster of this machine.

    Returns:
        True if this call connected the process, False if it was connected before.

    Raises:
        NoCluster: If no cluster can be reached at the address.
        MissingExtra: If Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if ray.is_initialized():
        return False
    if address != "auto" or os.environ.get("RAY_ADDRESS"):  # otherwise Ray reads the token itself
        _enable_token_authentication()
    try:
        if "://" not in address and ":" in address:  # fails at once, whereas Ray retries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoCluster(
            f"Cannot connect to a Ray cluster at {address!r}. Start one with `ray start --head`, or pass its address."
        ) from error
    return True


def start_local(**options: Any) -> Any:
    """Start a Ray cluster on this machine and connect this process to it.

    Ray gives a node 30 s to start, which can be too short on a busy machine, so this tries again.

    Args:
        **options: Options of `ray.init`.

    Returns:
        The context that `ray.init` returns.
    """
    import ray

    for _ in range(_START_ATTEMPTS - 1):
        try:
            return ray.init("local", include_dashboard=False, log_to_driver=False, **options)
        except Exception as error:  # Ray raises no other class for this
            if "timed out during startup" not in str(error):
                raise
            logger.warning("Ray did not start within 30 s. Starting it again.")
    return ray.init("local", include_dashboard=False, log_to_driver=False, **options)


def _enable_token_authentication() -> None:
    """Send the user's token to the cluster. Ray creates clusters with it, but clients do not send it by default."""
    if "RAY_AUTH_MODE" in os.environ or not (Path.home() / ".ray" / "auth_token").exists():
        return
    from ray._raylet import Config  # type: ignore[attr-defined]

    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray read the environment when it was imported
