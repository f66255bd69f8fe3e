"""Real verl in an environment of its own, and what its programs need there.

`.ci/verl` makes the environments, once per machine. The toolroll in them is the one under test. A program there plays
scenes and writes down what it saw; the tests look at that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import doc_page
from aiohttp import web
from sandbox.proxy import Proxy
from sandbox.serving import serving

import toolroll

ROOT = Path(__file__).parent.parent.parent
SIDE = Path(__file__).parent / "verl_side"
EXAMPLE = ROOT / "examples" / "verl_gsm8k"
PAGE = ROOT / "docs" / "verl.md"
SCRIPT = ROOT / "tests" / "special_e2e" / "run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh"
VERSIONS = ("0.9", "0.8")
WITHIN = 900
"""Seconds; it takes some 110 of one processor."""


def questions() -> Path:
    """GSM8K's own, where TOOLROLL_GSM8K names the file; else the example's, which have the same form."""
    return Path(os.environ.get("TOOLROLL_GSM8K") or EXAMPLE / "questions.jsonl")


@cache
def pythons() -> dict[str, str]:
    """The Python of each version."""
    made = subprocess.run([ROOT / ".ci" / "verl"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in made.split())


def environment(folder: Path) -> dict[str, str]:
    """In which programs beside verl find the toolroll that is under test."""
    link = folder / "path" / "toolroll"
    if not link.exists():
        link.parent.mkdir()
        link.symlink_to(Path(toolroll.__file__).parent)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    return {
        **kept,
        "PYTHONPATH": f"{link.parent}{os.pathsep}{SIDE}",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else its workers stand behind all that runs beside them
        "RAY_memory_monitor_refresh_ms": "0",  # and are ended where others fill the memory
    }


def run(command: Sequence[str | Path], folder: Path, **more: str) -> str:
    """Run a program beside verl, to its end. What it printed."""
    done = subprocess.run(
        command, env={**environment(folder), **more}, cwd=folder, capture_output=True, text=True, timeout=WITHIN
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def overrides_on(page: Path) -> list[str]:
    """Every line of a page's shell blocks that sets a key of verl's."""
    blocks = [body for kind, _, body in doc_page.BLOCK.findall(page.read_text()) if kind == "sh"]
    return [line for block in blocks for line in block.splitlines() if re.match(r"\+?[A-Za-z_.]+=", line)]


def keys_on(page: Path) -> list[str]:
    """Every key of verl's that a page's text names, with those of the table of what our loop reads."""
    text = doc_page.BLOCK.sub("", page.read_text())
    named = re.findall(r"`((?:actor_rollout_ref|algorithm|data|reward|trainer)(?:\.\w+)+)", text)
    named += [f"actor_rollout_ref.rollout.{key}" for key in re.findall(r"`(multi_turn\.\w+)", text)]
    for of, keys in re.findall(r"^\| `([\w.]+)` \| ((?:`\w+`(?:, )?)+) \|$", text, re.MULTILINE):
        named += [f"{of}.{key}" for key in re.findall(r"\w+", keys)]
    return sorted(set(named))


def overrides_in(script: Path, version: str, folder: Path) -> list[str]:
    """What a script sets of verl's. It is run as it stands, with a Python that writes down what verl is begun with.

    It prepares the data too: `e2e/train.parquet`.
    """
    python, told = folder / "noting-python", folder / "begun-with"
    noting = f'if [ "$1" = -m ]; then printf "%s\\0" "$@" >{shlex.quote(str(told))}; exit; fi'
    python.write_text(f'#!/bin/sh\n{noting}\nexec {shlex.quote(pythons()[version])} "$@"\n')
    python.chmod(0o755)
    settled = {"PYTHON": str(python), "WORK": str(folder / "e2e"), "TRAIN": str(questions())}
    run([script], folder, SANDBOX_FUSION_URL="http://127.0.0.1:1", **settled)
    _, trainer, *overrides = told.read_text().split("\0")[:-1]
    assert trainer == {"0.9": "verl.trainer.main_ppo", "0.8": "verl.trainer.main_ppo_sync"}[version]
    return overrides


def model_for(model_dir: Path, folder: Path) -> Path:
    """The model, with its tokenizer named as transformers 4 knows it too."""
    model = folder / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        if file.name != "tokenizer_config.json":
            (model / file.name).symlink_to(file)
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return model


class CountedRuns(Proxy):
    """A proxy that counts the programs in flight; other requests need no slot."""

    def __init__(self, sandbox: str) -> None:
        super().__init__(sandbox)
        self.running = self.most_running = self.programs = 0

    async def _ask(self, request: web.Request, body: bytes) -> web.Response:
        if request.path != "/run_code":
            return await super()._ask(request, body)
        self.running += 1
        self.programs += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await super()._ask(request, body)
        finally:
            self.running -= 1


@contextlib.contextmanager
def counted(sandbox: str) -> Iterator[CountedRuns]:
    """A counting proxy, in a thread of its own."""
    proxy = CountedRuns(sandbox)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result(30)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def play(version: str, folder: Path, model_dir: Path, sglang: str | None) -> dict[str, Any]:
    """All scenes, with a sandbox that dies for each kind of trainer."""
    python = pythons()[version]
    spec = {
        "folder": str(folder),
        "model": str(model_for(model_dir, folder)),
        "questions": str(questions()),
        "rows": str(folder / "e2e" / "train.parquet"),
        "result": str(folder / "result.json"),
        "sglang": sglang,
        "page": overrides_on(PAGE),
        "keys": keys_on(PAGE),
        "files": doc_page.files(PAGE.read_text()),
        "script": overrides_in(SCRIPT, version, folder),
    }
    # 0.9 imports `external_lib` in its trainer's process as well, 0.8 doesn't.
    more = {} if version == "0.9" else {"VERL_USE_EXTERNAL_MODULES": "toolroll.integrations.verl"}
    sessions = ("--sessions", "100")
    with serving(*sessions) as one, serving(*sessions) as other, counted(one.url) as proxy:
        spec |= {"sandbox": proxy.url, "sandbox_pid": one.process.pid}
        spec |= {"other_sandbox": other.url, "other_sandbox_pid": other.process.pid}
        run([python, SIDE / "play.py", json.dumps(spec)], folder, **more)
    result = json.loads((folder / "result.json").read_text())
    return {**result, "version": version, "spec": spec, "most_running": proxy.most_running, "programs": proxy.programs}
