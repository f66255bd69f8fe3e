"""The example with an LLM judge: the commands of its README, and how its reward function handles a rejection."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from record_samples import trajectory

from toolroll import InfraFault, Message, ResourceLimits, get_limiter, limited
from toolroll._internal.dotted_path import import_dotted_path

BIN = Path(sys.executable).parent
DEFAULT_URL = "http://127.0.0.1:8400"

pytestmark = pytest.mark.process


@pytest.fixture
def example(root: Path, tmp_path: Path) -> Path:
    """Return a copy of the example."""
    ignored = shutil.ignore_patterns("rollouts", "__pycache__")
    return Path(shutil.copytree(root / "examples/judge", tmp_path / "judge", ignore=ignored))


@contextmanager
def judge_server(example: Path, *options: str) -> Iterator[str]:
    """Start the stand-in server on a free port, and yield its URL."""
    command = [sys.executable, "judge_server.py", "--port", "0", *options]
    with subprocess.Popen(command, cwd=example, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def stats(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/stats", timeout=10) as response:
        answer: dict[str, int] = json.load(response)
        return answer


def readme_commands(example: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (example / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def test_commands_of_the_readme(example: Path) -> None:
    setup, copy, start, first, resume, show = readme_commands(example)
    assert (setup, copy) == ("pip install toolroll", "toolroll examples copy judge && cd judge")
    assert start == "python judge_server.py"
    with judge_server(example) as url:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "ENGINE_URL": url, "JUDGE_URL": url, "COLUMNS": "120"}

        def run(command: str) -> "subprocess.CompletedProcess[str]":
            arguments = ["bash", "-c", command]
            return subprocess.run(arguments, cwd=example, env=environment, capture_output=True, text=True, timeout=120)

        stopped = run(first)
        assert stopped.returncode == 3, stopped.stdout + stopped.stderr
        assert re.search(r"^The usd budget of 'judge' is spent\. Spent: 0\.0\d+ usd of 'judge'\.", stopped.stdout, re.M)
        done = int(re.findall(r"Stopped with (\d+) of 48 done", stopped.stdout)[0])
        assert 20 <= done < 48
        assert stats(url)["accepted"] == done, "each recorded sample was judged once, and no other"
        spent = json.loads((example / "rollouts/budgets.json").read_text())["judge"]["usd"]
        assert spent == pytest.approx(stats(url)["tokens"] * 10 / 1e6), "the true cost was charged"
        assert spent <= 0.03

        resumed = run(resume)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert f"{done} of them resumed" in resumed.stdout
        assert len((example / "rollouts/0.jsonl").read_text().splitlines()) == 48

        found = json.loads(run(show.replace(DEFAULT_URL, url)).stdout)
        assert (found["accepted"], found["rejected"]) == (48, 0)
        spent = json.loads((example / "rollouts/budgets.json").read_text())["judge"]["usd"]
        assert spent == pytest.approx(found["tokens"] * 10 / 1e6)


def test_readme_shows_the_limits_of_the_config(example: Path) -> None:
    [shown] = re.findall(r"^```yaml\n(.*?)^```$", (example / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    config = yaml.safe_load((example / "run.yaml").read_text())
    assert yaml.safe_load(shown)["limits"] == config["rewards"]["functions"]["judge"]["limits"]


async def test_rejection_reaches_the_limiter(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(example))
    monkeypatch.delitem(sys.modules, "judge", raising=False)
    limits = ResourceLimits(resource=f"judge of {example}", limit={"min": 1, "max": 8}, budget={"usd": 1})
    score: Any = limited(limits)(import_dotted_path("judge.score", setting="path"))
    messages = [Message(role="user", content="Why?"), Message(role="assistant", content="Light is faster.")]
    answered = trajectory(messages=messages, extra={"ground_truth": "Light is faster than sound."})
    with judge_server(example, "--rpm", "6") as url:
        settings = {"url": url, "model": "judge", "usd_per_million_tokens": 10}
        assert await score(answered, **settings) == 0.6
        limiter: Any = get_limiter(str(limits.resource), limits)
        with pytest.raises(InfraFault, match=r"ClientResponseError: 429"):
            await score(answered, **settings)
        with pytest.raises(InfraFault, match=r"ClientResponseError: 429"):
            await score(answered, **settings)  # waits until the ledger knows of the first rejection
        assert limiter.status().rejected >= 1
        assert stats(url) == {"accepted": 1, "rejected": 2, "tokens": stats(url)["tokens"], "max_concurrent": 1}
        assert limiter.spent["usd"] == pytest.approx(stats(url)["tokens"] * 10 / 1e6), "429 costs nothing"
    limiter.close()
