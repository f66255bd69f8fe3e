"""Ray cluster of several nodes on one Linux machine, for tests that kill nodes and partition networks.

`ray.cluster_utils.Cluster` does not suffice: its nodes run in the test process, use the machine's external address, do
not kill the workers of a removed node, and cannot be partitioned.

Requires root. Each host has its own network, process and mount namespace; a bridge in another namespace connects them.
Nothing is visible outside: the kernel removes a namespace with its first process, which dies with the test process. So
a crashed run leaves no process and no interface, and concurrent runs do not conflict. Start the cluster from a thread
that lives as long as the cluster, because the parent-death signal refers to the thread and not to the process.
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
from typing import Self

FAST_FAILURE: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Ray settings with which the GCS declares a silent node dead after a few seconds, instead of 30."""

_SWITCH = -1
_START_ATTEMPTS = 3
"""Ray gives a node 30 s to start, which can be too short on a busy machine."""
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_NEW_HOST = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")
# Ignoring SIGCHLD makes the kernel reap orphans of this process: to its workers, a raylet that is a zombie looks alive.
# In Python, because a shell cannot ignore SIGCHLD.
_REAPER = "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN); print('up', flush=True)\nwhile True: s.pause()"
_FIRST_PROCESS = (sys.executable, "-I", "-S", "-c", _REAPER)


@dataclass
class Host:
    """One machine of the cluster; host 0 is the head."""

    index: int
    ip: str

    @property
    def resource(self) -> str:
        """Custom resource of this host alone (quantity 100), to place actors: `resources={"node1": 1}`."""
        return f"node{self.index}"


class NetnsNodes:
    """A head and several workers at 10.77.0.x, each connected to a switch by a link that a test can cut."""

    def __init__(self, workers: int = 2, *, num_cpus: int = 2, env: Mapping[str, str] = FAST_FAILURE) -> None:
        self.num_cpus = num_cpus
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and "proxy" not in k.lower()}
        defaults = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env: dict[str, str] = {**inherited, **defaults, **env}
        self._port = 6379
        self.hosts = [Host(index, f"10.77.0.{index + 1}") for index in range(workers + 1)]
        self._first: dict[int, subprocess.Popen[str]] = {}
        # Short, because it contains Ray's Unix sockets, whose paths are limited to 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))

    @property
    def head(self) -> Host:
        """Host of the GCS, without which there is no cluster."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Address of the GCS, for `ray.init(address=...)`."""
        return f"{self.head.ip}:{self._port}"

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self.start_node(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start_node(self, host: Host) -> None:
        """Start or restart the Ray node of a host, and wait until it is up."""
        for _ in range(_START_ATTEMPTS):
            if self._starts(host):
                return
            self.kill_node(host)
        raise RuntimeError(f"ray start failed on host {host.index}:\n{_read(self._start_log(host))}")

    def _start_log(self, host: Host) -> Path:
        return self.directory / f"start{host.index}.log"

    def _starts(self, host: Host) -> bool:
        """Return True if the Ray node of a host could be started."""
        if _SWITCH not in self._first:
            self._first[_SWITCH] = _first_process(["unshare", "--net"])
            self._ip_command(_SWITCH, "link add name bridge up type bridge")
        self._boot(host)
        worker_options = [f"--address={self.address}"]
        head_options = ["--head", f"--port={self._port}"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.ip}"),
            *([*head_options, "--include-dashboard=false", "--no-monitor"] if host is self.head else worker_options),
            *(f"--temp-dir={self.directory}/{host.index}", "--object-store-memory=80000000"),
            *(f"--num-cpus={self.num_cpus}", "--num-gpus=0", f"--resources={json.dumps({host.resource: 100})}"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            "--include-log-monitor=false",
        ]
        # A file, not a pipe: the daemons inherit it, so that a pipe would not reach its end.
        with self._start_log(host).open("w") as output:
            starter = self._spawn(host, command, self.env, output.fileno())
            try:
                return starter.wait(timeout=90) == 0
            except subprocess.TimeoutExpired:
                starter.kill()
                return False

    def popen(self, host: Host, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python *args` on a host. `.stdout` also has its stderr; `.kill()` kills the process itself."""
        node_env = {"RAY_ADDRESS": self.address, "RAY_NODES_IP": host.ip, "PYTHONUNBUFFERED": "1"}
        return self._spawn(host, [sys.executable, *args], {**self.env, **node_env, **(env or {})}, subprocess.PIPE)

    def run(self, host: Host, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Run `python *args` on a host and return its output. Raise RuntimeError if it fails or times out."""
        process = self.popen(host, *args, env=env)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise RuntimeError(f"{args} on host {host.index} timed out:\n{process.communicate()[0]}") from error
        if process.returncode:
            raise RuntimeError(f"{args} on host {host.index} exited with status {process.returncode}:\n{output}")
        return output

    def cut(self, host: Host) -> None:
        """Cut the host's link, at the switch, so that the host keeps its addresses and routes."""
        self._ip_command(_SWITCH, f"link set port{host.index} down")

    def heal(self, host: Host) -> None:
        """Restore the host's link. TCP may still wait for its next retransmission."""
        self._ip_command(_SWITCH, f"link set port{host.index} up")

    def kill_node(self, host: Host) -> None:
        """Kill all processes of the host at once. Its link is removed first, so that no socket is closed visibly."""
        first = self._first.pop(host.index, None)
        if first is None or first.poll() is not None:
            return
        namespace = os.readlink(f"/proc/{first.pid}/ns/net")
        self._ip_command(_SWITCH, f"link del port{host.index}", check=False)
        # The first process of a PID namespace is reaped only after all others.
        for pid in [pid for pid, stat in _stats().items() if stat[1] == str(first.pid)]:
            os.kill(pid, signal.SIGKILL)
        first.communicate(timeout=20)
        _kill(lambda: _in_namespace(namespace))

    def close(self) -> None:
        """Kill every process of the cluster and remove its files. May be called twice, or after a failed start."""
        with ExitStack() as stack:  # runs all callbacks even if one fails
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
        ns = f"/proc/{self._first[host.index].pid}/ns"
        enter = [
            "nsenter",
            f"--net={ns}/net",
            f"--mount={ns}/mnt",
            f"--pid={ns}/pid_for_children",
        ]
        # nsenter forks to enter a PID namespace, so the child needs a parent-death signal.
        return _popen([*enter, *_DIE_WITH_PARENT, *args], env, output)

    def _ip_command(self, place: int, command: str, *, check: bool = True) -> None:
        _run(["nsenter", f"--net=/proc/{self._first[place].pid}/ns/net", "ip", *command.split()], check=check)


def can_make_namespaces() -> str | None:
    """Return the reason why `NetnsNodes` does not work on this machine, or None if it does."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]:
        return f"missing programs: {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        _run([*_NEW_HOST, "sh", "-ec", "ip link add name br0 type bridge; ip link add name v0 type veth peer name v1"])
    except RuntimeError as error:
        return str(error)
    return None


def _run(command: Sequence[str], *, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
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
    """Start the process that keeps new namespaces alive, and wait until it is ready."""
    process = _popen([*_DIE_WITH_PARENT, *unshare, *_FIRST_PROCESS], None, subprocess.PIPE)
    assert process.stdout is not None
    if (line := process.stdout.readline()) != "up\n":
        raise RuntimeError(f"{' '.join(unshare)}: {line}{process.communicate()[0]}")
    return process


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stats() -> dict[int, list[str]]:
    """Return state, parent, process group and session of each process, without zombies."""
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
    """Stop all processes, then kill them, so that none can fork or report the death of another."""
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
