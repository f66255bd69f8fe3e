"""What is wrong with a run and can be known before it begins, without waiting for a tokenizer or a cluster.

A server that isn't there is an infrastructure fault like any other: trajectories are tried again, and again. Who forgot
to start it should not have to wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit

from toolroll.errors import ConfigError
from toolroll.run.config import RunConfig
from toolroll.run.data import Rows
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

logger = logging.getLogger(__name__)

SERVERS = ("sglang", "vllm", "openai")
"""Engines that are servers. What the URLs of a class of the user's own mean is that one's to know."""
PATIENCE = 5.0
"""Seconds that a server has to take a connection."""
START_ENGINE = "Start the engine, or say where it is: engine.urls=http://host:port"
START_SANDBOX = "Start a sandbox: toolroll sandbox serve"


async def check(config: RunConfig) -> None:
    """Look at the first rows, and whether engine and sandboxes take connections. Raises ConfigError."""
    Rows(config.data).check()
    needs = _sandboxes(config)
    if config.engine.kind in SERVERS:
        needs = {"engine": _listed(config.engine.urls), **needs}
    for name, urls in needs.items():
        answers = await asyncio.gather(*(_answers(url) for url in urls))
        silent = [url for url, found in zip(urls, answers, strict=True) if not found]
        said = f"Nothing answers at {', '.join(silent)} ({name})."
        if silent and len(silent) == len(urls) and config.cluster is None:
            remedy = START_ENGINE if name == "engine" else START_SANDBOX
            raise ConfigError(f"{said} {remedy}")
        if silent:  # the others do its work; and what a cluster's workers can reach isn't for this process to say
            logger.warning("%s", said)


def _sandboxes(config: RunConfig) -> dict[str, list[str]]:
    """Where the tools' sandboxes are, by tool."""
    tools = initialize_tools_from_config(config.tools) if config.tools is not None else []
    return {
        tool.name: _listed(tool.settings.sandbox_fusion_url) for tool in tools if isinstance(tool, SandboxFusionTool)
    }


def _listed(urls: str | list[str] | tuple[str, ...]) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)


async def _answers(url: str) -> bool:
    """Whether somebody takes a connection there. What is no URL of ours to judge counts as an answer."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return True
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
    return False
