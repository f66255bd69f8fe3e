"""A real Ray cluster of several nodes on one Linux machine, for tests that kill nodes and cut networks.

Why not `ray.cluster_utils.Cluster`: its nodes live in the test process, take the machine's outward address, leave the
workers of a removed node to notice for themselves, and their network cannot be cut.

Needs root: each host has its own network, process and mount namespace; the hosts are joined by a bridge in a namespace
too. Nothing has a name outside: the kernel ends a namespace with its first process, and that one dies with the test
process. So a crashed run leaves no process and no interface, and runs side by side cannot clash. Start it from a thread
that lives as long as the cluster: the parent-death signal goes by thread, not process.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

FAST_FAILURE: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""With these the GCS gives up on a silent node after some seconds, instead of Ray's half a minute."""

_SWITCH = -1
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_NEW_HOST = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")
# Ignoring CHLD makes the kernel reap what is left to this process: a raylet that stays a zombie looks alive to its
# workers, and they would outlive it. Python, since a shell does not let CHLD be ignored.
_REAPER = "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN); print('up', flush=True)\nwhile True: s.pause()"
_FIRST_PROCESS = (sys.executable, "-I", "-S", "-c", _REAPER)


@dataclass
class Host:
    """One machine of the cluster, as far as Ray can tell; host 0 is the head."""

    index: int
    ip: str

    @property
    def resource(self) -> str:
        """The custom resource that only this host has (100 of it), to pin actors: `resources={"node1": 1}`."""
        return f"node{self.index}"


