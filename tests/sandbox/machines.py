"""Kinds of machines on which a sandbox server runs, each with another isolation tier or another user."""

import sys
from pathlib import Path

USER = 61_234
"""Id of an unprivileged user."""
_ELSEWHERE = [sys.executable, str(Path(__file__).with_name("docker_like.py"))]
MACHINES = {
    "as it is": [],
    "a container": [*_ELSEWHERE, "--seccomp"],
    "a user": [*_ELSEWHERE, "--user", str(USER)],
    "a user in a container": [*_ELSEWHERE, "--user", str(USER), "--seccomp"],
}
"""Name of a machine → command that starts a server as on this machine."""
TIERS = {"as it is": "AB", "a container": "C", "a user": "B", "a user in a container": "C"}
"""Name of a machine → isolation tiers that it may have."""
