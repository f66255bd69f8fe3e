"""Check a run before it starts, without loading a tokenizer or connecting to a cluster.

During a run, an unreachable server is an infra fault, and trajectories are retried. The preflight check reports a
server that was never started immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from toolroll._internal.text import hide_credentials
from toolroll.errors import ConfigError
from toolroll.run.config import SERVER_KINDS, RunConfig
from toolroll.run.data import PromptRows
from toolroll.run.sample_worker import sandbox_tools

logger = logging.getLogger(__name__)

PREFLIGHT_TIMEOUT_S = 5.0
"""Timeout for opening a connection to a server."""
START_ENGINE = "Start the engine, or set its address: engine.urls=http://host:port"
START_SANDBOX = "Start a sandbox: toolroll sandbox serve"
SERVERS = {"sglang": "SGLang", "vllm": "vLLM", "openai": "a chat server", "sandbox": "a sandbox"}
"""What the servers of a run should be, by `engine.kind`."""
CHAT_SERVERS = ("SGLang", "vLLM", "a chat server")
UNKNOWN_SERVER = "unknown"
SIGNS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("/v1/ping", lambda answer: answer == "pong" or answer.get("ping") == "pong", "a sandbox"),
    ("/model_info", lambda answer: "model_path" in answer, "SGLang"),
    ("/get_model_info", lambda answer: "model_path" in answer, "SGLang"),  # of older versions
    ("/version", lambda answer: "version" in answer, "vLLM"),
    ("/v1/models", lambda answer: "data" in answer, "a chat server"),
    ("/models", lambda answer: "data" in answer, "a chat server"),
)
"""Paths that only one kind of server has, with a check of the answer."""


async def check(config: RunConfig, on_phase: Callable[[str], None] = lambda _: None) -> None:
    """Check the first rows of the data, and that the engine and the sandboxes are there and are what they should be.

    Servers of a run on a cluster only cause a warning, because the workers' network may differ from this machine's.

    Args:
        config: Configuration of the run.
        on_phase: Called with a description of each check before it starts.

    Raises:
        ConfigError: If the data cannot be used, no server of the engine or of a sandbox tool is reachable, or a server
            is another one.
    """
    on_phase("Checking the data")
    PromptRows(config.data).check()
    on_phase("Loading the tools")
    replay = config.replay
    for tool in sandbox_tools(config) if replay is None or replay.on_miss == "call" else ():
        on_phase("Waiting for the sandbox")
        await _check_servers(config, tool.name, "sandbox", _as_list(tool.settings.sandbox_fusion_url))
    if config.engine.kind in SERVER_KINDS and (
        replay is None or not replay.engine
    ):  # the URLs of a custom engine class may mean anything
        on_phase("Waiting for the engine")
        await _check_servers(config, "engine", config.engine.kind, _as_list(config.engine.urls))


async def _check_servers(config: RunConfig, name: str, kind: str, urls: list[str]) -> None:
    answers = await asyncio.gather(*map(is_reachable, urls))
    unreachable = [url for url, answered in zip(urls, answers, strict=True) if not answered]
    problems = [
        f"{hide_credentials(url)} ({name}) {mistake}"
        for url in urls
        if url not in unreachable and (mistake := _find_mistake(kind, await identify(url)))
    ]
    is_fatal = bool(problems) or len(unreachable) == len(urls)
    if unreachable:
        remedy = START_ENGINE if name == "engine" else START_SANDBOX
        problems.append(f"Cannot connect to {hide_credentials(', '.join(unreachable))} ({name}). {remedy}")
    for problem in problems:
        if is_fatal and config.cluster is None:
            raise ConfigError(problem)
        logger.warning("%s", problem)


def _find_mistake(kind: str, found: str | None) -> str | None:
    """Return what is wrong with a server of some kind, by what it turned out to be. Pure function."""
    expected = SERVERS[kind]
    if found in (expected, UNKNOWN_SERVER) or (kind == "openai" and found in CHAT_SERVERS):
        return None
    remedy = START_SANDBOX if kind == "sandbox" else f"Set engine.urls to the address of {expected}"
    if found is None:
        return f"answers, but it is not {expected}. {remedy}."
    fitting = next((other for other, server in SERVERS.items() if server == found and other != "sandbox"), None)
    if kind != "sandbox" and fitting is not None:
        remedy += f", or engine.kind={fitting}"
    return f"is {found}, not {expected}. {remedy}."


async def identify(url: str) -> str | None:
    """Return what a server is, `UNKNOWN_SERVER` if it requires a token, or None if it is none of `SERVERS`."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=PREFLIGHT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for path, is_answer, server in SIGNS:
            try:
                async with session.get(base + path) as response:
                    if response.status in (401, 403):
                        return UNKNOWN_SERVER
                    if response.status == 200 and is_answer(await response.json(content_type=None)):
                        return server
            except TimeoutError:
                return UNKNOWN_SERVER  # it is busy
            except (aiohttp.ClientError, ValueError, TypeError, AttributeError):  # an answer of another form
                continue
    return None


def _as_list(urls: str | list[str] | tuple[str, ...]) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)


async def is_reachable(url: str) -> bool:
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
