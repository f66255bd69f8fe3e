"""The supervisor of a program's commands: what it is told to end doesn't begin."""

import subprocess
import sys
import time

import pytest

SUPERVISED = """
import os, signal, time
from toolroll.sandbox.server.supervisor import Supervisor

report = os.open(os.devnull, os.O_WRONLY)
supervisor = Supervisor({"namespaces": False, "landlock": 0}, {"fetch": [], "fetch_limit": 0}, report)

def told_from_below():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)

def say_so():
    os.write(1, b"begun")
    os._exit(0)

WHEN
"""


@pytest.mark.parametrize(
    "when",
    [
        "os.kill(os.getpid(), signal.SIGTERM); supervisor.run([say_so])",
        "supervisor.run([told_from_below, say_so])",
    ],
    ids=["before the first", "during the first"],
)
def test_told_to_end_it_begins_no_further_command(when: str) -> None:
    began = time.monotonic()
    code = SUPERVISED.replace("WHEN", when)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - began < 40, "it waited for the command"
