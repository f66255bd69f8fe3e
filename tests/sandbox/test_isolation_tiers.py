"""Which isolation a server offers, and the users of its programs."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from toolroll.sandbox.server import server
from toolroll.sandbox.server.execution import isolation_tiers
from toolroll.sandbox.server.isolation import landlock, syscalls
from toolroll.sandbox.server.isolation.program_users import ProgramUsers
from toolroll.sandbox.server.settings import ServerSettings


@pytest.mark.parametrize("abi", [1, landlock.SIGNAL_SCOPE_ABI])
@pytest.mark.parametrize("has_users", [True, False])
def test_tier_without_namespaces_keeps_signals_inside(
    abi: int, has_users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root has no users for programs if its user namespace is small, as in a rootless container."""
    monkeypatch.setattr(syscalls, "landlock_abi", lambda: abi)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    plans = isolation_tiers._plans(ServerSettings(), [], ProgramUsers() if has_users else None)
    assert ("C" in [plan["tier"] for plan in plans]) == (has_users or abi == landlock.SIGNAL_SCOPE_ABI)


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a namespace of process ids")
def test_containers_have_different_users() -> None:
    """The servers of two containers often have the same process id."""
    code = "import os; from toolroll.sandbox.server.isolation.program_users import ProgramUsers as users\n"
    code += "print(os.getpid(), users().first, flush=True); input()"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    outputs = []
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for container in [stack.enter_context(subprocess.Popen(command, **pipes, text=True)) for _ in range(3)]:
            assert container.stdout is not None
            outputs.append(container.stdout.readline().split())
    assert len({pid for pid, _ in outputs}) == 1
    assert len({first for _, first in outputs}) == 3


def test_address_that_is_found_twice_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*found, *found])
    [listener] = server._listening_sockets("localhost", 0)
    listener.close()
