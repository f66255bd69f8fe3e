"""The HTTP front of the sandbox server in this process, with an executor that starts no programs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, RunStatus
from toolroll.sandbox.server.api.http_app import HttpApp
from toolroll.sandbox.server.execution.executor import Executor
from toolroll.sandbox.server.execution.sessions import SessionTable
from toolroll.sandbox.server.server import SandboxServer
from toolroll.sandbox.server.settings import ServerSettings


class EchoExecutor:
    """Executor that returns the source of a program as its output. A session returns all sources that it received."""

    def __init__(self) -> None:
        self.sessions = SessionTable(8, 600)
        self.restarts = 0
        self.sources: dict[str, str] = {}
        self.isolation = SimpleNamespace(tier="A", gaps=[])

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        stdout = request.code
        if request.session_id is not None:
            stdout = self.sources[request.session_id] = self.sources.get(request.session_id, "") + request.code
        result = CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout=stdout)
        return RunCodeResponse(status=RunStatus.SUCCESS, run_result=result)

    async def run_jupyter(self, request: protocol.RunJupyterRequest) -> protocol.RunJupyterResponse:
        return protocol.RunJupyterResponse(status=RunStatus.SUCCESS)

    async def close(self) -> None:
        self.sessions.close()


@contextlib.asynccontextmanager
async def http_front(**settings: Any) -> AsyncIterator[SandboxServer]:
    """Serve the HTTP API with these settings."""
    server = SandboxServer(ServerSettings(**{"port": 0, **settings}))
    server.executor = cast("Executor", EchoExecutor())
    server.http_app = HttpApp(server.settings, server.executor)
    await server._listen()
    try:
        yield server
    finally:
        await server.__aexit__()
