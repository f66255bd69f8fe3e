"""Run the end-to-end scripts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_gsm8k_sgl_multiturn_sf_tool(root: Path, report_figure: Callable[[str], None]) -> None:
    """Use a real sandbox, a real engine and model, two Ray nodes, and the viewer in a terminal."""
    script = root / "tests/special_e2e/run_gsm8k_sgl_multiturn_sf_tool.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([script], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-10_000:]
    line = done.stdout.strip().splitlines()[-1]
    report_figure(line)
    assert json.loads(line)["trajectories"] == 24
