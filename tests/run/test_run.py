"""Whole runs: every sample is recorded exactly once, even if the run is stopped or killed."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rollout import small_tokenizer

from toolroll.errors import ConfigError, RecordsNotWritten
from toolroll.records import append_file
from toolroll.records.reader import read_records
from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
from toolroll.run.run_coordinator import RunCoordinator
from toolroll.run.run_lock import RUN_LOCK_FILE, RunLock
from toolroll.run.status import RunSnapshot
from toolroll.run.write_fence import PERMISSION_FILE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory that contains only a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Any:
    """Return a function that writes a config with its data and returns the path of the config."""

    def write(rows: int = 20, delay: float = 0.02, **more: Any) -> Path:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"Question {n}?", "answer": n}) + "\n" for n in range(rows)))
        config = {
            "engine": {
                "kind": "run.fixed_latency_engine.FixedLatency",
                "urls": [],
                "options": {"tokenizer": str(model), "delay": delay},
            },
            "model": str(model),
            "data": {"path": "data.jsonl", "ground_truth": "answer"},
            "n": 3,
            "rollout_data_dir": "records",
            "prompts_per_step": 8,
            **more,
        }
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(config))
        return file

    return write


async def run(file: Path, *overrides: str) -> RunSnapshot:
    async with Run(RunConfig.load(file, overrides)) as running:
        await running.wait()
    return await running.status()


def samples(file: Path) -> Counter[tuple[int, int]]:
    """Count the records of each sample."""
    return Counter((int(str(one.group)), int(str(one.sample))) for one in read_records(file.parent / "records"))


def every(rows: int, n: int) -> Counter[tuple[int, int]]:
    return Counter((row, sample) for row in range(rows) for sample in range(n))


async def test_run_in_one_process(configure: Any) -> None:
    file = configure()
    status = await run(file)
    assert samples(file) == every(20, 3)
    assert (status.done, status.running, status.queued, status.total) == (60, 0, 0, 60)
    records = list(read_records(file.parent / "records"))
    assert {record.step for record in records} == {0, 1, 2}
    assert {(record.step, int(str(record.group)) // 8) for record in records} == {(0, 0), (1, 1), (2, 2)}
    assert all(record.gts == int(str(record.group)) for record in records)
    assert all("That is all." in record.output for record in records)
    again = await run(file)
    assert (again.done, again.resumed, again.tokens) == (60, 60, 0)
    assert again.aggregates["trajectories"] == 60, "earlier trajectories are included"
    assert samples(file) == every(20, 3), "no sample is recorded twice"


async def test_stopped_run_resumes(configure: Any) -> None:
    file = configure(rows=40, delay=0.3, max_in_flight=16)
    async with Run(RunConfig.load(file)) as running:
        while (await running.status()).done < 30:
            await asyncio.sleep(0.05)
    stopped = await running.status()
    assert 30 <= stopped.done < 120
    assert set(samples(file).values()) == {1}
    assert samples(file).total() == stopped.done
    status = await run(file)
    assert (status.resumed, status.done) == (stopped.done, 120)
    assert samples(file) == every(40, 3)


async def test_run_resumes_after_the_disk_was_full(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = configure()
    written = 0

    def write_a_part(descriptor: int, lines: list[bytes]) -> int:
        nonlocal written
        if written >= 30_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(descriptor, b"".join(lines)[: 30_000 - written])
        written += count
        return count

    def fail(descriptor: int, rest: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(append_file, "os", SimpleNamespace(**{**vars(os), "writev": write_a_part, "write": fail}))
        with pytest.raises(RecordsNotWritten, match=r"records/\d.jsonl: No space left on device. Free disk space"):
            await run(file)
    recorded = samples(file)
    assert recorded
    assert set(recorded.values()) == {1}
    status = await run(file)
    assert (status.done, status.resumed) == (60, recorded.total())
    assert samples(file) == every(20, 3)


@pytest.mark.parametrize("change", ["cut", "deleted"])
async def test_records_missing_from_a_complete_step_are_made(configure: Any, change: str) -> None:
    file = configure()
    await run(file)
    records = file.parent / "records" / "1.jsonl"
    if change == "cut":
        lines = records.read_bytes().splitlines(keepends=True)
        records.write_bytes(b"".join(lines[:5] + lines[9:]))
    else:
        records.unlink()
    missing = every(20, 3) - samples(file)
    assert missing
    status = await run(file)
    assert status.done == 60
    assert samples(file) == every(20, 3)
    assert status.resumed == 60 - missing.total()
    assert (await run(file)).resumed == 60, "the step is known to be complete again"


async def test_complete_steps_are_counted_with_new_solved_at(configure: Any) -> None:
    file = configure()
    assert (await run(file)).aggregates["solved"] == 0
    for solved_at, solved in ((0.0, 60), (1.0, 0), (0.0, 60)):
        again = await run(file, f"rewards.solved_at={solved_at}")
        assert (again.tokens, again.aggregates["solved"]) == (0, solved)


@pytest.mark.virtual_time
async def test_paused_process_does_not_lose_its_own_worker(configure: Any) -> None:
    file = configure(rows=12, rewards={"functions": {"pause": "run.pausing_reward.pause"}})
    status = await asyncio.wait_for(run(file), 3600)
    assert (status.done, status.lost_workers) == (36, 0)
    assert status.aggregates["outcomes"] == {"ok": 36}
    assert samples(file) == every(12, 3)


@pytest.mark.process
async def test_killed_run_resumes(configure: Any) -> None:
    file = configure(rows=40, delay=0.2, max_in_flight=16)
    script = f"""
