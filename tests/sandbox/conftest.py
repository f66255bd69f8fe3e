"""Fixtures of the sandbox tests: a running server and its client."""

from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox.serving import Serving, serving
from toolroll.sandbox.client import SandboxClient


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Serving]:
    """Start a server with default settings."""
    with serving() as running:
        yield running


@pytest.fixture
def server(sandbox: Serving) -> str:
    """Return the URL of the server."""
    return sandbox.url


@pytest.fixture
async def client(server: str) -> AsyncIterator[SandboxClient]:
    """Return a client of the server."""
    async with SandboxClient(server) as client:
        yield client
