"""A run stops when a budget is spent, and a resumed run counts what was spent before."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray
from free_port import free_port
from ray.exceptions import GetTimeoutError
from typer.testing import CliRunner

from run.test_run import configure, every, model, path, run, samples  # noqa: F401 (fixtures)
from toolroll import ConfigError, ResourceLimits
from toolroll.cli.app import app
from toolroll.cli.output import SafeConsole
from toolroll.cli.run import print_result
from toolroll.limiter.budget_file import BUDGETS_FILE, BudgetFile
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.ledger.ledger import LimiterStatus
from toolroll.limiter.limiter import Limiter
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.token_bucket import set_limit
from toolroll.run.budgets import budget_limits
from toolroll.run.config import RunConfig
from toolroll.run.status import RunSnapshot


@pytest.fixture
def judged(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Return a function that writes a run whose judge has a budget of calls."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"judge_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text("async def score(trajectory):\n    return 1.0\n")

    def write(budget: int, resource: str, **more: Any) -> Path:
        limits = {"resource": resource, "limit": 4, "budget": {"calls": budget}}
        functions = {"judge": {"path": f"{module}.score", "limits": limits}}
        file: Path = configure(max_in_flight=8, rewards={"functions": functions}, **more)
        return file

    return write


async def test_run_stops_when_a_budget_is_spent(judged: Any) -> None:
    resource = f"judge-{uuid4().hex}"
    status = await run(judged(25, resource))
    file = judged(25, resource)
    assert status.exhausted == f"The requests budget of '{resource}' is spent."
    assert status.done == 25
    assert 1 <= status.refused <= 8, "running trajectories end, and no others are started"
    assert status.aggregates["outcomes"] == {"ok": 25}
    assert samples(file).total() == 25, "refused samples are not recorded"
    assert status.failure is None


async def test_resumed_run_counts_what_was_spent(judged: Any) -> None:
    first, second = (f"judge-{uuid4().hex}" for _ in range(2))
    file = judged(25, first)
    await run(file)
    budgets = file.parent / "records" / BUDGETS_FILE
    assert json.loads(budgets.read_text())[first] == {"requests": 25.0}
    budgets.write_text(json.dumps({second: {"requests": 25.0}}))  # another name, as this process knows the first
    status = await run(judged(40, second))
    assert (status.resumed, status.done) == (25, 40)
    assert status.exhausted is not None
    budgets.unlink()
    status = await run(judged(100, f"judge-{uuid4().hex}"))
    assert (status.done, status.exhausted) == (60, None)
    assert samples(file) == every(20, 3)


def test_command_exits_with_status_3(judged: Any) -> None:
    file = judged(25, f"judge-{uuid4().hex}")
    result = CliRunner().invoke(app, ["run", str(file)])
    assert result.exit_code == 3, result.output
    assert "budget of" in result.output
    assert "Stopped with 25 of 60 done. To resume, raise the budget in the config" in result.output


def test_amounts_never_decrease(tmp_path: Path) -> None:
    (tmp_path / BUDGETS_FILE).write_text('{"a": {"usd": 5.0}, "other": {"usd": 1.0}}')
    file = BudgetFile(tmp_path)
    resource = f"a-{uuid4().hex}"
    file.restore({resource: ResourceLimits(resource=resource, budget={"usd": 9})})
    file.save()
    assert json.loads((tmp_path / BUDGETS_FILE).read_text())["a"] == {"usd": 5.0}
    assert get_limiter(resource, ResourceLimits(budget={"usd": 9})).resource == resource


async def test_file_is_ahead_of_what_is_spent(tmp_path: Path) -> None:
    """A process that is killed at any moment has spent at most the amount in the file."""
    resource, total = f"a-{uuid4().hex}", 400.0
    limits = ResourceLimits(resource=resource, limit=8, budget={"usd": total})
    (tmp_path / BUDGETS_FILE).write_text(json.dumps({resource: {"usd": 100.0}}))
    files = [BudgetFile(tmp_path), BudgetFile(tmp_path / "other")]  # of two runs in this process
    (tmp_path / "other").mkdir()
    await asyncio.to_thread(files[0].restore, {resource: limits})
    await asyncio.to_thread(files[1].restore, {resource: limits})
    limiter, spent = get_limiter(resource, limits), 100.0
    ahead: list[float] = []

    def saved(directory: Path = tmp_path) -> float:
        amounts = json.loads((directory / BUDGETS_FILE).read_text())
        return float(amounts[resource]["usd"])

    async def use() -> None:
        nonlocal spent
        async with limiter.acquire({"usd": 0.5}):
            spent += 0.5
            ahead.extend(saved(directory) - spent for directory in (tmp_path, tmp_path / "other"))
            await asyncio.sleep(0.001)

    await asyncio.gather(*(use() for _ in range(300)))
    assert min(ahead) >= 0
    assert max(ahead) <= 0.02 * total
    files[0].close()
    assert saved() == spent == 250, "nothing is reserved any more"
    await asyncio.gather(*(use_closed(limiter) for _ in range(100)))
    assert saved() == 250, "work after the run is not that of the run"
    files[1].close()
    assert saved(tmp_path / "other") == 300


def test_late_save_does_not_change_a_closed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that saves continues after its task was cancelled."""
    resource = f"a-{uuid4().hex}"
    limits = ResourceLimits(resource=resource, budget={"usd": 9})
    file, fetched, may_save = BudgetFile(tmp_path), threading.Event(), threading.Event()
    file.restore({resource: limits})

    def fetch() -> Any:
        spent = BudgetFile.spent(file)
        if not fetched.is_set():
            fetched.set()
            may_save.wait()
        return spent

    with get_limiter(resource, limits).acquire({"usd": 1}):
        pass
    monkeypatch.setattr(file, "spent", fetch)
    saving = threading.Thread(target=file.save)
    saving.start()
    fetched.wait()
    with get_limiter(resource, limits).acquire({"usd": 2}):
        pass
    file.close()
    may_save.set()
    saving.join()
    assert json.loads((tmp_path / BUDGETS_FILE).read_text()) == {resource: {"usd": 3.0}}