import asyncio, sys
from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
async def main():
    async with Run(RunConfig.load({str(file)!r})) as run:
        await run.wait()
asyncio.run(main())
"""
    for wanted in (10, 60):
        process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path()})
        ends = time.monotonic() + 60
        while time.monotonic() < ends and lines(file) < wanted:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    status = await run(file)
    assert status.resumed >= 60
    assert samples(file) == every(40, 3)


def path() -> str:
    tests = Path(__file__).parent.parent
    return os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])


def lines(file: Path) -> int:
    return sum(one.read_bytes().count(b"\n") for one in (file.parent / "records").glob("*.jsonl"))


async def test_invalid_row_is_skipped(configure: Any) -> None:
    file = configure(rows=10)
    data = file.parent / "data.jsonl"
    rows = data.read_text().splitlines()
    rows[3], rows[7] = '{"prompt": ', '{"prompt": ""}'
    data.write_text("\n".join(rows) + "\n")
    status = await run(file)
    assert status.bad_rows >= 1
    assert status.done == (10 - status.bad_rows) * 3
    assert set(samples(file).values()) == {1}
    again = await run(file)
    assert (again.tokens, again.bad_rows) == (0, status.bad_rows)
    assert again.done == again.total == status.total


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "answer": 3, "sampling_params": {"max_new_tokens": 0}},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "/missing.png"}]}], "answer": 3},
    ],
)
async def test_row_that_the_worker_rejects_fails_alone(configure: Any, row: dict[str, Any]) -> None:
    file = configure(rows=10)
    data = file.parent / "data.jsonl"
    rows = data.read_text().splitlines()
    rows[3] = json.dumps(row)
    data.write_text("\n".join(rows) + "\n")
    status = await run(file)
    assert samples(file) == every(10, 3)
    assert status.aggregates["outcomes"] == {"ok": 27, "infra": 3}
    [error] = status.aggregates["errors"]
    assert error.startswith("Row 3 of the data is invalid: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 4}, "a run with n=3, but this run has n=4"),
        ({"prompts_per_step": 16}, "a run with prompts_per_step=8"),
        ({"data": {"path": "data.jsonl", "ground_truth": "answer"}, "rows": 21}, "a run with data="),
    ],
)
async def test_resuming_with_other_settings_is_rejected(configure: Any, change: Any, message: str) -> None:
    await run(configure(rows=20))
    with pytest.raises(ConfigError, match=message):
        await run(configure(**{"rows": 20, **change}))


async def test_second_run_in_directory_is_rejected(configure: Any) -> None:
    file = configure(delay=1.0)
    async with Run(RunConfig.load(file)) as running:
        await asyncio.sleep(0.2)
        with pytest.raises(ConfigError, match="Another run is active"):
            await run(file)
        await running.status()


def test_deleting_the_lock_file_does_not_unlock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, {"n": 1})
    (tmp_path / RUN_LOCK_FILE).unlink()
    with pytest.raises(ConfigError, match="Another run is active"):
        RunLock(tmp_path, {"n": 1})
    lock.release()
    RunLock(tmp_path, {"n": 1}).release()


def test_lock_works_where_directories_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def flock_like_nfs(file: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_like_nfs)
    lock = RunLock(tmp_path, {"n": 1})
    with pytest.raises(ConfigError, match="Another run is active"):
        RunLock(tmp_path, {"n": 1})
    lock.release()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.kind=nothing", "engine.kind: Unknown engine 'nothing'"),
        ("engine.options.dlay=1", r"engine: Cannot create .*FixedLatency.*dlay"),
        (
            "rewards.functions.right=no.such.function",
            r"rewards.functions.right: No module named 'no', needed by 'no.such.function'",
        ),
        ("nn=3", "nn"),
        ("data.path=nowhere.jsonl", "nowhere.jsonl"),
        ("tools=nowhere.yaml", "nowhere.yaml"),
    ],
)
async def test_invalid_setting_raises_config_error(configure: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(configure(), override)


def test_interpolations_are_resolved_after_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "run.yaml").write_text(
        "engine: {kind: openai, urls: 'http://x', model: '${oc.env:NO_SUCH_MODEL}'}\n"
        "n: 4\ndata: {path: rows.jsonl}\ntools: tools.yaml\nrollout_data_dir: out-${n}\n"
    )
    config = RunConfig.load(folder / "run.yaml", ["engine.model=m", "n=8", "data.path=rows-${n}.jsonl"])
    assert (config.engine.model, config.rollout_data_dir) == ("m", str(folder / "out-8"))
    assert (config.data.path, config.tools) == (str(tmp_path / "rows-8.jsonl"), str(folder / "tools.yaml"))


async def test_failed_start_does_not_lock_the_directory(configure: Any) -> None:
    file = configure(rows=4)
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        await run(file, "engine.kind=nothing")
    assert (await run(file)).done == 12


async def test_run_is_closed_if_its_status_fails(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(coordinator: RunCoordinator) -> RunSnapshot:
        raise OSError("no status")

    file = configure(rows=4)
    with monkeypatch.context() as patch:
        patch.setattr(RunCoordinator, "status", fail)
        with pytest.raises(OSError, match="no status"):
            await run(file)
    assert (await run(file)).resumed == 12


@pytest.mark.ray
async def test_killed_coordinator_is_restarted(configure: Any, cluster: str) -> None:
    file = configure(rows=16, delay=4.0, max_in_flight=8)  # many samples are in flight when the coordinator restarts
    async with Run(RunConfig.load(file, ["cluster=auto", "workers=2"])) as running:
        while (await running.status()).done < 8:
            await asyncio.sleep(0.05)
        [coordinator] = holders_of([file.parent / "records" / ".lock"])
        coordinator.send_signal(signal.SIGKILL)
        await asyncio.wait_for(running.wait(), 120)
    status = await running.status()
    assert status.done == 48
    assert samples(file) == every(16, 3)


@pytest.mark.ray
async def test_suspended_ray_workers_double_no_record(
    configure: Any, cluster: str, request: pytest.FixtureRequest, report_figure: Callable[[str], None]
) -> None:
    """Workers are stopped again and again, for shorter and longer than their lease, until the run is done."""
    rows = 20 + 10 * round(request.config.getoption("soak_seconds"))
    file = configure(rows=rows, delay=0.5, max_in_flight=6)
    permissions = f"*/{PERMISSION_FILE}"
    chance = random.Random(0)
    stops = 0
    async with Run(RunConfig.load(file, ["cluster=auto", "workers=2"])) as running:
        done = asyncio.create_task(running.wait())
        async with asyncio.timeout(60 + 3 * rows):
            while not done.done():
                workers = await asyncio.to_thread(holders_of, (file.parent / "records").glob(permissions))
                if not workers:
                    await asyncio.sleep(0.05)
                    continue
                stopped = chance.choice(workers)
                stopped.suspend()
                stops += 1
                while stops == 1 and (await running.status()).lost_workers < 1:
                    await asyncio.sleep(0.1)
                await asyncio.wait({done}, timeout=chance.uniform(0.5, 1.4 * WORKER_LEASE_S))
                stopped.resume()
                await asyncio.wait({done}, timeout=chance.uniform(0.5, 3))
            await done
    status = await running.status()
    report_figure(f"{stops} stops, {status.lost_workers} lost workers, {status.done} samples")
    assert status.done == 3 * rows
    assert samples(file) == every(rows, 3)


def holders_of(files: Iterable[Path]) -> list[psutil.Process]:
    """Return the processes that have one of the files open."""
    paths = {str(file) for file in files}
    holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(opened.path in paths for opened in process.open_files()):
                holders.append(process)
    return holders


def test_records_reserve_the_directory_for_their_run(tmp_path: Path) -> None:
    misspelled, intended, other = {"model": "Qwenn"}, {"model": "Qwen"}, {"model": "Llama"}
    RunLock(tmp_path, misspelled).release()
    RunLock(tmp_path, intended).release()
    (tmp_path / "worker-1").mkdir()
    (tmp_path / "worker-1" / "0.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="model='Qwen', but this run has model='Llama'"):
        RunLock(tmp_path, other)
    RunLock(tmp_path, intended).release()


async def test_failed_samples_do_not_reserve_the_directory(configure: Any) -> None:
    file = configure(rows=1)
    row = {"prompt": "?", "answer": 0, "sampling_params": {"max_new_tokens": 0}}
    (file.parent / "data.jsonl").write_text(json.dumps(row) + "\n")
    await run(file, "n=2")
    with pytest.raises(ConfigError, match="a run with n=2, but this run has n=3"):
        await run(file, "n=3", "retry=none")
    for n in (3, 2):
        assert (await run(file, f"n={n}")).resumed == 0


OWN_CLUSTER = """
import os, subprocess, sys
import ray  # a user's program may import it first
from toolroll.run.run import _connect

JOINING = '''
import sys
import ray
from toolroll._internal.ray_cluster import connect

assert connect(sys.argv[1])
assert len(ray.nodes()) == 1
'''

assert _connect("auto")
assert ray.get(ray.remote(num_cpus=1)(lambda: 42).remote()) == 42
kept = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
address = ray.get_runtime_context().gcs_address
subprocess.run([sys.executable, "-c", JOINING, address], env=kept, check=True, timeout=60)
ray.shutdown()
"""


@pytest.mark.ray
def test_auto_starts_a_cluster_that_others_can_join(tmp_path: Path) -> None:
    """Ray requires the authentication token that an earlier use has left in the home directory."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    other_machine = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # hides the clusters of other tests
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # names of sockets must be short
        environment = {**kept, "HOME": str(tmp_path), "RAY_TMPDIR": short}
        command = [*other_machine, sys.executable, "-c", OWN_CLUSTER]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
