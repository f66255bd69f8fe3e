"""Prometheus metrics of the sandbox server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolroll.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise MissingExtra("prometheus-client", "sandbox") from error

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """Metrics of one server, in a registry that no other server shares."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._options: dict[str, Any] = {"namespace": "toolroll_sandbox", "registry": self._registry}
        self.executions = Counter("executions", "Programs run.", ["language", "outcome"], **self._options)
        self.refused = Counter("refused", "Requests that were not run.", ["reason"], **self._options)
        self.queue_seconds = Histogram("queue_seconds", "Queue time of requests.", buckets=_BUCKETS_S, **self._options)
        self.run_seconds = Histogram("run_seconds", "Run time of programs.", buckets=_BUCKETS_S, **self._options)

    def add_gauge(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is read at every scrape."""
        Gauge(name, description, **self._options).set_function(value)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
