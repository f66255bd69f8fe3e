"""The `toolroll limiter` command on a real cluster."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tmux_terminal import Terminal
from typer.testing import CliRunner

from toolroll.cli import limiter, output
from toolroll.errors import ConfigError
from toolroll.limiter.ledger.ledger import LimiterStatus

pytestmark = pytest.mark.ray

HOLD_SLOTS = """
import asyncio, ray
from toolroll.limiter.cluster import ClusterLimiter
ray.init(log_to_driver=False, logging_level="error")
async def main():
    limiter = ClusterLimiter("http://sandbox:8080", 4)
    waiting = [asyncio.create_task(limiter.slot(hold=60).acquire()) for _ in range(6)]
    while limiter.in_use < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    while limiter.in_use < 6:
        await asyncio.sleep(0.01)
    print("six", flush=True)
asyncio.run(main())
"""


USE_LIMITER = """
import asyncio, sys, ray
from toolroll.limiter.cluster import ClusterLimiter
ray.init(log_to_driver=False, logging_level="error")
async def main():
    limiter = ClusterLimiter(sys.argv[1], int(sys.argv[2]))
    async with limiter.slot(hold=1):
        print("ready", limiter.limit, flush=True)
        sys.stdin.readline()
    limiter.close()
asyncio.run(main())
"""


@contextmanager
def using(resource: str, limit: int) -> Iterator[int]:
    """Hold a slot in another process. Yield the limit that the process has got from the cluster."""
    command = [sys.executable, "-c", USE_LIMITER, resource, str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready, _, found = process.stdout.readline().partition(" ")
        assert ready == "ready"
        yield int(found)
        process.communicate("end\n", timeout=60)
        assert process.returncode == 0


def toolroll(*words: str) -> "subprocess.CompletedProcess[str]":
    command = Path(sys.executable).with_name("toolroll")
    return subprocess.run(
        [command, "limiter", *words], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"}
    )


def test_status_and_set(cluster: str) -> None:
    user = subprocess.Popen([sys.executable, "-c", HOLD_SLOTS], stdout=subprocess.PIPE, text=True)
    with user:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
        shown = json.loads(toolroll("status", "--json", "--address", cluster).stdout)["http://sandbox:8080"]
        assert (shown["limit"], shown["in_use"], shown["waiting"], shown["holders"]) == (4, 4, 2, 1)
        assert "http://sandbox:8080" in toolroll("status", "--address", cluster).stdout
        wrong = toolroll("set", "http://sandbox:8081", "6", "--address", cluster)
        assert wrong.returncode == 2
        assert "Did you mean 'http://sandbox:8080'?" in wrong.stderr
        changed = toolroll("set", "http://sandbox:8080", "6", "--address", cluster)
        assert changed.stdout == "http://sandbox:8080: 4 → 6\n"
        assert user.stdout.readline() == "six\n"


def test_unreachable_cluster_prints_one_line() -> None:
    done = toolroll("status", "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert "Cannot connect to a Ray cluster at '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr


LONG_NAME = "https://sandbox-fusion.research-cluster.internal.example.com:8443/projects/rollouts/run_code"


def test_status_fits_a_terminal(cluster: str, terminal: Terminal, tmp_path: Path) -> None:
    with using(LONG_NAME, 9_000_000):
        command = str(Path(sys.executable).with_name("toolroll"))
        terminal.run(command, "limiter", "status", "--address", cluster, folder=tmp_path)
        terminal.sees("exit status 0")
    rows = [line for line in terminal.screen.splitlines() if line[:1] in ("┃", "│")]
    assert {len(row) for row in rows} == {80}
    assert "".join(row.split("│")[1].strip() for row in rows[1:]).count(LONG_NAME) == 1
    assert re.search(r"│ +9000000 │ +1 │ +0 │ +1 │ +0 │", terminal.screen)


def test_watch_shows_changes_until_interrupted(cluster: str, terminal: Terminal, tmp_path: Path) -> None:
    with using("watched", 4):
        command = str(Path(sys.executable).with_name("toolroll"))
        terminal.run(command, "limiter", "status", "--watch", "--address", cluster, folder=tmp_path)
        terminal.sees("watched", " 4 │")
        toolroll("set", "watched", "7", "--rpm", "600", "--budget", "usd=2.5", "--address", cluster)
        terminal.sees(" 7 │", "600 requests per minute", "budget: 2.5 of 2.5 usd left")
        terminal.press("C-c")
        terminal.sees("exit status")
    assert "Traceback" not in terminal.scrolled
    assert terminal.screen.count("budget: 2.5 of 2.5 usd left") == 1, "the last table remains"


@pytest.mark.unit
def test_status_explains_limit_rates_and_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    empty: dict[str, Any] = {key: {} for key in ("rates", "credit", "budgets", "spent")}
    zero = LimiterStatus(**{**dict.fromkeys(LimiterStatus._fields, 0), **empty})
    fixed = zero._replace(limit=8, min=8, max=8)
    judge = zero._replace(
        limit=12, min=4, max=64, changed_s=30.2, reason="lowered from 16 to 12: 3 rejected", succeeded=990, rejected=10
    )._replace(rates={"tokens": 2000.0}, credit={"tokens": 0.5}, budgets={"usd": 20.0}, spent={"usd": 7.25})
    output.SafeConsole(width=100).print(limiter._view({"sandbox": fixed, "judge": judge}))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:] == [
        "judge  adapts from 4 to 64; lowered from 16 to 12: 3 rejected (30 s ago)",
        "10 of 1,000 uses rejected",
        "120,000 tokens per minute; 0.5 available now",
        "budget: 12.75 of 20 usd left",
    ]


@pytest.mark.unit
def test_status_with_large_numbers_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    numbers: dict[str, Any] = dict.fromkeys(LimiterStatus._fields, 123_456_789)
    amounts = {name: {"tokens": 123_456_789.0} for name in ("rates", "credit", "budgets", "spent")}
    status = LimiterStatus(**{**numbers, **amounts, "learning": True, "reason": "initial limit"})
    output.SafeConsole(width=80).print(limiter._table({LONG_NAME: status, "short": status}))
    shown = capsys.readouterr().out
    assert {len(line) for line in shown.splitlines()} == {80}
    assert shown.count("123456789") == 10
    assert "…" not in shown


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Simulate a cluster with the resource judge, and one whose limiter is removed. Return the limits that are set."""
    from toolroll.limiter import token_bucket

    empty: dict[str, Any] = {key: {} for key in ("rates", "credit", "budgets", "spent")}
    known = {"judge": LimiterStatus(**{**dict.fromkeys(LimiterStatus._fields, 0), **empty, "min": 4, "max": 64})}

    def status(resource: str, timeout: float) -> LimiterStatus:
        if resource not in known:
            raise ValueError("Failed to look up actor")
        return known[resource]

    changes: dict[str, Any] = {}
    monkeypatch.setattr(limiter, "connect", lambda address: None)
    monkeypatch.setattr(token_bucket, "limited_resources", lambda: ["gone", "judge"])
    monkeypatch.setattr(token_bucket, "limiter_status", status)
    monkeypatch.setattr(token_bucket, "set_limit", lambda resource, limit, **others: changes.update(others))
    return changes


