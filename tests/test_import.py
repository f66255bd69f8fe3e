"""`import toolroll` and the `toolroll` command start fast, without heavy packages."""

import json
import subprocess
import sys

import pytest

import toolroll

RAY_NAMES = {"ExecutionWorker", "PoolMode", "RolloutWorkers", "init_execution_pool"}
"""Names that can only be used on a Ray cluster."""

PROBE = """
import json, sys, time

class HeavyPackages:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "transformers", "torch", "opentelemetry"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, HeavyPackages())
started = time.process_time()
import toolroll
import_s = time.process_time() - started
heavy = []
for name in toolroll.__all__:
    try:
        getattr(toolroll, name)
    except ImportError:
        heavy.append(name)
print(json.dumps({"import_s": import_s, "heavy": heavy}))
"""


@pytest.mark.process
def test_import_is_fast_and_light() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["import_s"] < 0.5
    assert set(found["heavy"]) == RAY_NAMES


COMMAND = """
import sys
from toolroll.cli.app import app
assert len(app.registered_commands) + len(app.registered_groups) > 5
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.process
def test_command_line_loads_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    heavy = {
        "aiohttp",
        "jsonschema",
        "numpy",
        "omegaconf",
        "opentelemetry",
        "pydantic",
        "ray",
        "textual",
        "torch",
        "transformers",
    }
    assert heavy.isdisjoint(done.stdout.split())


def test_exported_names_are_listed() -> None:
    assert set(toolroll.__all__) <= set(dir(toolroll))
    assert not hasattr(toolroll, "Toolbox")
