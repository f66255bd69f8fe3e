"""The end-to-end scripts, run as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_gsm8k_sgl_multiturn_sf_tool(root: Path, say: Callable[[str], None]) -> None:
    """Everything real: sandbox, engine and weights, two Ray nodes, the viewer in a terminal."""
    script = root / "tests/special_e2e/run_gsm8k_sgl_multiturn_sf_tool.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    # It takes minutes in any case, and gives way to tests beside it whose seconds count.
    command = ["nice", "-n", "10", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-10_000:]
    line = done.stdout.strip().splitlines()[-1]
    say(line)
    assert json.loads(line)["trajectories"] == 128
