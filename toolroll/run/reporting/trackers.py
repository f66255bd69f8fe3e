"""Send the metrics of a run to experiment trackers.

Each tracker has a thread, which also imports and creates it. So a slow or failing tracker neither delays nor fails the
run: it is given up after one warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from toolroll.errors import ConfigError
from toolroll.run.config import TrackerName

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "toolroll"
"""Project or experiment, unless the tracker's environment variable names another one."""
TRACKER_CLOSE_TIMEOUT_S = 30.0
"""Time that a tracker has to finish at the end of the run."""
MAX_PENDING = 100
"""Maximum number of updates that wait for a tracker. The oldest are dropped."""


class Tracker(Protocol):
    """An experiment tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of metrics."""

    def close(self) -> None:
        """Finish the tracker's run."""


class _TensorBoard:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run_id, key, str(value)[:500])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _Trackio:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT)
        self._run: Any = trackio.init(
            project, directory.name, config=dict(settings), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        # Without a key, wandb.init would ask for one in the terminal.
        can_log_in = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            name=directory.name,
            dir=str(directory),
            config=dict(settings),
            mode=None if can_log_in else "offline",
            settings=wandb.Settings(silent=True),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[TrackerName, tuple[str, Callable[[Path, Mapping[str, Any]], Tracker]]] = {
    "mlflow": ("mlflow", _MLflow),
    "tensorboard": ("tensorboardX", _TensorBoard),
    "trackio": ("trackio", _Trackio),
    "wandb": ("wandb", _Wandb),
}
"""Package and class of each tracker."""


class TrackerThread:
    """Logs to one tracker, in a thread.

    Args:
        name: Name of the tracker.
        directory: Directory of the run, whose name becomes the name of the tracker's run.
        settings: Settings of the run, for trackers that show them.

    Raises:
        ConfigError: If the tracker's package is not installed.
    """

    def __init__(self, name: TrackerName, directory: Path, settings: Mapping[str, Any]) -> None:
        package, tracker_class = TRACKERS[name]
        if find_spec(package) is None:
            raise ConfigError(f"tracker: {name} is not installed. Run: pip install {package}")
        self.name = name
        self._updates: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(MAX_PENDING)
        self._create = partial(tracker_class, directory, settings)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of metrics. If the tracker has failed or is too slow, the oldest values are dropped."""
        self._put((values, step))

    def close(self) -> None:
        """Finish the tracker's run, waiting for it for at most `TRACKER_CLOSE_TIMEOUT_S`."""
        self._put(None)
        self._thread.join(TRACKER_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("tracker %s did not finish within %g s and is abandoned", self.name, TRACKER_CLOSE_TIMEOUT_S)

    def _put(self, update: tuple[Mapping[str, float], int] | None) -> None:
        while True:
            try:
                self._updates.put_nowait(update)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._updates.get_nowait()
            else:
                return

    def _run(self) -> None:
        try:
            tracker = self._create()
            while (update := self._updates.get()) is not None:
                tracker.log(*update)
            tracker.close()
        except Exception as error:  # of the tracker, for example if its server cannot be reached
            logger.warning("tracker %s failed and gets no more metrics: %s: %s", self.name, type(error).__name__, error)
