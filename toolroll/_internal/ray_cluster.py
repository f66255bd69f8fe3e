"""Connect to a Ray cluster, failing fast if the address is unreachable, or start one."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolroll.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)
_START_ATTEMPTS = 3


class NoCluster(ConfigError):
    """Raised when no Ray cluster can be reached."""


class WrongToken(ConfigError):
    """Raised when a Ray cluster rejects this process because of its authentication token."""


def connect(address: str) -> bool:
    """Connect this process to a Ray cluster, unless it is already connected.

    Args:
        address: Address of the cluster (`host:port`), or `auto` for the cluster of this machine.

    Returns:
        True if this call connected the process, False if it was connected before.

    Raises:
        NoCluster: If no cluster can be reached at the address.
        WrongToken: If the cluster requires another authentication token.
        MissingExtra: If Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if ray.is_initialized():
        return False
    from ray.exceptions import AuthenticationError, RpcError

    try:
        _enable_token_authentication()
        _check_connection(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise WrongToken(_explain_token_error(address, error.message)) from error
    except (OSError, ValueError, RuntimeError, RpcError) as error:
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


def _check_connection(address: str) -> None:
    """Raise at once if the address or the token is wrong. Ray itself retries for up to minutes."""
    try:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
    except ImportError:  # private names, which another version of Ray may not have
        return
    found = canonicalize_bootstrap_address(address) if address == "auto" else address
    if found and "://" not in found and ":" in found:
        host, _, port = found.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # without a token, the client ends the process
        with _hidden_stderr():  # the client also logs the error
            GcsClient(address=found)


@contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Hide the messages that C++ code writes."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _enable_token_authentication() -> None:
    """Send the user's token to the cluster. Ray creates clusters with it, but clients do not send it by default."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if "RAY_AUTH_MODE" in os.environ or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray read the environment when it was imported


def _explain_token_error(address: str, reason: str) -> str:
    remedy = (
        "Set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it. "
        "`ray get-auth-token` prints the token on the head node."
    )
    mode = os.environ.get("RAY_AUTH_MODE")
    if "InvalidAuthToken" not in reason:  # Ray found no token, or cannot read the file
        return f"Cannot authenticate at the Ray cluster {address!r}: {reason}. {remedy}"
    if mode is None:
        return f"The Ray cluster at {address!r} requires a token. {remedy}"
    if mode.lower() != "token":
        return f"The Ray cluster at {address!r} requires a token, but RAY_AUTH_MODE is {mode!r}. Unset it. {remedy}"
    sources = (name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name))
    source = next(sources, "~/.ray/auth_token")
    return f"Wrong Ray token: the cluster at {address!r} rejected the token in {source}. {remedy}"
