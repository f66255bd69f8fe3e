"""The server as a whole: set up, listening, and taken down in order.

async with Server(ServerSettings(port=0)) as server:
    print(server.url, server.isolation.tier)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import subprocess
from pathlib import Path
from types import TracebackType

from aiohttp import web

from toolroll.errors import ConfigError
from toolroll.sandbox.server import languages, tier
from toolroll.sandbox.server.front import Front
from toolroll.sandbox.server.sandbox import Sandbox, Toolchains
from toolroll.sandbox.server.settings import ServerSettings
from toolroll.sandbox.server.tier import Isolation

logger = logging.getLogger(__name__)

DRAIN_WITHIN = 60.0
"""Seconds that programs are given to end when the server does, beyond the longest time limit."""


class Server:
    """A sandbox server in this process."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.url = ""
        self.isolation: Isolation
        self.toolchains: Toolchains = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Server:
        """Set everything up, and listen. Raises ConfigError, with what to do, where that isn't possible."""
        _allow_many_descriptors()
        where = await asyncio.to_thread(prefixes, self.settings.python)
        path = os.pathsep.join([str(Path(self.settings.python).parent), os.environ.get("PATH", os.defpath)])
        self.toolchains = await asyncio.to_thread(languages.find_all, path, self.settings.python)
        more = [path for one in self.toolchains.values() for path in getattr(one, "readable", ())]
        readable = tier.readable_paths(self.settings.python, where, more)
        self.isolation = await tier.find(self.settings, readable)
        self.sandbox = Sandbox(self.settings, self.isolation, self.toolchains)
        self.front = Front(self.settings, self.sandbox)
        try:
            await self.sandbox.start()
            await self._listen()
        except OSError as error:
            await self.sandbox.close()
            raise ConfigError(f"The server can't be started: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner:
            await self._runner.cleanup()
        await self.sandbox.close()

    async def drain(self) -> None:
        """Let what is here end; take nothing new."""
        await self.front.drain(self.settings.max_timeout + DRAIN_WITHIN)

    async def _listen(self) -> None:
        self._runner = web.AppRunner(self.front.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        # Thousands may come at once; they wait in the queue here, not in the kernel's.
        site = web.TCPSite(self._runner, self.settings.host, self.settings.port, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_many_descriptors() -> None:
    """A connection takes one, a program that runs about eight; the usual limit of 1024 is soon reached."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def prefixes(python: str) -> list[str]:
    """Ask an interpreter where its parts are."""
    question = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix]))"
    try:
        done = subprocess.run([python, "-I", "-c", question], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"The interpreter for programs can't be run: {python}: {error}") from error
    found: list[str] = json.loads(done.stdout)
    return found