@pytest.mark.unit
def test_status_shows_unreachable_limiters(judge: dict[str, Any]) -> None:
    shown = CliRunner().invoke(limiter.app, ["status"]).stdout
    assert "unreachable" in shown
    assert "judge  adapts from 4 to 64" in shown
    assert json.loads(CliRunner().invoke(limiter.app, ["status", "--json"]).stdout)["gone"] is None
    refused = CliRunner().invoke(limiter.app, ["set", "gone", "5"]).exception
    assert str(refused) == "The limiter of 'gone' is unreachable. Try again later."


@pytest.mark.unit
def test_set_checks_the_minimum_and_renames_calls(judge: dict[str, Any]) -> None:
    refused = CliRunner().invoke(limiter.app, ["set", "judge", "--min", "100"]).exception
    assert isinstance(refused, ConfigError)
    assert not judge
    CliRunner().invoke(limiter.app, ["set", "judge", "--budget", "calls=20"])
    assert judge["budgets"] == {"requests": 20.0}


def test_remove(cluster: str) -> None:
    name = "http://removed:8080"
    with using(name, 4) as limit:
        assert limit == 4
        refused = toolroll("remove", name, "--address", cluster)
        assert refused.returncode == 1
        assert f"'{name}': processes that use it: 1, slots in use: 1, waiting: 0. Stop the" in refused.stderr
        assert toolroll("set", name, "5", "--address", cluster).stdout == f"{name}: 4 → 5\n"
    unknown = toolroll("remove", "nothing", "--address", cluster)
    assert unknown.returncode == 2
    assert "Unknown resource 'nothing'. Available resources: http" in unknown.stderr
    assert name in unknown.stderr
    with using(name, 4) as limit:
        assert limit == 5, "the limit of the cluster is kept while its limiter exists"
    removed = toolroll("remove", name, "--address", cluster)
    assert (removed.returncode, removed.stdout) == (0, f"{name}: removed\n"), removed.stderr
    assert name not in json.loads(toolroll("status", "--json", "--address", cluster).stdout)
    with using(name, 3) as limit:
        assert limit == 3, "nothing of the removed limiter is left"


def test_remove_waits_for_work_of_dead_processes(cluster: str) -> None:
    name = "http://killed:8080"
    command = [sys.executable, "-c", USE_LIMITER.replace("hold=1", "hold=15"), name, "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready 2\n"
        process.kill()
    deadline = time.monotonic() + 60
    refusals = set()
    while (done := toolroll("remove", name, "--address", cluster)).returncode:
        refusals.add(done.stderr.replace("\n", " "))
        assert time.monotonic() < deadline, refusals
    reason = re.compile(r"work of dead processes may still run, slots in quarantine: [12]\. Try again later\.")
    assert any(map(reason.search, refusals)), refusals
