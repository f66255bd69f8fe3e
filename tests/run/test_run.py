"""Whole runs: every sample of every prompt is recorded once, whatever is stopped or killed on the way."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from rollout import small_tokenizer

from toolroll.errors import ConfigError
from toolroll.records.reader import read
from toolroll.run.claim import Claim
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
from toolroll.run.status import Status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer where a model's would be."""
    directory = tmp_path_factory.mktemp("model")
    small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Any:
    """Writes a run's config with its data. Where it is."""

    def write(rows: int = 20, delay: float = 0.02, **more: Any) -> Path:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"Question {n}?", "answer": n}) + "\n" for n in range(rows)))
        config = {
            "engine": {
                "kind": "run.engine_of_fixed_latency.FixedLatency",
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


async def run(file: Path, *overrides: str) -> Status:
    async with Run(RunConfig.load(file, overrides)) as running:
        await running.wait()
    return await running.status()


def samples(file: Path) -> Counter[tuple[int, int]]:
    """What is in the records, and how often."""
    return Counter((int(str(one.group)), int(str(one.sample))) for one in read(file.parent / "records"))


def every(rows: int, n: int) -> Counter[tuple[int, int]]:
    return Counter((row, sample) for row in range(rows) for sample in range(n))


async def test_in_one_process(configure: Any) -> None:
    file = configure()
    status = await run(file)
    assert samples(file) == every(20, 3)
    assert (status.done, status.running, status.queued, status.total) == (60, 0, 0, 60)
    records = list(read(file.parent / "records"))
    assert {record.step for record in records} == {0, 1, 2}
    assert {(record.step, int(str(record.group)) // 8) for record in records} == {(0, 0), (1, 1), (2, 2)}
    assert all(record.gts == int(str(record.group)) for record in records)
    assert all("That is all." in record.output for record in records)
    again = await run(file)
    assert (again.done, again.resumed, again.tokens) == (60, 60, 0)
    assert again.tally["trajectories"] == 60, "what was done before is in the tally"
    assert samples(file) == every(20, 3), "and nothing is done twice"


async def test_stopped_and_begun_anew(configure: Any) -> None:
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


async def test_killed_and_begun_anew(configure: Any) -> None:
    file = configure(rows=40, delay=0.2, max_in_flight=16)
    script = f"""
import asyncio, sys
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


async def test_a_row_that_cant_be_used_is_left_out(configure: Any) -> None:
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
    assert again.tokens == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 4}, "a run with n=3, and this one has 4"),
        ({"prompts_per_step": 16}, "a run with prompts_per_step=8"),
        ({"data": {"path": "data.jsonl", "ground_truth": "answer"}, "rows": 21}, "a run with data="),
    ],
)
async def test_other_settings_dont_go_on_in_anothers_records(configure: Any, change: Any, said: str) -> None:
    await run(configure(rows=20))
    with pytest.raises(ConfigError, match=said):
        await run(configure(**{"rows": 20, **change}))


async def test_two_runs_in_one_directory(configure: Any) -> None:
    file = configure(delay=1.0)
    async with Run(RunConfig.load(file)) as running:
        await asyncio.sleep(0.2)
        with pytest.raises(ConfigError, match="Another run is at work"):
            await run(file)
        await running.status()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.kind=nothing", "engine.kind: there is no 'nothing'"),
        ("engine.options.dlay=1", r"engine: .*FixedLatency can't be made: .*dlay"),
        ("rewards.functions.right=no.such.function", r"rewards.functions.right: there is no 'no.such.function'"),
        ("nn=3", "nn"),
        ("data.path=nowhere.jsonl", "nowhere.jsonl"),
        ("tools=nowhere.yaml", "nowhere.yaml"),
    ],
)
async def test_what_is_wrong_is_said(configure: Any, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await run(configure(), override)


async def test_a_board_that_is_killed_is_begun_anew_and_nothing_is_done_twice(configure: Any, cluster: str) -> None:
    file = configure(rows=16, delay=4.0, max_in_flight=8)  # so that much is under way when another board has begun
    async with Run(RunConfig.load(file, ["cluster=auto", "workers=2"])) as running:
        while (await running.status()).done < 8:
            await asyncio.sleep(0.05)
        holder_of(file.parent / "records" / ".lock").send_signal(signal.SIGKILL)
        await asyncio.wait_for(running.wait(), 120)
    status = await running.status()
    assert status.done == 48
    assert samples(file) == every(16, 3)


def holder_of(file: Path) -> psutil.Process:
    """The process that has a file open."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(opened.path == str(file) for opened in process.open_files()):
                return process
    raise AssertionError(f"nobody has {file} open")


def test_who_goes_on_waits_for_workers_that_may_still_write(tmp_path: Path) -> None:
    about = {"n": 1}
    claim = Claim(tmp_path, about, lease=10.0)
    assert claim.wait == 0
    with pytest.raises(ConfigError, match="Another run is at work"):
        Claim(tmp_path, about)
    claim.release(is_over=False)
    second = Claim(tmp_path, about)
    assert second.wait == 10, "it was stopped, and its workers may not know"
    second.release(is_over=True)
    assert Claim(tmp_path, about).wait == 0


def test_a_directory_belongs_to_a_run_that_left_something_there(tmp_path: Path) -> None:
    mistyped, meant, other = {"model": "Qwenn"}, {"model": "Qwen"}, {"model": "Llama"}
    Claim(tmp_path, mistyped).release(is_over=True)
    Claim(tmp_path, meant, lease=10.0).release(is_over=False)
    with pytest.raises(ConfigError, match="model='Qwen', and this one has 'Llama'"):
        Claim(tmp_path, other)  # its workers may write yet
    Claim(tmp_path, meant).release(is_over=True)
    (tmp_path / "worker-1").mkdir()
    (tmp_path / "worker-1" / "0.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="model='Qwen', and this one has 'Llama'"):
        Claim(tmp_path, other)
    Claim(tmp_path, meant).release(is_over=True)


OWN_CLUSTER = """
import os, subprocess, sys
import ray  # before us, as a program may
from toolroll.run.run import _connect

JOINING = '''
import sys
import ray
from toolroll.ray_cluster import connect

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


def test_without_a_cluster_auto_begins_one_of_its_own_and_others_join_it(tmp_path: Path) -> None:
    """On a machine where Ray has been used before: it has a token there, and asks for it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    other_machine = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # it sees no cluster of other tests
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # as the names of sockets have to be
        environment = {**kept, "HOME": str(tmp_path), "RAY_TMPDIR": short}
        command = [*other_machine, sys.executable, "-c", OWN_CLUSTER]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
