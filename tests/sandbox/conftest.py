"""What the sandbox's tests share: a running server."""

from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox.serving import Serving, serving
from toolroll.sandbox.client import SandboxClient


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Serving]:
    """A server with default settings."""
    with serving() as running:
        yield running


@pytest.fixture
def server(sandbox: Serving) -> str:
    """Its address."""
    return sandbox.url


@pytest.fixture
async def client(server: str) -> AsyncIterator[SandboxClient]:
    """A client of it."""
    async with SandboxClient(server) as client:
        yield client
