"""Scores as a trainer asks for them: from any thread, any event loop, any process, for one answer or a batch."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
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

ADD = "Sure!\n```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["3 4\n", "1 1\n"], "outputs": ["7\n", "2\n"]}
HALF = "print(7)"


@pytest.fixture(autouse=True)
def url(sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    return sandbox_url


def test_as_verl_calls_it() -> None:
    called = partial(compute_score, sandbox_fusion_url=f"{os.environ['SANDBOX_FUSION_URL']}/run_code")
    row = {"data_source": "codecontests", "solution_str": ADD, "ground_truth": json.dumps(SUMS)}
    assert called(**row, extra_info={"index": 1}) == 1.0
    assert called("taco", ADD, SUMS, None) == 1.0
    assert called(**row, extra_info=None, reward_router_address="x", reward_model_tokenizer=object()) == 1.0
    assert compute_score("", HALF, SUMS) == 0.0
    assert compute_score("", HALF, SUMS, continuous=True) == 0.5


async def test_as_verl_awaits_it() -> None:
    scored = await compute_score_async(data_source="", solution_str=ADD, ground_truth=SUMS, extra_info={})
    assert scored == 1.0
    assert asyncio.iscoroutinefunction(compute_score_async), "verl looks at it to know whether to await"


def test_as_verls_batch_manager_calls_it() -> None:
    scores = compute_scores(
        data_sources=np.array(["a", "b", "c"], dtype=object),
        solution_strs=[ADD, HALF, "nonsense"],
        ground_truths=[SUMS, json.dumps(SUMS), {"inputs": np.array(["1"]), "outputs": np.array(["1"])}],
        extra_infos=np.array([{}, {}, {}], dtype=object),
        continuous=True,
    )
    assert scores == [1.0, 0.5, 0.0]


async def test_a_batch_awaited() -> None:
    assert await compute_scores_async([""] * 2, [ADD, HALF], [SUMS, SUMS]) == [1.0, 0.0]
    assert await compute_scores_async([], [], []) == []


async def test_from_a_thread_whose_event_loop_runs() -> None:
    assert compute_score("", ADD, SUMS) == 1.0


def test_from_many_threads_at_once() -> None:
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda number: compute_score("", f"print({number})", _expects(number % 2)), range(64)))
    assert scores == [float(number in (0, 1)) for number in range(64)]
    assert sum(thread.name == "toolroll-rewards" for thread in threading.enumerate()) == 1


def _expects(number: int) -> dict[str, list[str]]:
    return {"inputs": [""], "outputs": [str(number)]}


def test_in_new_event_loops_one_after_another() -> None:
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


def test_after_a_fork() -> None:
    """In the forked processes, and in their parent, meanwhile and afterwards, though all slots were in use then."""
    script = FORKS.format(ADD=ADD, HALF=HALF, SUMS=SUMS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{[1.0, 1.0, *[1.0, 0.0] * 4, 1.0]}\n", done.stderr


def test_a_process_ends_in_peace_after_scoring() -> None:
    script = f"from toolroll.rewards.code import compute_score\nprint(compute_score('', {ADD!r}, {SUMS!r}))"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("1.0\n", "", 0)


def test_graders_are_made_once_for_equal_settings(url: str) -> None:
    made = code._grader({"rate_limit": 3})
    assert code._grader({"sandbox_fusion_url": url, "rate_limit": 3}) is made
    assert code._grader({"sandbox_fusion_url": OmegaConf.create([url]), "rate_limit": 3}) is made
    assert code._grader({"rate_limit": 4}) is not made


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate_limt": 3}, "there is no key 'rate_limt' (did you mean 'rate_limit'?)"),
        ({"timeout": "soon"}, "timeout: Input should be a valid number"),
        ({"language": "pyton"}, "'pyton' (did you mean 'python'?)"),
        ({"sandbox_fusion_url": "10.0.0.1"}, "is no sandbox's URL"),
    ],
)
def test_a_wrong_setting_is_an_error_for_a_person(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compute_score("", ADD, SUMS, **settings)
    assert said in str(error.value)


def test_without_a_sandbox_it_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_FUSION_URL")
    with pytest.raises(ConfigError, match="SANDBOX_FUSION_URL"):
        compute_score("", ADD, SUMS)


def test_wrong_data_is_an_error_that_says_where() -> None:
    with pytest.raises(ValueError, match=r"ground_truths\[1\]: ground_truth isn't JSON"):
        compute_scores(["", ""], [ADD, ADD], [SUMS, "{"])
    with pytest.raises(ValueError, match="2 solution_strs, but 1 ground_truths"):
        compute_scores(["", ""], [ADD, ADD], [SUMS])


def test_an_interrupted_caller_takes_its_work_back() -> None:
    """What SIGINT does to a main thread that waits."""
    background = code._Background()
    stopped = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        background.run(work())
    assert stopped.wait(5)
    background.end()


async def test_faults_of_the_infrastructure_are_none_and_never_zero() -> None:
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


@pytest.mark.usefixtures("cluster")
async def test_processes_of_a_cluster_share_one_limit() -> None:
    """Each process had a semaphore of its own, so the real limit was a multiple of the set one."""
    async with FaultServer([after(0.05, answer())]) as server:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", PROCESS, server.url, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(3)
        ]
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        said = [[line for line in out.splitlines() if line.startswith(b"[")] for out, _ in outputs]  # Ray speaks, too
        assert [json.loads(lines[-1]) for lines in said] == [[1.0] * 20] * 3
        assert len(server.requests) == 3 * 80
        assert server.most == 8
