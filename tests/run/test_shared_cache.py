"""Tests of a cache that several processes share, on one machine and on a Ray cluster."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rollout import small_tokenizer

from run.upstream import URL_VARIABLE, Upstream, serve
from toolroll.records.reader import read_records
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
from toolroll.tools.cache.backend import ACTOR_PREFIX, ClusterStore
from toolroll.tools.cache.store import NO_OWNER, ResultStore

HERE = Path(__file__).parent
PROMPTS, SAMPLES = 100, 8


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with serve() as running:
        yield running


def start_client(upstream: Upstream, file: Path, **variables: str) -> "subprocess.Popen[str]":
    env = {**os.environ, **variables, URL_VARIABLE: upstream.url, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, HERE / "cache_client.py", file, "cat"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_processes_share_one_call(upstream: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "results.sqlite"
    with closing(ResultStore(str(file))):  # SQLite locks the file while the last process that uses it closes it
        clients = [start_client(upstream, file) for _ in range(3)]
        outputs = [client.communicate(timeout=60)[0] for client in clients]
    assert sorted(output.split()[-1] for output in outputs) == ["cached", "cached", "called"]
    assert upstream.words == {"cat": 1}


@pytest.mark.process
def test_slow_disk_does_not_disable_the_cache(upstream: Upstream, tmp_path: Path) -> None:
    disk = tmp_path / "slow_disk.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", disk, HERE / "slow_disk.c"], check=True)
    variables = {"LD_PRELOAD": str(disk), "SYNC_MS": "1500"}
    file = tmp_path / "results.sqlite"
    upstream.is_open.clear()
    clients = [start_client(upstream, file, **variables) for _ in range(3)]
    assert upstream.arrived.wait(60)
    with closing(ResultStore(str(file))):  # SQLite locks the file while the last process that uses it closes it
        upstream.is_open.set()
        outputs = [client.communicate(timeout=60)[0] for client in clients]
    assert sorted(output.split()[-1] for output in outputs) == ["cached", "cached", "called"]
    assert upstream.words == {"cat": 1}


@pytest.mark.process
def test_killed_caller_is_replaced(upstream: Upstream, tmp_path: Path) -> None:
    upstream.is_open.clear()
    first = start_client(upstream, tmp_path / "results.sqlite")
    assert upstream.arrived.wait(60)
    second = start_client(upstream, tmp_path / "results.sqlite")
    first.kill()
    first.communicate()
    upstream.is_open.set()
    assert second.communicate(timeout=60)[0] == "The meaning of cat. called\n"
    assert upstream.words == {"cat": 2}


@pytest.fixture(scope="module")
def second_node(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Add a node to the cluster, and yield the name of its resource."""
    import ray
    from ray._raylet import GcsClient

    options = ["--num-cpus=2", '--resources={"second": 10}', "--object-store-memory=80000000", "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster}", *options]
    log = (tmp_path_factory.mktemp("node") / "log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log, env=os.environ) as node:
        ends = time.monotonic() + 90
        while "second" not in ray.cluster_resources():
            assert time.monotonic() < ends, Path(log.name).read_text()
            assert node.poll() is None, Path(log.name).read_text()
            time.sleep(0.1)
        yield "second"
        [node_id] = [one["NodeID"] for one in ray.nodes() if "second" in one["Resources"]]
        GcsClient(address=cluster).drain_nodes([bytes.fromhex(node_id)])
        while "second" in ray.cluster_resources():  # later tests count the nodes
            time.sleep(0.1)
        node.terminate()
        node.wait(60)


@pytest.mark.ray
async def test_samples_on_two_nodes_share_upstream_calls(second_node: str, upstream: Upstream, tmp_path: Path) -> None:
    tokenizer = small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    )
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": f"What is word{number} ?"}) for number in range(PROMPTS)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "engine": {
            "kind": "run.question_engine.QuestionEngine",
            "options": {"tokenizer": str(tmp_path / "model"), "environment": {URL_VARIABLE: upstream.url}},
        },
        "model": str(tmp_path / "model"),
        "tool_prompt": "hermes",
        "tools": "tools.yaml",
        "data": {"path": "data.jsonl"},
        "n": SAMPLES,
        "rollout_data_dir": "records",
        "cluster": "auto",
        "workers": 2,
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": "run.upstream.look_up"}]}))
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    upstream.is_open.clear()  # until both workers have registered, so that one cannot finish before the other starts
    async with Run(RunConfig.load(tmp_path / "run.yaml")) as run:
        async with asyncio.timeout(90):
            while (await run.status()).workers < 2:
                await asyncio.sleep(0.1)
        upstream.is_open.set()
        await asyncio.wait_for(run.wait(), 180)
    records = list(read_records(tmp_path / "records"))
    calls = [call for record in records for call in record.calls]
    assert len(records) == len(calls) == PROMPTS * SAMPLES
    assert len({Path(path).parent for path in (tmp_path / "records").glob("*/*.jsonl")}) == 2, "both workers took part"
    assert all(call["fault"] is None and "The meaning of word" in call["answer"] for call in calls)
    assert set(upstream.words.values()) == {1}
    assert len(upstream.words) == PROMPTS
    hits = [call["metrics"]["cache"]["origin"] for call in calls if "cache" in call["metrics"]]
    assert len(hits) == PROMPTS * (SAMPLES - 1)
    assert set(hits) <= {record.request_id for record in records}


@pytest.mark.ray
async def test_idle_actor_exits_and_is_replaced(cluster: str, tmp_path: Path) -> None:
    import ray

    path = str(tmp_path / "results.sqlite")
    store = ClusterStore(path, idle_timeout_s=0.4)
    await store.call("land", "key", NO_OWNER, b"value", "r1", 1000)
    for pause in (0.2, 0.4, 1.0):  # before, while and after it exits
        await asyncio.sleep(pause)
        [value, *_], *_ = await store.call("claim", "key", "one", None, 0.0)
        assert value == b"value"
    ends = time.monotonic() + 60
    while ACTOR_PREFIX + path in {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}:
        assert time.monotonic() < ends
        await asyncio.sleep(0.1)
    local = ResultStore(path)
    assert local.claim("key", "one", time.time()).result is not None, "the file is not locked"
    local.close()


@pytest.mark.ray
def test_killed_worker_on_a_cluster_is_replaced(second_node: str, upstream: Upstream) -> None:
    import ray

    class Client:
        def __init__(self, url: str) -> None:
            os.environ[URL_VARIABLE] = url

        def ask(self, word: str) -> str:
            from run.cache_client import ask

            return asyncio.run(ask(word))

    upstream.is_open.clear()
    actor_class = ray.remote(Client)
    holder = actor_class.remote(upstream.url)
    waiter = actor_class.options(resources={second_node: 1}).remote(upstream.url)
    lost = holder.ask.remote("dog")
    assert upstream.arrived.wait(60)
    answer = waiter.ask.remote("dog")
    os.kill(upstream.pids[0], 9)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=60)
    upstream.is_open.set()
    assert ray.get(answer, timeout=60) == "The meaning of dog. called"
    assert upstream.words == Counter(dog=2)
