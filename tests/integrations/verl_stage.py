"""Runs programs with real verl in separate environments, which `.ci/verl` creates once per machine.

The environments use the toolroll under test. A program runs scenarios there and writes its results to a file, which the
tests check.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import doc_page
from aiohttp import web
from sandbox.proxy import Proxy
from sandbox.serving import serving

import toolroll
from toolroll._internal.event_loop_thread import EventLoopThread

ROOT = Path(__file__).parent.parent.parent
SIDE = Path(__file__).parent / "verl_side"
EXAMPLE = ROOT / "examples" / "verl_gsm8k"
PAGE = ROOT / "docs" / "verl.md"
SCRIPT = ROOT / "tests" / "special_e2e" / "run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh"
VERSIONS = ("0.9", "0.8")
TIMEOUT_S = 900
"""Timeout of a program. It takes about 110 s of CPU time."""


def questions() -> Path:
    """Return GSM8K if TOOLROLL_GSM8K names its file, otherwise the example's questions, which have the same format."""
    return Path(os.environ.get("TOOLROLL_GSM8K") or EXAMPLE / "questions.jsonl")


@cache
def pythons() -> dict[str, str]:
    """Return the Python interpreter for each version of verl."""
    output = subprocess.run([ROOT / ".ci" / "verl"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.split())


def environment(directory: Path) -> dict[str, str]:
    """Return environment variables with which programs import the toolroll under test."""
    link = directory / "path" / "toolroll"
    if not link.exists():
        link.parent.mkdir()
        link.symlink_to(Path(toolroll.__file__).parent)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    return {
        **kept,
        "PYTHONPATH": f"{link.parent}{os.pathsep}{SIDE}",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(directory / "datasets"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # do not lower the priority of workers
        "RAY_memory_monitor_refresh_ms": "0",  # do not kill workers if other processes use much memory
    }


def run(command: Sequence[str | Path], directory: Path, **more: str) -> str:
    """Run a program in verl's environment and return its stdout."""
    completed = subprocess.run(
        command,
        env={**environment(directory), **more},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert completed.returncode == 0, f"{completed.stdout[-2000:]}\n{completed.stderr[-6000:]}"
    return completed.stdout


def overrides_on(page: Path) -> list[str]:
    """Return every line of a page's shell blocks that sets a key of verl."""
    blocks = [body for language, _, body in doc_page.BLOCK.findall(page.read_text()) if language == "sh"]
    return [line for block in blocks for line in block.splitlines() if re.match(r"\+?[A-Za-z_.]+=", line)]


def keys_on(page: Path) -> list[str]:
    """Return every key of verl that the text of a page names, including the table of the keys that toolroll reads."""
    text = doc_page.BLOCK.sub("", page.read_text())
    named = re.findall(r"`((?:actor_rollout_ref|algorithm|data|reward|trainer)(?:\.\w+)+)", text)
    named += [f"actor_rollout_ref.rollout.{key}" for key in re.findall(r"`(multi_turn\.\w+)", text)]
    for of, keys in re.findall(r"^\| `([\w.]+)` \| ((?:`\w+`(?:, )?)+) \|$", text, re.MULTILINE):
        named += [f"{of}.{key}" for key in re.findall(r"\w+", keys)]
    return sorted(set(named))


def overrides_in(script: Path, version: str, directory: Path) -> list[str]:
    """Return the overrides that a script passes to verl.

    The script runs with a fake Python that records the arguments of verl. It also creates `e2e/train.parquet`.
    """
    python, arguments_file = directory / "recording-python", directory / "arguments"
    record = f'if [ "$1" = -m ]; then printf "%s\\0" "$@" >{shlex.quote(str(arguments_file))}; exit; fi'
    python.write_text(f'#!/bin/sh\n{record}\nexec {shlex.quote(pythons()[version])} "$@"\n')
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "WORK": str(directory / "e2e"), "TRAIN": str(questions())}
    run([script], directory, SANDBOX_FUSION_URL="http://127.0.0.1:1", **variables)
    _, trainer, *overrides = arguments_file.read_text().split("\0")[:-1]
    assert trainer == {"0.9": "verl.trainer.main_ppo", "0.8": "verl.trainer.main_ppo_sync"}[version]
    return overrides


def model_for(model_dir: Path, directory: Path) -> Path:
    """Return a copy of the model whose tokenizer class also exists in transformers 4."""
    model = directory / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        if file.name != "tokenizer_config.json":
            (model / file.name).symlink_to(file)
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return model


class CountedRuns(Proxy):
    """Proxy that counts the programs in flight. Other requests need no slot."""

    def __init__(self, sandbox: str) -> None:
        super().__init__(sandbox)
        self.running = self.max_running = self.programs = 0

    async def _ask(self, request: web.Request, body: bytes) -> web.Response:
        if request.path != "/run_code":
            return await super()._ask(request, body)
        self.running += 1
        self.programs += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await super()._ask(request, body)
        finally:
            self.running -= 1


@contextlib.contextmanager
def counted(sandbox: str) -> Iterator[CountedRuns]:
    """Run a counting proxy in a thread."""
    thread, stack = EventLoopThread("counting-proxy"), contextlib.AsyncExitStack()
    proxy = thread.run(stack.enter_async_context(CountedRuns(sandbox)))
    try:
        yield proxy
    finally:
        thread.run(stack.aclose())
        thread.close()


def play(version: str, directory: Path, model_dir: Path, sglang: str | None) -> dict[str, Any]:
    """Run all scenarios with one version of verl, each kind of trainer with a sandbox that is killed."""
    python = pythons()[version]
    spec = {
        "directory": str(directory),
        "model": str(model_for(model_dir, directory)),
        "questions": str(questions()),
        "rows": str(directory / "e2e" / "train.parquet"),
        "result": str(directory / "result.json"),
        "sglang": sglang,
        "page": overrides_on(PAGE),
        "keys": keys_on(PAGE),
        "files": doc_page.files(PAGE.read_text()),
        "script": overrides_in(SCRIPT, version, directory),
    }
    # Only 0.9 imports `external_lib` in the trainer's process as well.
    more = {} if version == "0.9" else {"VERL_USE_EXTERNAL_MODULES": "toolroll.integrations.verl"}
    sessions = ("--sessions", "100")
    with serving(*sessions) as one, serving(*sessions) as other, counted(one.url) as proxy:
        spec |= {"sandbox": proxy.url, "sandbox_pid": one.process.pid}
        spec |= {"other_sandbox": other.url, "other_sandbox_pid": other.process.pid}
        run([python, SIDE / "play.py", json.dumps(spec)], directory, **more)
    result = json.loads((directory / "result.json").read_text())
    return {**result, "version": version, "spec": spec, "max_running": proxy.max_running, "programs": proxy.programs}
