"""Check a run before it starts, without loading a tokenizer or connecting to a cluster.

During a run, an unreachable server is an infra fault, and trajectories are retried. The preflight check reports a
server that was never started immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit

from toolroll._internal.text import hide_credentials
from toolroll.errors import ConfigError
from toolroll.run.config import RunConfig
from toolroll.run.data import PromptRows
from toolroll.run.sample_worker import ENGINE_CLASSES, sandbox_tools

logger = logging.getLogger(__name__)

PREFLIGHT_TIMEOUT_S = 5.0
"""Timeout for opening a connection to a server."""
START_ENGINE = "Start the engine, or set its address: engine.urls=http://host:port"
START_SANDBOX = "Start a sandbox: toolroll sandbox serve"


async def check(config: RunConfig) -> None:
    """Check the first rows of the data, and that the engine and the sandboxes accept connections.

    Servers of a run on a cluster only cause a warning, because the workers' network may differ from this machine's.

    Raises:
        ConfigError: If the data cannot be used, or no server of the engine or of a sandbox tool is reachable.
    """
    PromptRows(config.data).check()
    servers = {tool.name: _as_list(tool.settings.sandbox_fusion_url) for tool in sandbox_tools(config)}
    if config.engine.kind in ENGINE_CLASSES:  # the URLs of a custom engine class may mean anything
        servers = {"engine": _as_list(config.engine.urls), **servers}
    for name, urls in servers.items():
        reachable = await asyncio.gather(*(_is_reachable(url) for url in urls))
        unreachable = [url for url, is_reachable in zip(urls, reachable, strict=True) if not is_reachable]
        problem = f"Cannot connect to {hide_credentials(', '.join(unreachable))} ({name})."
        if unreachable and len(unreachable) == len(urls) and config.cluster is None:
            raise ConfigError(f"{problem} {START_ENGINE if name == 'engine' else START_SANDBOX}")
        if unreachable:
            logger.warning("%s", problem)


def _as_list(urls: str | list[str] | tuple[str, ...]) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)


async def _is_reachable(url: str) -> bool:
    """Return True if a server accepts connections, or if the URL cannot be parsed."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return True
    with contextlib.suppress(OSError):  # includes TimeoutError
        async with asyncio.timeout(PREFLIGHT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()  # nothing was sent, so there is nothing to wait for
        return True
    return False
