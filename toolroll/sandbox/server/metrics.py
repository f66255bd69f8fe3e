"""What Prometheus is told: how many ran and how they came out, how long they waited and took, what is going on now."""

from __future__ import annotations

from collections.abc import Callable

from toolroll.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise MissingExtra("prometheus-client", "sandbox") from error

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counts of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.executions = Counter(
            "toolroll_sandbox_executions", "Programs run.", ["language", "outcome"], registry=self._registry
        )
        self.refused = Counter(
            "toolroll_sandbox_refused", "Requests that were not run.", ["reason"], registry=self._registry
        )
        self.queue_seconds = Histogram(
            "toolroll_sandbox_queue_seconds", "How long requests waited.", buckets=_SECONDS, registry=self._registry
        )
        self.run_seconds = Histogram(
            "toolroll_sandbox_run_seconds", "How long programs ran.", buckets=_SECONDS, registry=self._registry
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a value that is asked for when somebody looks."""
        Gauge(f"toolroll_sandbox_{name}", text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self._registry)
