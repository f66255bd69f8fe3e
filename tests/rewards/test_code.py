"""Scores are computed from any thread, event loop or process, for one answer or a batch."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from sandbox.fault_server import FaultServer, after, answer

from toolroll.errors import ConfigError
from toolroll.rewards import code
from toolroll.rewards.code import compute_score, compute_score_async, compute_scores, compute_scores_async

pytestmark = pytest.mark.sandbox

ADD = "Sure!\n```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["3 4\n", "1 1\n"], "outputs": ["7\n", "2\n"]}
HALF = "print(7)"


@pytest.fixture(autouse=True)
def url(sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    return sandbox_url


def test_signature_is_that_of_verl() -> None:
    called = partial(compute_score, sandbox_fusion_url=f"{os.environ['SANDBOX_FUSION_URL']}/run_code")
    row = {"data_source": "codecontests", "solution_str": ADD, "ground_truth": json.dumps(SUMS)}
    assert called(**row, extra_info={"index": 1}) == 1.0
    assert called("taco", ADD, SUMS, None) == 1.0
    assert called(**row, extra_info=None, reward_router_address="x", reward_model_tokenizer=object()) == 1.0
    assert compute_score("", HALF, SUMS) == 0.0
    assert compute_score("", HALF, SUMS, continuous=True) == 0.5


async def test_async_signature_is_that_of_verl() -> None:
    scored = await compute_score_async(data_source="", solution_str=ADD, ground_truth=SUMS, extra_info={})
    assert scored == 1.0
    assert asyncio.iscoroutinefunction(compute_score_async), "verl checks this to decide whether to await"


def test_batch_signature_is_that_of_verl() -> None:
    scores = compute_scores(
        data_sources=np.array(["a", "b", "c"], dtype=object),
        solution_strs=[ADD, HALF, "nonsense"],
        ground_truths=[SUMS, json.dumps(SUMS), {"inputs": np.array(["1"]), "outputs": np.array(["1"])}],
        extra_infos=np.array([{}, {}, {}], dtype=object),
        continuous=True,
    )
    assert scores == [1.0, 0.5, 0.0]


async def test_batch_is_scored_in_order() -> None:
    assert await compute_scores_async([""] * 2, [ADD, HALF], [SUMS, SUMS]) == [1.0, 0.0]
    assert await compute_scores_async([], [], []) == []


async def test_blocking_call_in_thread_with_running_loop() -> None:
    assert compute_score("", ADD, SUMS) == 1.0


def test_many_threads_share_one_loop_thread() -> None:
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda number: compute_score("", f"print({number})", _expects(number % 2)), range(64)))
    assert scores == [float(number in (0, 1)) for number in range(64)]
    assert sum(thread.name == "toolroll-rewards" for thread in threading.enumerate()) == 1


def _expects(number: int) -> dict[str, list[str]]:
    return {"inputs": [""], "outputs": [str(number)]}


def test_async_call_in_consecutive_event_loops() -> None:
    assert [asyncio.run(compute_score_async("", ADD, SUMS)) for _ in range(3)] == [1.0] * 3


FORKS = """
import functools, multiprocessing, threading, time
from concurrent.futures import ProcessPoolExecutor
from toolroll.rewards import code
add, half, sums = {ADD!r}, {HALF!r}, {SUMS!r}
compute_score = functools.partial(code.compute_score, rate_limit=1)
scores = [compute_score("", add, sums)]
busy = threading.Thread(target=compute_score, args=("", "import time; time.sleep(2)", sums))
busy.start()
time.sleep(0.5)
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    jobs = [pool.submit(compute_score, "", answer, sums, None) for answer in [add, half] * 4]
    scores += [compute_score("", add, sums)] + [job.result(60) for job in jobs]
print(scores + [compute_score("", add, sums)])
"""


def test_scoring_works_after_a_fork() -> None:
    """In children and in the parent, during and after the fork, even if all slots were in use during the fork."""
    script = FORKS.format(ADD=ADD, HALF=HALF, SUMS=SUMS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{[1.0, 1.0, *[1.0, 0.0] * 4, 1.0]}\n", done.stderr


def test_process_exits_cleanly_after_scoring() -> None:
    script = f"from toolroll.rewards.code import compute_score\nprint(compute_score('', {ADD!r}, {SUMS!r}))"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("1.0\n", "", 0)


def test_equal_settings_share_a_grader(url: str) -> None:
    made = code._get_grader({"rate_limit": 3})
    assert code._get_grader({"sandbox_fusion_url": url, "rate_limit": 3}) is made
    assert code._get_grader({"sandbox_fusion_url": OmegaConf.create([url]), "rate_limit": 3}) is made
    assert code._get_grader({"rate_limit": 4}) is not made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate_limt": 3}, "unknown key 'rate_limt' (did you mean 'rate_limit'?)"),
        ({"timeout": "soon"}, "timeout: Input should be a valid number"),
        ({"language": "pyton"}, "Unknown language 'pyton'. Did you mean 'python'?"),
        ({"sandbox_fusion_url": "10.0.0.1"}, "Invalid sandbox URL: '10.0.0.1'"),
    ],
)
def test_invalid_setting_is_a_config_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compute_score("", ADD, SUMS, **settings)
    assert message in str(error.value)


def test_missing_sandbox_url_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_FUSION_URL")
    with pytest.raises(ConfigError, match="SANDBOX_FUSION_URL"):
        compute_score("", ADD, SUMS)


def test_invalid_data_is_a_value_error_with_position() -> None:
    with pytest.raises(ValueError, match=r"ground_truths\[1\]: ground_truth is not valid JSON"):
        compute_scores(["", ""], [ADD, ADD], [SUMS, "{"])
    with pytest.raises(ValueError, match="got 2 and 1"):
        compute_scores(["", ""], [ADD, ADD], [SUMS])


async def test_infra_fault_gives_none() -> None:
    sandbox_error = {"status": "SandboxError", "message": "no cgroup left"}
    async with FaultServer([answer(body=sandbox_error)]) as server:
        assert await compute_score_async("", ADD, SUMS, sandbox_fusion_url=server.url) is None
        batch = await compute_scores_async(["", ""], [ADD, HALF], [SUMS, SUMS], sandbox_fusion_url=server.url)
        assert batch == [None, None]


PROCESS = """
import json, sys, ray
from toolroll.rewards.code import compute_scores
ray.init(log_to_driver=False, logging_level="warning")
scores = compute_scores([""] * 20, ["print(2)"] * 20, [{"inputs": [""] * 4, "outputs": ["2"] * 4}] * 20,
                        sandbox_fusion_url=sys.argv[1], rate_limit=8)
print(json.dumps(scores))
"""


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
async def test_processes_of_a_cluster_share_one_limit() -> None:
    """Regression: with a semaphore per process, the actual limit was a multiple of the setting."""
    async with FaultServer([after(0.05, answer())]) as server:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", PROCESS, server.url, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(3)
        ]
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        printed = [[line for line in out.splitlines() if line.startswith(b"[")] for out, _ in outputs]  # Ray prints too
        assert [json.loads(lines[-1]) for lines in printed] == [[1.0] * 20] * 3
        programs = [request for request in server.requests if request and "code" in request]
        assert len(programs) == 3 * 80
        assert server.max_in_flight == 8