def test_unreachable_cluster_does_not_lower_the_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    status = LimiterStatus(*range(len(LimiterStatus._fields)))._replace(spent={"usd": 5.0})
    worker = SimpleNamespace(status=SimpleNamespace(remote=lambda: status))
    monkeypatch.setattr(ClusterLimiter, "_is_connected", lambda _: False)
    monkeypatch.setattr(ClusterLimiter, "_worker", lambda _: worker)
    monkeypatch.setattr(ray, "get", lambda status, timeout: status)
    limiter = ClusterLimiter("judge", ResourceLimits(budget={"usd": 9}).policy())
    assert limiter.fetch_spent() == {"usd": 5.0}

    def fail(status: object, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr(ray, "get", fail)
    assert limiter.fetch_spent() == {"usd": 5.0}
    limiter.close()


async def test_workers_stop_before_the_budgets_are_saved(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def stop_workers(_: object) -> None:
        calls.append("stop workers")

    def close(file: BudgetFile) -> None:
        calls.append("close budgets")
        original(file)

    original = BudgetFile.close
    monkeypatch.setattr("toolroll.run.run._LocalBackend.stop_workers", stop_workers)
    monkeypatch.setattr(BudgetFile, "close", close)
    await run(judged(25, f"judge-{uuid4().hex}"))
    assert calls == ["stop workers", "close budgets"]


def test_budget_of_a_function_that_cannot_be_imported(judged: Any, tmp_path: Path) -> None:
    resource = f"judge-{uuid4().hex}"
    file = judged(25, resource)
    config = RunConfig.load(file)
    for module in tmp_path.glob("judge_*.py"):
        module.rename(module.with_suffix(".txt"))
    assert budget_limits(config)[resource].budget == {"requests": 25}


@pytest.mark.parametrize(
    ("has_cluster", "remedy"), [(True, "raise the budget with `toolroll limiter set`"), (False, "in the config")]
)
def test_remedy_depends_on_where_the_limits_are(
    judged: Any, has_cluster: bool, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load(judged(25, "judge", cluster="auto"))
    counts: Any = dict.fromkeys(("done", "running", "queued", "total", "tokens", "calls", "workers", "seconds"), 0)
    status = RunSnapshot(**counts, exhausted="The budget is spent.", aggregates={"trajectories": 0})
    print_result(config, status, SafeConsole(), complete=False, as_json=False, has_cluster=has_cluster)
    assert remedy in capsys.readouterr().out


async def use_closed(limiter: Limiter) -> None:
    async with limiter.acquire({"usd": 0.5}):
        pass


@pytest.mark.process
def test_killed_run_never_exceeds_the_budget(configure: Any, tmp_path: Path, root: Path) -> None:  # noqa: F811
    budget, kills, port = 150, (60,), free_port()
    url = f"http://127.0.0.1:{port}"
    (tmp_path / "paid.py").write_text(
        f"import urllib.request\n\ndef score(trajectory):\n    urllib.request.urlopen('{url}/use')\n    return 1.0\n"
    )
    limits = {"resource": "judge", "limit": 8, "budget": {"calls": budget}}
    functions = {"judge": {"path": "paid.score", "limits": limits}}
    file = configure(rows=100, max_in_flight=16, rewards={"functions": functions})
    command = [sys.executable, "-m", "toolroll.cli", "run", str(file)]
    environment = {**os.environ, "PYTHONPATH": path()}

    def get(request: str) -> Any:
        with urllib.request.urlopen(url + request, timeout=10) as response:
            return json.load(response)

    service = [sys.executable, str(root / "tests/limiter/service.py"), "127.0.0.1", str(port)]
    with subprocess.Popen(service, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
            for wanted in kills:
                with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
                    while process.poll() is None and len(get("/stats")) < wanted:
                        time.sleep(0.02)
                    process.kill()
                assert process.returncode == -signal.SIGKILL
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            requests = len(get("/stats"))
        finally:
            server.kill()
    assert done.returncode == 3, done.stdout + done.stderr
    assert requests <= budget
    lost = 8 + 0.02 * budget  # by each kill: requests that were not sent yet, and reserved ones
    assert requests >= budget - lost * len(kills)
    assert json.loads((tmp_path / "records" / BUDGETS_FILE).read_text())["judge"]["requests"] <= budget


@pytest.mark.parametrize("content", ["", "[]", '{"a": 5}', '{"a": {"usd": "x"}}'])
def test_damaged_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / BUDGETS_FILE).write_text(content)
    with pytest.raises(ConfigError, match="Correct the file, or delete it"):
        BudgetFile(tmp_path)


def test_limits_of_an_engine_in_this_process_are_refused(configure: Any) -> None:  # noqa: F811
    file = configure(engine={"kind": "transformers", "limits": {"limit": 3}})
    with pytest.raises(ConfigError, match="limits apply to servers only"):
        RunConfig.load(file)


@pytest.mark.ray
async def test_budget_holds_for_all_workers_of_a_cluster(judged: Any, cluster: str) -> None:
    resource = f"judge-{uuid4().hex}"
    status = await run(judged(25, resource, cluster="auto", workers=2))
    file = judged(25, resource, cluster="auto", workers=2)
    assert status.exhausted == f"The requests budget of '{resource}' is spent."
    assert samples(file).total() == status.done <= 25
    assert status.done >= 23, "workers that stopped with unspent credit have returned it"
    assert status.spent == {resource: {"requests": pytest.approx(25, abs=1)}}
    set_limit(resource, budgets={"requests": 100})
    completed = await run(judged(60, resource, cluster="auto", workers=2))
    assert (completed.done, completed.exhausted) == (60, None)
    assert samples(file) == every(20, 3)
