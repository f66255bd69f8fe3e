"""Export the metrics of a run to Prometheus over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolroll.errors import ConfigError, MissingExtra
from toolroll.run.reporting.metrics import RUN_METRICS
from toolroll.run.status import RunSnapshot

METRICS_SERVER_STOP_TIMEOUT_S = 5.0


class MetricsServer:
    """HTTP server with the metrics of the last status, in a thread.

    Args:
        host: Address to listen on.
        port: Port to listen on. 0 chooses a free one.

    Raises:
        ConfigError: If the address cannot be used.
        MissingExtra: If prometheus-client is not installed.

    Attributes:
        port: Port that the server listens on.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise MissingExtra("prometheus-client", "metrics") from error
        self._status: RunSnapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)  # a collector by its method `collect`
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            problem = f"metrics_port: Cannot listen on {host}:{port}: {error.strerror}. Choose another port."
            raise ConfigError(problem) from error
        self.port: int = self._server.server_port

    def update(self, status: RunSnapshot) -> None:
        """Set the status whose metrics are exported."""
        self._status = status

    def collect(self) -> Iterator[Any]:
        """Return the metrics. Called by prometheus-client for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        if status is None:
            return
        for metric in RUN_METRICS:
            family_class: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = family_class(f"toolroll_{metric.name}", metric.description, labels=metric.labels)
            for labels, value in metric.read(status).items():
                family.add_metric(labels, value)
            yield family

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(METRICS_SERVER_STOP_TIMEOUT_S)
