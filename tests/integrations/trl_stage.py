"""Real TRL in an environment of its own, which `.ci/trl` makes once per machine. Its toolroll is the one tested."""

import os
import subprocess
from functools import cache
from pathlib import Path

import toolroll

ROOT = Path(__file__).parent.parent.parent
SIDE = Path(__file__).parent / "trl_side"
EXAMPLE = ROOT / "examples" / "trl_gsm8k"
WITHIN = 900
"""Seconds; 90 on two idle cores."""


@cache
def python() -> str:
    """TRL's."""
    made = subprocess.run([ROOT / ".ci" / "trl"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in made.split())["python"]


def run(program: Path, *arguments: str | Path, folder: Path) -> str:
    """Run a program beside TRL, to its end. What it said."""
    link = folder / "path" / "toolroll"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(toolroll.__file__).parent)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    added = {
        "PYTHONPATH": f"{link.parent}{os.pathsep}{ROOT / 'tests'}",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(
        ["nice", "-n", "10", python(), "-P", program, *arguments],  # it gives way to tests whose seconds count
        env={**kept, **added, "HF_DATASETS_CACHE": str(folder / "datasets"), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr
