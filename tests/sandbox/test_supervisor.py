"""The supervisor starts no further command after SIGTERM."""

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.sandbox

SUPERVISED = """
import os, signal, time
from toolroll.sandbox.server.interpreter.supervisor import Supervisor

report = os.open(os.devnull, os.O_WRONLY)
supervisor = Supervisor({"namespaces": False, "landlock": 0}, {"fetch": [], "fetch_limit": 0}, report, -1)

def terminate_supervisor():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)

def report_start():
    os.write(1, b"started")
    os._exit(0)

WHEN
"""


@pytest.mark.parametrize(
    "when",
    [
        "os.kill(os.getpid(), signal.SIGTERM); supervisor.run([report_start])",
        "supervisor.run([terminate_supervisor, report_start])",
    ],
    ids=["before the first command", "during the first command"],
)
def test_no_command_starts_after_sigterm(when: str) -> None:
    started_at = time.monotonic()
    code = SUPERVISED.replace("WHEN", when)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started_at < 40, "the supervisor waited for the command"
