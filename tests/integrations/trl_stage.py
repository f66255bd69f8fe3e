"""Runs programs with real TRL in a separate environment, which `.ci/trl` creates once per machine."""

import os
import subprocess
from functools import cache
from pathlib import Path

import toolroll

ROOT = Path(__file__).parent.parent.parent
SIDE = Path(__file__).parent / "trl_side"
EXAMPLE = ROOT / "examples" / "trl_gsm8k"
TIMEOUT_S = 900
"""Timeout of a program that hangs. On two idle cores it takes 90 s."""


@cache
def python() -> str:
    """Return the Python interpreter of TRL's environment."""
    output = subprocess.run([ROOT / ".ci" / "trl"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.split())["python"]


def run(program: Path, *arguments: str | Path, directory: Path) -> str:
    """Run a program in TRL's environment with the toolroll under test, and return its output."""
    link = directory / "path" / "toolroll"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(toolroll.__file__).parent)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    added = {
        "PYTHONPATH": f"{link.parent}{os.pathsep}{ROOT / 'tests'}",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    completed = subprocess.run(
        [python(), "-P", program, *arguments],
        env={**kept, **added, "HF_DATASETS_CACHE": str(directory / "datasets"), "OMP_NUM_THREADS": "2"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert completed.returncode == 0, f"{completed.stdout[-2000:]}\n{completed.stderr[-6000:]}"
    return completed.stdout + completed.stderr
