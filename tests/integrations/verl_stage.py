"""Real verl in an environment of its own, and what its programs need there.

`.ci/verl` makes the environments, once per machine. The toolroll in them is the one under test. A program there plays
scenes and writes down what it saw; the tests look at that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from sandbox.proxy import Proxy
from sandbox.serving import serving

import toolroll

ROOT = Path(__file__).parent.parent.parent
SIDE = Path(__file__).parent / "verl_side"
EXAMPLE = ROOT / "examples" / "verl_gsm8k"
VERSIONS = ("0.9", "0.8")
WITHIN = 900
"""Seconds; 90 on two idle cores."""


def questions() -> Path:
    """GSM8K's own, where TOOLROLL_GSM8K names the file; else the example's, which have the same form."""
    return Path(os.environ.get("TOOLROLL_GSM8K") or EXAMPLE / "questions.jsonl")


@cache
def pythons() -> dict[str, str]:
    """The Python of each version."""
    made = subprocess.run([ROOT / ".ci" / "verl"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in made.split())


def run(version: str, folder: Path, *args: str | Path, **environment: str) -> str:
    """Run a Python program beside verl, to its end. What it printed."""
    (folder / "path").mkdir(exist_ok=True)
    link = folder / "path" / "toolroll"
    if not link.exists():
        link.symlink_to(Path(toolroll.__file__).parent)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    ours = {
        "PYTHONPATH": f"{folder / 'path'}{os.pathsep}{SIDE}",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [pythons()[version], *args],
        env={**kept, **ours, **environment},
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def model_for(version: str, model_dir: Path, folder: Path) -> Path:
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
    run(version, folder, EXAMPLE / "prepare.py", questions(), folder / "rows.parquet", "--most", "64")
    spec = {
        "folder": str(folder),
        "model": str(model_for(version, model_dir, folder)),
        "questions": str(questions()),
        "rows": str(folder / "rows.parquet"),
        "result": str(folder / "result.json"),
        "sglang": sglang,
        "scenes": ["older", "newer"],
    }
    # 0.9 imports `external_lib` in its trainer's process as well, 0.8 doesn't.
    more = {} if version == "0.9" else {"VERL_USE_EXTERNAL_MODULES": "toolroll.integrations.verl"}
    sessions = ("--sessions", "100")
    with serving(*sessions) as one, serving(*sessions) as other, counted(one.url) as proxy:
        spec |= {"sandbox": proxy.url, "sandbox_pid": one.process.pid}
        spec |= {"other_sandbox": other.url, "other_sandbox_pid": other.process.pid}
        run(version, folder, SIDE / "play.py", json.dumps(spec), **more)
    result = json.loads((folder / "result.json").read_text())
    return {**result, "most_running": proxy.most_running, "programs": proxy.programs}
