"""Control of the limited service and of the processes that use it, for tests and benchmarks."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .service_figures import ServiceRequest, Stall

HERE = Path(__file__).parent
READY_TIMEOUT_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]
"""Function that starts `python *args` with its output and errors in one pipe."""


def start_here(*args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a Python process in the namespaces of this process, with additional environment variables."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, *args], text=True, env={**os.environ, **(env or {})}, **pipes)


class Service:
    """Client of a running service, over its Unix socket."""

    def __init__(self, address: tuple[str, int], path: Path) -> None:
        self.address = address
        self._path = path

    def set(self, **settings: float) -> float:
        """Change settings and return the time of the change."""
        return float(self._get("/set?" + "&".join(f"{name}={value}" for name, value in settings.items())))

    def requests(self) -> list[ServiceRequest]:
        """Return all requests that were sent by processes with a limiter."""
        return [request for request in self._all_requests() if request.by != "bare"]

    def bare_requests(self) -> list[ServiceRequest]:
        """Return all requests that were sent by processes without a limiter."""
        return [request for request in self._all_requests() if request.by == "bare"]

    def stalls(self) -> list[Stall]:
        """Return the periods in which the service did not run although it should have."""
        from .service_figures import Stall

        return [Stall(*row) for row in self._get("/stalls")]

    def _all_requests(self) -> list[ServiceRequest]:
        from .service_figures import ServiceRequest

        return [ServiceRequest(*row) for row in self._get("/stats")]

    def _get(self, path: str) -> Any:
        connection = _UnixConnection(self._path)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"The service answered {answer.status}: {body}")
        return json.loads(body)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("service", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextmanager
def running_service(start: Start, host: str, port: int, directory: Path) -> Iterator[Service]:
    """Run the service until the block ends."""
    path = directory / "service.sock"
    process = start(str(HERE / "service.py"), host, str(port), str(path))
    try:
        assert process.stdout is not None
        if (line := process.stdout.readline()) != "up\n":
            raise RuntimeError(f"The service did not start: {line}{process.communicate()[0]}")
        yield Service((host, port), path)
    finally:
        process.kill()
        process.communicate()


class ServiceLoad:
    """A process that uses the service. A thread reads its output, so that the process is never blocked by it."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.process, self.name = process, name
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                if line == "ready\n":
                    self._ready.set()
        self._ready.set()

    def wait_until_ready(self) -> None:
        """Wait until the process sends requests and is watched."""
        if not self._ready.wait(READY_TIMEOUT_S) or "ready\n" not in self.lines:
            raise RuntimeError(f"{self.name} did not start:\n{self.output}")

    @property
    def output(self) -> str:
        """Output of the process up to now."""
        return "".join(self.lines)

    def kill(self) -> float:
        """Send SIGKILL and return the time."""
        self.process.kill()
        moment = time.time()
        self.process.wait()
        self._reader.join()
        return moment

    def result(self, timeout: float) -> dict[str, Any]:
        """Wait for the end of the process and return its counts."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self.name} did not end:\n{self.output}") from error
        self._reader.join()
        if status:
            raise RuntimeError(f"{self.name} exited with status {status}:\n{self.output}")
        return dict(json.loads(next(line for line in reversed(self.lines) if line.startswith("{"))))


class ServiceLoads:
    """Starts processes that use a service, and kills those that still run when the block ends."""

    def __init__(self, service: Service, **job: Any) -> None:
        self.service = service
        self.all: list[ServiceLoad] = []
        self._job = job

    def __enter__(self) -> ServiceLoads:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for load in self.all:
            load.kill()

    def start(self, start: Start, **job: Any) -> ServiceLoad:
        """Start one process."""
        job = {"name": f"load{len(self.all)}", "server": self.service.address, "seconds": 600, **self._job, **job}
        self.all.append(ServiceLoad(start(str(HERE / "service_load.py"), json.dumps(job)), job["name"]))
        return self.all[-1]

    def start_all(self, starts: Sequence[Start]) -> float:
        """Start one process by each function, and return the time at which all are ready."""
        loads = [self.start(start) for start in starts]
        for load in loads:
            load.wait_until_ready()
        return time.time()


def bare_throughput(service: Service, start: Start, capacity: int, seconds: float = 3.0) -> float:
    """Return the throughput that a client reaches with exactly as many concurrent requests as the capacity."""
    from .service_figures import cycle_throughput

    service.set(capacity=capacity)
    with ServiceLoads(service, name="bare", concurrency=capacity, seconds=seconds) as loads:
        load = loads.start(start)
        load.wait_until_ready()
        begin = time.time() + 0.5
        load.result(timeout=seconds + 30)
    return cycle_throughput(service.bare_requests(), capacity, begin, begin + seconds - 1.0)
