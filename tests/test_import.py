"""`import toolroll` and the command `toolroll` are quick, and heavy packages stay out of them."""

import json
import subprocess
import sys

import toolroll

PROBE = """
import json, sys, time

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("ray", "transformers", "torch"), f"{name} was imported"

sys.meta_path.insert(0, Refuse())
began = time.process_time()
import toolroll
took = time.process_time() - began
for name in toolroll.__all__:
    getattr(toolroll, name)
print(json.dumps({"took": took, "exported": len(toolroll.__all__)}))
"""


def test_import_is_quick_and_light() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["took"] < 0.5
    assert found["exported"] == len(toolroll.__all__) > 0


COMMAND = """
import sys
from toolroll.cli.app import app
assert len(app.registered_commands) + len(app.registered_groups) > 5
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_a_command_loads_what_it_needs_only() -> None:
    """Who asks for help, or for the viewer, doesn't wait for what other commands need."""
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    heavy = {"aiohttp", "jsonschema", "numpy", "omegaconf", "pydantic", "ray", "textual", "torch", "transformers"}
    assert heavy.isdisjoint(done.stdout.split())


def test_every_exported_name_is_there_and_an_unknown_one_is_not() -> None:
    assert set(toolroll.__all__) <= set(dir(toolroll))
    assert not hasattr(toolroll, "Toolbox")
