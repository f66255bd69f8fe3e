"""What the benchmarks must show, beside figures."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_overtaken_are_counted_rightly() -> None:
    """By its definition, written out."""
    import limiter as benchmark

    runs = [(0.0, 0.5), (0.001, 0.2), (0.01, 0.3), (0.4, 0.45), (0.9, 1.0)]
    assert benchmark.overtaken(runs) == 1 / 5
    by_definition = sum(any(other[0] > run[0] + 0.002 and other[1] < run[1] for other in runs) for run in runs)
    assert benchmark.overtaken(runs) == by_definition / len(runs)


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
