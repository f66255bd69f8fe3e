"""The HTTP front of the sandbox server in this process, with an executor that starts no programs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, RunStatus
from toolroll.sandbox.server.execution.executor import Executor
from toolroll.sandbox.server.execution.sessions import SessionTable
from toolroll.sandbox.server.fronts.front import Front
from toolroll.sandbox.server.hub.hub import Hub
from toolroll.sandbox.server.server import SandboxServer
from toolroll.sandbox.server.settings import ServerSettings


class EchoExecutor:
    """Executor that returns the source of a program as its output. A session returns all sources that it received."""

    def __init__(self) -> None:
        self.sessions = SessionTable(600)
        self.restarts = 0
        self.sources: dict[str, str] = {}
        self.isolation = SimpleNamespace(tier="A", gaps=[])

    def check_session_request(self, request: RunCodeRequest) -> None:
        pass

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        stdout = request.code
        if request.session_id is not None:
            stdout = self.sources[request.session_id] = self.sources.get(request.session_id, "") + request.code
        result = CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout=stdout)
        return RunCodeResponse(status=RunStatus.SUCCESS, run_result=result)

    async def run_jupyter(self, request: protocol.RunJupyterRequest) -> protocol.RunJupyterResponse:
        return protocol.RunJupyterResponse(status=RunStatus.SUCCESS)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.sessions.close()


class FrontServer(SandboxServer):
    """A server whose front is in this process and does not run programs."""

    front: Front


@contextlib.asynccontextmanager
async def http_front(**settings: Any) -> AsyncIterator[FrontServer]:
    """Serve the HTTP API with these settings."""
    server = FrontServer(ServerSettings(**{"port": 0, "fronts": 1, **settings}))
    server.hub = Hub(server.settings)
    server.front = server._new_front()
    await server.front.serve(cast("Executor", EchoExecutor()))
    await server._listen(server.front)
    try:
        yield server
    finally:
        await server.front.close()
