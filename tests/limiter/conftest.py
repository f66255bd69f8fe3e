"""Fixtures: a server that counts concurrent requests, and processes that send requests to it."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

HERE = Path(__file__).parent


class Server:
    """Client of the counting server."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.address[0]}:{self.address[1]}/stats", timeout=20) as answer:
            return dict(json.load(answer))

    def levels(self, name: str | None = None) -> list[tuple[float, int]]:
        """Return the number of concurrent requests at each change, of one process or of all."""
        level, levels = 0, []
        for moment, by, change in self.stats()["events"]:
            if name in (None, by):
                level += change
                levels.append((moment, level))
        return levels


@pytest.fixture
def server() -> Iterator[Server]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, HERE / "counting_server.py", "127.0.0.1", str(port)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield Server("127.0.0.1", port)
    process.kill()
    process.communicate()


class Load:
    """A process that sends requests to the server, until its duration after `go` has elapsed."""

    def __init__(self, process: "subprocess.Popen[str]", name: str) -> None:
        self.process, self.name = process, name

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        """Send SIGKILL and return the time."""
        self.process.kill()
        return time.time()

    def result(self, timeout: float = 90) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, err
        return dict(json.loads(out.strip().splitlines()[-1]))


DEFAULTS = {"limit": 32, "concurrency": 32, "ms": 100, "hold": 5.0, "patience": 30, "seconds": 5, "ttl": 10.0}


@pytest.fixture
def load(cluster: str, server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[..., Load]]:
    started: list[Load] = []

    def start(**job: Any) -> Load:
        name = f"load{len(started)}"
        job = {**DEFAULTS, "resource": request.node.name, "server": server.address, "name": name, **job}
        process = subprocess.Popen(
            [sys.executable, HERE / "load.py", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Load(process, name))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()
