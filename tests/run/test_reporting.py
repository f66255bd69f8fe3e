"""A run reports its metrics to trackers and Prometheus, and no tracker can fail or delay it."""

import asyncio
import json
import logging
import socket
import struct
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from rollout import small_tokenizer

from toolroll.errors import ConfigError
from toolroll.limiter.registry import get_limiter
from toolroll.records.reader import read_records
from toolroll.run.config import RunConfig
from toolroll.run.reporting import trackers
from toolroll.run.reporting.metrics import RUN_METRICS, tracked_values
from toolroll.run.reporting.reporter import RunReporter
from toolroll.run.reporting.trackers import TrackerThread
from toolroll.run.run import Run
from toolroll.run.status import RunRates, RunSnapshot
from toolroll.tracing import exporter

VALUES = {"run_samples/done": 60.0, "limiter_slots/http_sandbox_8080/in_use": 1.0}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config of a run with 12 prompts and 3 samples of each."""
    directory = tmp_path_factory.mktemp("run")
    model = str(directory / "model")
    small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    ).save_pretrained(model)
    (directory / "data.jsonl").write_text("".join(f'{{"prompt": "Question {n}?"}}\n' for n in range(12)))
    options = {"tokenizer": model, "delay": 0.01}
    engine = {"kind": "run.fixed_latency_engine.FixedLatency", "options": options}
    run = {"engine": engine, "model": model, "data": {"path": "data.jsonl"}, "n": 3, "rollout_data_dir": "records"}
    (directory / "run.yaml").write_text(json.dumps(run))
    return directory / "run.yaml"


async def finished(config: Path, tmp_path: Path, *settings: str) -> RunSnapshot:
    async with Run(RunConfig.load(config, [f"rollout_data_dir={tmp_path / 'records'}", *settings])) as run:
        await run.wait()
    return await run.status()


def events(directory: Path) -> Iterator[Any]:
    """Yield the events of a TensorBoard directory. Each has a length, a checksum, the content, and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            [length] = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]


async def test_tensorboard_files_have_the_final_metrics(config: Path, tmp_path: Path) -> None:
    status = await finished(config, tmp_path, "tracker=tensorboard")
    assert status.done == 36
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events(tmp_path / "records" / "tensorboard")
        for value in event.summary.value
    }
    assert scalars[("run_samples/done", 36)] == 36
    assert scalars[("run_trajectories/stop", 36)] == 36
    assert scalars[("run_sampled_tokens", 36)] == status.tokens
    assert ("run_per_second/tokens", 36) in scalars


