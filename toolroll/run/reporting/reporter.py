"""Report the status of a run to trackers and to Prometheus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from toolroll.run.config import RunConfig
from toolroll.run.reporting.metrics import tracked_values
from toolroll.run.reporting.metrics_server import MetricsServer
from toolroll.run.reporting.trackers import TrackerThread
from toolroll.run.status import RunRates, RunSnapshot

REPORT_INTERVAL_S = 10.0
"""Interval at which a run is reported."""


class RunReporter:
    """Sends each status to the trackers and the metrics server that a config names.

    Args:
        config: Configuration of the run.

    Raises:
        ConfigError: If a tracker is not installed, or the metrics cannot be served.
    """

    def __init__(self, config: RunConfig) -> None:
        self.metrics_server: MetricsServer | None = None
        if config.metrics_port is not None:
            self.metrics_server = MetricsServer(config.metrics_host, config.metrics_port)
        self._trackers: list[TrackerThread] = []
        self._last: RunSnapshot | None = None
        directory, settings = Path(config.rollout_data_dir), _shown_settings(config)
        try:
            for name in config.tracker:
                self._trackers.append(TrackerThread(name, directory, settings))
        except BaseException:
            self._close()
            raise

    @property
    def is_active(self) -> bool:
        """Whether there is anything to report to."""
        return bool(self._trackers) or self.metrics_server is not None

    def report(self, status: RunSnapshot) -> None:
        """Report a status. Does not block, and never fails because of a tracker."""
        rates = RunRates.between(self._last or status, status)
        self._last = status
        if self.metrics_server is not None:
            self.metrics_server.update(status)
        values = tracked_values(status, rates) if self._trackers else {}
        for tracker in self._trackers:
            tracker.log(values, status.done)

    async def close(self) -> None:
        """Finish the trackers and stop the metrics server, in bounded time."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        if self.metrics_server is not None:
            self.metrics_server.close()


def _shown_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that identify a run. URLs are left out, because they may contain credentials."""
    return {
        "engine": config.engine.kind,
        "model": config.model_name,
        "data": config.data.path,
        "n": config.n,
        **{f"sampling_params.{name}": value for name, value in config.sampling_params.items()},
    }
