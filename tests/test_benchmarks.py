"""What the benchmarks must show, beside figures."""

import json
import subprocess
import sys
from pathlib import Path


def test_100_000_instances_at_once_leave_nothing_behind(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, root / "benchmarks/tools.py", "--quick", "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["instances_at_once"] == 100_000
    assert figures["instances_left"] == 0
    assert figures["blocks_left"] < 1000
    assert figures["us_per_instance"] > 0