@pytest.mark.process
async def test_mlflow_store_has_the_final_metrics(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(trackers, "TRACKER_CLOSE_TIMEOUT_S", 120)  # importing mlflow takes long on a busy machine
    get_limiter("/usr/bin/python ../a server.py", 4)  # as that of an MCP server is called
    status = await finished(config, tmp_path, "tracker=[mlflow, tensorboard]")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("toolroll")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("records", "FINISHED")
    assert run.data.params["n"] == "3"
    assert run.data.metrics["run_samples/done"] == 36
    assert run.data.metrics["limiter_slots/usr_bin_python_.._a_server.py/limit"] == 4
    history = client.get_metric_history(run.info.run_id, "run_sampled_tokens")
    assert (history[-1].step, history[-1].value) == (36, status.tokens)
    assert list((tmp_path / "records" / "tensorboard").iterdir())


class RecordedModule(types.ModuleType):
    """A module whose functions record their calls. `init` returns the module itself, as the run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return {"init": self, "login": False}.get(name)

        return record


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_tracker_calls_its_package(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The packages are large, so their calls are recorded. The arguments are those of trackio 0.43 and wandb 0.31.
    module = RecordedModule(name)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trackers, "find_spec", lambda package: package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker = TrackerThread(name, tmp_path / "records", {"n": 3})
    tracker.log(VALUES, 60)
    tracker.close()
    calls = {function: (args, kwargs) for function, args, kwargs in module.calls}
    args, kwargs = calls["init"]
    assert kwargs["config"] == {"n": 3}
    if name == "trackio":
        assert args == ("toolroll", "records")
    else:
        assert (kwargs["project"], kwargs["name"], kwargs["mode"]) == ("toolroll", "records", "offline")
    assert calls["log"] == ((VALUES,), {"step": 60})
    assert calls["finish"] == ((), {})


class FailingTracker:
    """A tracker whose server fails after the first update."""

    def __init__(self, *_: Any) -> None:
        self.updates = 0

    def log(self, values: Any, step: int) -> None:
        self.updates += 1
        if self.updates > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise AssertionError("a failed tracker gets no more calls")


async def test_failing_tracker_does_not_fail_the_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", ("mlflow", FailingTracker))
    status = await finished(config, tmp_path, "tracker=mlflow")
    assert status.done == 36
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert warnings == ["tracker mlflow failed and gets no more metrics: ConnectionError: the server is gone"]


def test_slow_tracker_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, closed = threading.Event(), threading.Event()
    steps: list[int] = []

    class SlowTracker:
        def __init__(self, *_: Any) -> None:
            release.wait()

        def log(self, values: Any, step: int) -> None:
            steps.append(step)

        def close(self) -> None:
            closed.set()

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", ("mlflow", SlowTracker))
    monkeypatch.setattr(trackers, "TRACKER_CLOSE_TIMEOUT_S", 0.01)
    tracker = TrackerThread("mlflow", tmp_path, {})
    for step in range(2 * trackers.MAX_PENDING):
        tracker.log(VALUES, step)
    tracker.close()
    assert [one.getMessage() for one in caplog.records] == [
        "tracker mlflow did not finish within 0.01 s and is abandoned"
    ]
    release.set()
    assert closed.wait(30)
    assert steps == list(range(trackers.MAX_PENDING + 1, 2 * trackers.MAX_PENDING)), "the newest values"


def test_missing_tracker_is_an_error_before_the_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"^tracker: wandb is not installed. Run: pip install wandb$"):
        asyncio.run(finished(config, tmp_path, "tracker=wandb"))
    with pytest.raises(ConfigError, match=r"tracker\.0: Input should be 'mlflow', 'tensorboard', 'trackio' or 'wandb'"):
        RunConfig.load(config, ["tracker=tensorbord"])


async def test_metrics_are_exported_while_the_run_is_active(config: Path, tmp_path: Path) -> None:
    settings = [f"rollout_data_dir={tmp_path / 'records'}", "metrics_port=0", "engine.options.delay=0.3"]
    async with Run(RunConfig.load(config, settings)) as run:
        server = run._reporter.metrics_server
        assert server is not None
        while (await run.status()).running == 0:
            await asyncio.sleep(0.01)
        run._reporter.report(await run.status())
        url = f"http://127.0.0.1:{server.port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as response:
            text = response.read().decode()
        await run.wait()
    assert 'toolroll_run_samples{state="total"} 36.0' in text
    assert 'toolroll_run_samples{state="running"} 36.0' in text
    assert "# TYPE toolroll_run_sampled_tokens_total counter" in text


async def test_samples_of_the_last_block_are_watched(config: Path, tmp_path: Path) -> None:
    """The run has 36 samples, which is less than a block, in steps of 4 prompts; the last step is complete."""
    for _ in ("first", "resumed"):
        status = await finished(config, tmp_path, "prompts_per_step=4")
        assert status.alarms["truncated"] == {"share": 0.0, "baseline": None, "alarm": False}


async def test_run_sends_a_trace_of_each_sample(config: Path, tmp_path: Path) -> None:
    with Collector() as collector:
        status = await finished(config, tmp_path, f"tracing={collector.url}")
    roots = [span for span in collector.spans if not span.parent_span_id]
    recorded = {record.request_id for record in read_records(tmp_path / "records")}
    assert status.done == len(roots) == 36
    assert {span.trace_id.hex() for span in roots} == recorded


async def test_run_without_collector_is_complete(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "FLUSH_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    status = await finished(config, tmp_path, f"tracing=http://127.0.0.1:{port}")
    assert status.done == 36
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    reason = "the collector did not accept the spans in time. The rollout continues."
    assert warnings == [f"cannot send traces to http://127.0.0.1:{port}: {reason}"]


def test_collector_is_that_of_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunConfig.load(config).tracing is None
    assert RunConfig.load(config, ["tracing=true"]).tracing == "http://localhost:4318"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert RunConfig.load(config, ["tracing=true"]).tracing == "http://collector:4318"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4318/v1/traces")
    assert RunConfig.load(config, ["tracing=true"]).tracing == "http://traces:4318/v1/traces"
    assert RunConfig.load(config, ["tracing=false"]).tracing is None


def test_occupied_metrics_port_is_an_error(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port: Cannot listen on 127.0.0.1:{port}: .*Choose another"):
            RunReporter(RunConfig.load(config, [f"metrics_port={port}"]))


def test_every_metric_has_values() -> None:
    status = RunSnapshot(
        done=4,
        running=1,
        queued=None,
        total=None,
        tokens=10,
        calls=2,
        workers=1,
        seconds=2.0,
        unreachable={"engine": 3.0},
        spent={"judge": {"usd": 0.5}},
        slots={"http://sandbox:8080": {"limit": 4, "in_use": 1, "waiting": 0}},
        alarms={"malformed": {"share": 0.2, "baseline": 0.02, "alarm": True}},
        aggregates={
            "finish_reasons": {"stop": 4},
            "outcomes": {"ok": 4},
            "fidelity": {"exact": 4},
            "faults": {"policy": 1},
            "programs": {"ok": 2},
            "mean_reward": 0.5,
            "pass_at_k": {"1": 0.5},
            **{name: {"p50": 1.0, "p90": 2.0, "p99": 3.0} for name in ("seconds", "tool_seconds", "queue_wait")},
        },
    )
    values = tracked_values(status, RunRates(tokens=5.0))
    assert {name.split("/")[0] for name in values} == {*(metric.name for metric in RUN_METRICS), "run_per_second"}
    assert values["run_spent/judge/usd"] == 0.5
    assert values["run_trajectory_seconds/0.9"] == 2.0
    assert "run_samples/queued" not in values