class NetnsNodes:
    """A head and some workers, each at 10.77.0.x with a cable to a common switch that a test can pull."""

    def __init__(self, workers: int = 2, *, num_cpus: int = 2, env: Mapping[str, str] = FAST_FAILURE) -> None:
        self.num_cpus = num_cpus
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and "proxy" not in k.lower()}
        ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env: dict[str, str] = {**inherited, **ours, **env}
        self._port = 6379
        self.hosts = [Host(index, f"10.77.0.{index + 1}") for index in range(workers + 1)]
        self._first: dict[int, subprocess.Popen[str]] = {}
        # Short, because Ray's unix sockets live below it, and the path of one has 107 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))

    @property
    def head(self) -> Host:
        """The host of the GCS; Ray loses the whole cluster with it."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """The address of the GCS, as `ray.init(address=...)` wants it."""
        return f"{self.head.ip}:{self._port}"

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self.start_node(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start_node(self, host: Host) -> None:
        """Start a host's Ray node, also anew (after `kill_node`, or after it ended itself); wait till it is up."""
        if _SWITCH not in self._first:
            self._first[_SWITCH] = _first_process(["unshare", "--net"])
            self._ip_command(_SWITCH, "link add name bridge up type bridge")
        self._boot(host)
        joining = [f"--address={self.address}"]
        leading = ["--head", f"--port={self._port}"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.ip}"),
            *([*leading, "--include-dashboard=false", "--no-monitor"] if host is self.head else joining),
            *(f"--temp-dir={self.directory}/{host.index}", "--object-store-memory=80000000"),
            *(f"--num-cpus={self.num_cpus}", "--num-gpus=0", f"--resources={json.dumps({host.resource: 100})}"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            "--include-log-monitor=false",
        ]
        # Into a file, not a pipe: the daemons inherit it, and reading a pipe to its end would wait for theirs.
        log = self.directory / f"start{host.index}.log"
        with log.open("w") as output:
            starter = self._spawn(host, command, self.env, output.fileno())
            try:
                failed = starter.wait(timeout=90) != 0
            except subprocess.TimeoutExpired:
                starter.kill()
                failed = True
        if failed:
            raise RuntimeError(f"ray start failed on host {host.index}:\n{_read(log)}")

    def popen(self, host: Host, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python *args` on a host, all output in `.stdout`; `.kill()` is a kill -9 of that very process."""
        own = {"RAY_ADDRESS": self.address, "RAY_NODES_IP": host.ip, "PYTHONUNBUFFERED": "1"}
        return self._spawn(host, [sys.executable, *args], {**self.env, **own, **(env or {})}, subprocess.PIPE)

    def run(self, host: Host, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Run `python *args` on a host to its end and return its output; an error if it fails or takes too long."""
        process = self.popen(host, *args, env=env)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            process.kill()
            raise RuntimeError(f"{args} on host {host.index} hung:\n{process.communicate()[0]}") from late
        if process.returncode:
            raise RuntimeError(f"{args} on host {host.index} ended with {process.returncode}:\n{output}")
        return output

    def cut(self, host: Host) -> None:
        """Pull the host's cable. It is pulled at the switch, so that the host's addresses and routes stay."""
        self._ip_command(_SWITCH, f"link set port{host.index} down")

    def heal(self, host: Host) -> None:
        """Plug the host's cable in again; TCP may still wait for its next retransmission."""
        self._ip_command(_SWITCH, f"link set port{host.index} up")

    def kill_node(self, host: Host) -> None:
        """Kill -9 everything on the host at once; its cable goes first, so that no socket can say farewell."""
        first = self._first.pop(host.index, None)
        if first is None or first.poll() is not None:
            return
        namespace = os.readlink(f"/proc/{first.pid}/ns/net")
        self._ip_command(_SWITCH, f"link del port{host.index}", must=False)
        # The end of a process namespace's first process is complete only when all others are dead and reaped.
        for pid in [pid for pid, stat in _stats().items() if stat[1] == str(first.pid)]:
            os.kill(pid, signal.SIGKILL)
        first.communicate(timeout=20)
        _kill(lambda: _in_namespace(namespace))

    def close(self) -> None:
        """End every process of the cluster and remove its files; fine to call twice, or after a failed start."""
        with ExitStack() as stack:  # it goes on after an error, to leave as little as can be
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            if switch := self._first.get(_SWITCH):
                stack.callback(switch.communicate)
                stack.callback(switch.kill)
            for host in self.hosts:
                stack.callback(self.kill_node, host)

    def _boot(self, host: Host) -> None:
        if host.index in self._first:
            return
        first = self._first[host.index] = _first_process(_NEW_HOST)
        port = f"port{host.index}"
        self._ip_command(_SWITCH, f"link add name {port} type veth peer name eth0 netns {first.pid}")
        self._ip_command(_SWITCH, f"link set {port} master bridge up")
        self._ip_command(host.index, f"addr add {host.ip}/24 dev eth0")
        self._ip_command(host.index, "link set eth0 up")
        self._ip_command(host.index, "link set lo up")

    def _spawn(self, host: Host, args: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[str]:
        there = f"/proc/{self._first[host.index].pid}/ns"
        enter = ["nsenter", f"--net={there}/net", f"--mount={there}/mnt", f"--pid={there}/pid_for_children"]
        # nsenter has to fork to change its process namespace, so that a kill of it must be handed on.
        return _popen([*enter, *_DIE_WITH_PARENT, *args], env, output)

    def _ip_command(self, place: int, command: str, *, must: bool = True) -> None:
        _run(["nsenter", f"--net=/proc/{self._first[place].pid}/ns/net", "ip", *command.split()], must=must)


def can_make_namespaces() -> str | None:
    """Why `NetnsNodes` cannot work here, or None if it can; found out by trying."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]:
        return f"no such program: {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        _run([*_NEW_HOST, "sh", "-ec", "ip link add name br0 type bridge; ip link add name v0 type veth peer name v1"])
    except RuntimeError as error:
        return str(error)
    return None


def _run(command: Sequence[str], *, must: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _popen(command: Sequence[str], env: Mapping[str, str] | None, output: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _first_process(unshare: Sequence[str]) -> subprocess.Popen[str]:
    """The process that keeps new namespaces alive; ready when it has said so."""
    process = _popen([*_DIE_WITH_PARENT, *unshare, *_FIRST_PROCESS], None, subprocess.PIPE)
    assert process.stdout is not None
    if (said := process.stdout.readline()) != "up\n":
        raise RuntimeError(f"{' '.join(unshare)}: {said}{process.communicate()[0]}")
    return process


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stats() -> dict[int, list[str]]:
    """Of each living process: its state, parent, process group and session. Zombies are dead enough for us."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = {pid: _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:4] for pid in pids}
    return {pid: stat for pid, stat in stats.items() if stat and stat[0] != "Z"}


def _in_namespace(link: str) -> list[int]:
    def inside(pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/net") == link
        except OSError:
            return False

    return [pid for pid in _stats() if inside(pid)]


def _kill(find: Callable[[], list[int]]) -> None:
    """Stop all, then kill all: nobody gets to see another one die and report it, or to fork meanwhile."""
    deadline = time.monotonic() + 20
    while pids := find():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes survive SIGKILL: {pids}")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        time.sleep(0.02)
