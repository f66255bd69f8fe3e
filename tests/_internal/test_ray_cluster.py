"""Connecting to a Ray cluster that requires a token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

HEAD = """
import sys
from toolroll._internal.ray_cluster import start_local
print(start_local(num_cpus=1, object_store_memory=80_000_000).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
ENGINE = """
class Silent:
    def __init__(self, urls):
        pass
    async def chat(self, *arguments, **options):
        raise NotImplementedError
    async def close(self):
        pass
"""
TOKEN = "the-token-of-the-cluster-0123456789"
REMEDY = (
    "Set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it. "
    "`ray get-auth-token` prints the token on the head node.\n"
)


def environment(home: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    return {**inherited, "HOME": str(home), **variables}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a Ray cluster with a token and yield its address."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_memory_monitor_refresh_ms": "0"}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(tmp_path_factory.mktemp("home"), **variables),
    )
    with head:
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.communicate(timeout=60)


def toolroll(*words: str, home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("toolroll")), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=home, env=environment(home, **variables)
    )


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"},
            "Wrong Ray token: the cluster at 'ADDRESS' rejected the token in RAY_AUTH_TOKEN.",
        ),
        ({}, "The Ray cluster at 'ADDRESS' requires a token."),
        (
            {"RAY_AUTH_MODE": "disabled"},
            "The Ray cluster at 'ADDRESS' requires a token, but RAY_AUTH_MODE is 'disabled'. Unset it.",
        ),
        (
            {"RAY_AUTH_MODE": "token"},
            "Cannot authenticate at the Ray cluster 'ADDRESS': "
            "Token authentication is enabled but no authentication token was found.",
        ),
        (
            {"RAY_AUTH_TOKEN_PATH": "/nowhere"},
            "Cannot authenticate at the Ray cluster 'ADDRESS': "
            "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nowhere.",
        ),
    ],
)
def test_wrong_token_is_reported(address: str, tmp_path: Path, variables: dict[str, str], problem: str) -> None:
    done = toolroll("limiter", "status", "--address", address, home=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {problem.replace('ADDRESS', address)} {REMEDY}"


def test_run_reports_wrong_token(address: str, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(ENGINE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hello"}\n')
    (tmp_path / "run.yaml").write_text(
        "engine: {kind: silent.Silent}\ndata: {path: rows.jsonl}\nrollout_data_dir: records\n"
    )
    (tmp_path / "token").write_text("wrong")
    done = toolroll("run", "run.yaml", f"cluster={address}", home=tmp_path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert done.returncode == 2
    assert f"the cluster at '{address}' rejected the token in RAY_AUTH_TOKEN_PATH. {REMEDY}" in done.stderr
    assert "Traceback" not in done.stderr


def test_correct_token_is_sent(address: str, tmp_path: Path) -> None:
    done = toolroll("limiter", "status", "--json", "--address", address, home=tmp_path, RAY_AUTH_TOKEN=TOKEN)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
