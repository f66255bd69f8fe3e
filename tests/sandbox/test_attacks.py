"""Malicious programs can neither access the host nor leave anything behind, in every isolation tier.

Each attack runs against a real server: on this machine; in a container without namespaces and cgroups; and each as root
and as an unprivileged user. After each attack, the next program is served normally.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import platform
import re
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import psutil
import pyseccomp
import pytest

from sandbox.machines import MACHINES, TIERS, USER
from sandbox.serving import Serving, name_process, serving, wait_until
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import Execution, ExecutionOutcome

pytestmark = pytest.mark.sandbox

MODES = {"private": 0o600, "public": 0o666}
SECRET = "correct-horse-battery-staple"
HERE = str(Path(__file__).parent)
PRIVATE = (
    "/etc/ssh",
    "/root",
    "/home",
    "/var/log",
    "/var/lib/dpkg",
    "/run",
    "/sys/kernel",
    "/boot",
    str(Path(__file__).parent),
)


@dataclass
class Machine:
    """A server on one kind of machine, and the facts that an attacker may know about it."""

    name: str
    server: Serving
    tier: str
    outside: Path
    """World-writable directory of the host, with files of the server's user."""
    before: dict[str, int]

    def zygotes(self) -> set[int]:
        """Return the process ids of the zygotes, which no program may kill."""
        found: set[int] = set()
        for process in self.server.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # processes that remove directories are short-lived
                is_clone = "interpreter.zygote" in " ".join(psutil.Process(process.ppid()).cmdline())
                if "interpreter.zygote" in " ".join(process.cmdline()) and not is_clone:
                    found.add(process.pid)
        return found

    @property
    def facts(self) -> str:
        """Return Python code that defines the facts that an attacker may know."""
        facts = {
            "SERVER": self.server.process.pid,
            "PROCESSES": [one.pid for one in self.server.processes()],
            "PORT": int(self.server.url.rpartition(":")[2]),
            "OUTSIDE": str(self.outside),
            "CHECKOUT": str(Path(__file__).parents[2]),
            "HOME": str(Path.home()),
            "ADDRESSES": addresses(),
            "FILES": {path: files_in(path) for path in (*PRIVATE, str(Path.home()), str(self.outside))},
        }
        return "".join(f"{name} = {value!r}\n" for name, value in facts.items())

    def traces(self) -> dict[str, int]:
        """Count the resources of the server on the host. The counts must not grow."""
        processes, own = self.server.processes(), self.own_processes()
        spaces = {space for one in processes for space in namespaces_of(one.pid)}
        return {
            "processes": len(processes),
            "namespaces": len(spaces),
            "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
            "descriptors": sum(one.num_fds() for one in own),
            "directories": sum(len([*directory.iterdir()]) for one in own for directory in directories_of(one.pid)),
        }

    def own_processes(self) -> list[psutil.Process]:
        """Return the hub and the fronts of the server."""
        return [psutil.Process(self.server.process.pid), *self.server.fronts()]


def directories_of(pid: int) -> list[Path]:
    """Return the temporary directories of a process of the server."""
    return list(Path("/tmp").glob(f"toolroll-*-{pid}-*"))


def files_in(directory: str) -> list[str]:
    path = Path(directory)
    return sorted(one.name for one in path.iterdir() if one.is_file()) if path.is_dir() else []


def namespaces_of(pid: int) -> list[str]:
    try:
        return [os.readlink(link) for link in Path(f"/proc/{pid}/ns").iterdir()]
    except OSError:  # the process has just ended
        return []


def addresses() -> list[str]:
    """Return the addresses of all network interfaces."""
    found = [one.address for all_of_it in psutil.net_if_addrs().values() for one in all_of_it]
    return [one.partition("%")[0] for one in found if re.fullmatch(r"[\d.]+|[\da-f:]+::[\da-f:]+(%\w+)?", one)]


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid() != 0 and "--user" in MACHINES[request.param]:
        pytest.skip("NOT TESTED: requires root to become another user")
    # Not in pytest's temporary directory, which only its user can enter.
    outside = Path("/tmp") / f"outside-{os.getpid()}-{request.param.replace(' ', '-')}"
    outside.mkdir()
    outside.chmod(0o777)
    for name, mode in MODES.items():
        (outside / name).write_text(SECRET)
        (outside / name).chmod(mode)
        if "--user" in MACHINES[request.param]:
            os.chown(outside / name, USER, USER)
    environment = {"SECRET": SECRET, "TOOLROLL_SANDBOX_TOKEN": SECRET}
    options = ("--fronts", "2", "--session-ttl", "2")
    with serving(*options, environment=environment, wrapper=MACHINES[request.param]) as server:
        found = re.search(r"isolation +tier (\w)", server.startup_output)
        assert found
        machine = Machine(request.param, server, found[1], outside, {})
        asyncio.run(warm_up(machine))
        pids = [one.pid for one in machine.own_processes()]
        assert any(map(directories_of, pids))
        yield machine
    for file in (*outside.iterdir(), outside):
        file.rmdir() if file.is_dir() else file.unlink()
    assert not any(map(directories_of, pids))


async def warm_up(machine: Machine) -> None:
    """Make the server create everything that it keeps, so that later growth is due to an attack."""
    async with SandboxClient(machine.server.url, token=SECRET) as client:
        for code in ("import time; time.sleep(0.3)", "import numpy, time; time.sleep(0.3)"):
            await asyncio.gather(*(client.run(code) for _ in range(8)))
        await client.run_jupyter(["1"])
    previous: dict[str, int] = {}
    while (now := machine.traces()) != previous:
        previous = now
        await asyncio.sleep(0.5)
    machine.before = now


@pytest.fixture
async def client(machine: Machine) -> AsyncIterator[SandboxClient]:
    """Return a client. After each attack, check that the server works as before."""
    zygotes = machine.zygotes()
    assert zygotes
    client = SandboxClient(machine.server.url, token=SECRET)
    yield client
    after = await client.run("print(6 * 7)")
    await client.close()
    for name, mode in MODES.items():
        (machine.outside / name).write_text(SECRET)
        (machine.outside / name).chmod(mode)
    assert (after.outcome, after.stdout, after.attempts) == (ExecutionOutcome.OK, "42\n", 1)
    assert machine.zygotes() == zygotes, "a zygote was killed"


def test_machine_has_expected_tier(machine: Machine) -> None:
    assert machine.tier in TIERS[machine.name]


# Each program tries to access something forbidden, and prints everything that it could access.
GRABS = {
    "the secrets of the server's environment": """
        for path in ["/proc/self/environ", *glob.glob("/proc/[0-9]*/environ"), f"/proc/{SERVER}/environ"]:
            got(path, lambda: re.search("correct-horse-" + "battery", open(path).read()))
        got("environment", lambda: re.search("correct-horse-" + "battery", str(os.environ)))
        """,
    "the server's command line and memory": """
        for name in ("mem", "maps", "cwd", "root", "exe", "fd/0", "auxv", "stack"):
            got(name, lambda: open(f"/proc/{SERVER}/{name}", "rb").read(1))
            got(name, os.readlink, f"/proc/{SERVER}/{name}")
        """,
    "files of the machine": """
        for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh/ssh_host_rsa_key", f"{HOME}/.bashrc",
                     f"{OUTSIDE}/private", f"{OUTSIDE}/public", f"{CHECKOUT}/pyproject.toml", "/var/lib/dpkg/status",
                     "/proc/self/root/etc/shadow", "/proc/1/root/etc/shadow", f"/proc/{SERVER}/root/etc/shadow",
                     "/proc/kcore", "/proc/kmsg"):
            got(path, lambda: open(path, "rb").read(1))
        for path, names in FILES.items():
            got(path, lambda: set(os.listdir(path)) & set(names))
        got("the machine's users", lambda: [line for line in open("/etc/passwd") if "daemon" in line])
        """,
    "changes to files of the machine": """
        for path in (f"{OUTSIDE}/private", f"{OUTSIDE}/public"):
            for change in (lambda: open(path, "a"), lambda: os.unlink(path), lambda: os.truncate(path, 0),
                           lambda: os.link(path, "mine"),
                           lambda: os.rename(path, f"{OUTSIDE}/other"), lambda: os.rename(path, "mine"),
                           lambda: os.setxattr(path, "user.mine", b"1"), lambda: os.chown(path, os.getuid(), -1)):
                did(path, change)
        for change in (lambda: open(f"{OUTSIDE}/new", "w"), lambda: os.mkdir(f"{OUTSIDE}/new"),
                       lambda: os.symlink("/", f"{OUTSIDE}/new"), lambda: os.mkfifo(f"{OUTSIDE}/new")):
            did("something new", change)
        """,
    "changes to modes and times of files": """
        for path in (f"{OUTSIDE}/private", f"{OUTSIDE}/public"):
            did(path, os.chmod, path, 0o777)
            did(path, os.utime, path, (0, 0))
        """,
    "changes to the system and the interpreter": """
        for directory in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/var", sys.prefix, sys.base_prefix,
                          os.path.dirname(os.__file__), os.path.dirname(sys.executable)):
            got(directory, open, f"{directory}/mine", "w")
            did(directory, os.chmod, directory, 0o777)
            did(directory, os.utime, directory, (0, 0))
        for path in (os.__file__, sys.executable, "/usr/bin/env", "/dev/null", "/dev/urandom"):
            did(path, os.unlink, path)
            did(path, os.chmod, path, 0o777)
            did(path, os.rename, path, path + "1")
        got("site-packages", open, os.__file__, "a")
        """,
    "devices": """
        for name in ("mem", "kmem", "port", "kmsg", "tty", "console", "tty0", "vda", "sda", "kvm", "fuse", "ptmx",
                     "loop0", "net/tun", "vhost-vsock", "userfaultfd", "snapshot", "nvram", "rtc0", "watchdog"):
            got(name, os.open, f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK)
        for kind in (stat.S_IFBLK, stat.S_IFCHR):
            did("a new device", os.mknod, "device", kind | 0o600, os.makedev(1, 1))
        """,
    "the kernel's settings": """
        for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
                     "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/hostname",
                     "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/ns_last_pid", "/proc/sys/fs/file-max",
                     "/proc/self/oom_score_adj", "/proc/self/uid_map", "/proc/self/mem", "/proc/1/oom_score_adj",
                     "/proc/self/attr/current", "/proc/self/loginuid", "/sys/kernel/uevent_helper", "/sys/power/state"):
            got(path, os.open, path, os.O_WRONLY)
        """,
    "a way out of its cgroup": """
        for path in glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True) or ["/sys/fs/cgroup/cgroup.procs"]:
            got(path, os.open, path, os.O_WRONLY)
        for kind in ("cgroup", "cgroup2", "tmpfs", "proc", "sysfs", "overlay", "bpf"):
            got(kind, lambda: libc.mount(b"none", b".", kind.encode(), 0, None) == 0)
        """,
    "another root": """
        os.mkdir("root")
        did("chroot", os.chroot, "root")
        did("fchdir", lambda: (os.chroot("root"), [os.chdir("..") for _ in range(64)], os.chroot(".")))
        got("bind", lambda: libc.mount(b"/", b"root", None, 0x5000, None) == 0)
        got("unmount", lambda: any(libc.umount2(path, 2) == 0 for path in (b"/tmp", b"/proc", b"/", b"/dev/null")))
        """,
    "more rights": """
        for line in open("/proc/self/status"):
            name, _, value = line.partition(":")
            if name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
                got(line, lambda: int(value, 16))
            if name in ("NoNewPrivs", "Seccomp"):
                got(line, lambda: int(value) == 0)
        got("root", lambda: 0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()))
        for become in (os.setuid, os.setgid, os.seteuid, os.setegid):
            did("root", become, 0)
        did("groups", os.setgroups, [0])
        for command in (["su", "-c", "true"], ["mount", "-t", "tmpfs", "none", "."], ["unshare", "-r", "true"],
                        ["unshare", "-n", "true"], ["chroot", "/", "true"], ["sudo", "-n", "true"], ["newgrp"],
                        ["nsenter", "-t", "1", "-m", "true"]):
            got(command, lambda: subprocess.run(command, input=b"", capture_output=True).returncode == 0)
        shutil.copy("/usr/bin/id", "mine")
        os.chmod("mine", 0o6755)
        got("set-uid", lambda: b"uid=0" in subprocess.run(["./mine"], capture_output=True).stdout)
        """,
    "higher limits": """
        for name in ("CORE", "NPROC", "NOFILE", "FSIZE", "MSGQUEUE", "MEMLOCK", "DATA", "AS"):
            number = getattr(resource, f"RLIMIT_{name}", 12)
            soft, hard = resource.getrlimit(number)
            if hard != -1:
                got(name, lambda: resource.setrlimit(number, (hard, hard + 1)) or True)
                got(name, lambda: resource.setrlimit(number, (-1, -1)) or True)
        """,
    "a better place in the queue": """
        did("nice", os.nice, -1)
        did("nice of the server", os.setpriority, os.PRIO_PROCESS, SERVER, 19)
        for policy in (os.SCHED_FIFO, os.SCHED_RR):
            did("real time", os.sched_setscheduler, 0, policy, os.sched_param(1))
        got("real-time I/O", lambda: libc.syscall(NUMBERS["ioprio_set"], 1, 0, 1 << 13) == 0)
        """,
    "power over the server": """
        for pid in PROCESSES:
            got("its limits", lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))
            got("its processors", lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)) or True)
            got("its policy", lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)) or True)
            got("its priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 0) or True)
            got("its I/O", lambda: libc.syscall(NUMBERS["ioprio_set"], 1, pid, 2 << 13) == 0)
            got("a signal", lambda: os.kill(pid, signal.SIGTERM) or True)
            got("a signal", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGTERM) or True)
        """,
    "the network": """
        for address in ("127.0.0.1", "::1", *ADDRESSES, "10.0.0.1", "169.254.169.254", "1.1.1.1", "2606:4700::1111"):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            def connect(port):
                with socket.socket(family) as tcp:
                    tcp.settimeout(0.2)
                    tcp.connect((address, port))
                    return True
            def send():
                with socket.socket(family, socket.SOCK_DGRAM) as udp:
                    udp.settimeout(0.05)
                    udp.sendto(b"?" * 12, (address, 53))
                    return udp.recv(99)
            for port in (PORT, 22, 80):
                got((address, port), connect, port)
            got((address, "DNS"), send)
        got("a name", socket.getaddrinfo, "example.com", 80)
        """,
    "sockets of odd families": """
        for family in range(1, 50):
            if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
                continue
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                for protocol in (0, 1, 3, 9, 12, 16):
                    got((family, kind, protocol), lambda: socket.socket(family, kind, protocol).close() or True)
                    got((family, kind, protocol), lambda: socket.socketpair(family, kind, protocol) and True)
        sock_packet = 10  # the kernel turns this type of AF_INET into AF_PACKET
        got("packet", lambda: socket.socket(socket.AF_INET, sock_packet, socket.htons(3)).close() or True)
        for protocol in (1, 6, 255):
            got("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol).close() or True)
        """,
    "system calls": """
        for name, number in CALLS.items():
            ctypes.set_errno(0)
            first = 0x10000000 if name == "unshare" else 0  # the only namespace that any user may create
            got(name, lambda: libc.syscall(number, first, 0, 0, 0, 0, 0) >= 0 or
                ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS) and errno.errorcode[ctypes.get_errno()])
        """,
    "namespaces by clone": """
        for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x30000000, 0x40000000):
            pid = libc.syscall(NUMBERS["clone"], bit | signal.SIGCHLD, 0, 0, 0, 0)
            if pid == 0:
                os._exit(0)
            got(hex(bit), lambda: pid > 0)
        arguments = struct.pack("=11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
        pid = libc.syscall(435, arguments, len(arguments))
        if pid == 0:
            os._exit(0)
        got("clone3", lambda: pid > 0)
        """,
    "system calls of another kind": """
        if platform.machine() == "x86_64":
            code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            code.write(bytes.fromhex("b814000000cd80c3"))  # getpid, as 32-bit programs call it
            by_interrupt = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
            for call in (by_interrupt, lambda: libc.syscall(0x40000000 | 39)):
                pid = os.fork()
                if pid == 0:
                    os._exit(int(call() == os.getpid()))
                got("another kind", lambda: os.waitpid(pid, 0)[1] == 256)
        """,
    "other processes' memory": """
        parent = os.getpid()
        for pid in (1, os.getppid(), SERVER):
            got("memory", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
            got("maps", lambda: open(f"/proc/{pid}/maps").read(1))
            got("descriptors", lambda: [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")])
        """,
}
PRELUDE = dedent(
    """
    import ctypes, errno, glob, mmap, os, platform, re, resource, shutil, signal, socket, stat, struct, subprocess
    import sys, threading, time

    libc = ctypes.CDLL(None, use_errno=True)

    def got(what, attempt, *arguments):
        try:
            result = attempt(*arguments)
        except (OSError, ValueError):
            return
        if result:
            print("GOT", what, str(result)[:80])

    def did(what, attempt, *arguments):
        got(what, lambda: (attempt(*arguments),))
    """
)
REFUSED_CALLS = """
acct add_key bpf clock_settime delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module
io_setup io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
lookup_dcookie mbind memfd_secret migrate_pages modify_ldt mount mount_setattr move_mount move_pages
name_to_handle_at open_by_handle_at open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise
process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot request_key set_mempolicy setdomainname
sethostname setns settimeofday swapoff swapon syslog umount2 unshare userfaultfd ustat uselib vhangup clone3
lsm_set_self_attr listmount statmount open_tree_attr
"""
ARCHITECTURE = pyseccomp.Arch.AARCH64 if platform.machine() == "aarch64" else pyseccomp.Arch.X86_64


def number_of(call: str) -> int:
    """Return the number of a system call, negative if this machine or libseccomp does not have it."""
    return int(pyseccomp.resolve_syscall(ARCHITECTURE, call))


NUMBERS = {name: number_of(name) for name in ("clone", "ioprio_set", "shmget", "exit")}
CALLS = {name: number for name in REFUSED_CALLS.split() if (number := number_of(name)) >= 0}


def attack(machine: Machine, code: str) -> str:
    return f"{PRELUDE}{machine.facts}NUMBERS = {NUMBERS}\nCALLS = {CALLS}\n{dedent(code)}"


# Documented in docs/sandbox.md: the program runs as the same user, isolated only by Landlock.
NOT_PREVENTED = {("a user in a container", "changes to modes and times of files")}


@pytest.mark.parametrize("name", GRABS)
async def test_program_cannot_access(name: str, machine: Machine, client: SandboxClient) -> None:
    done = await client.run(attack(machine, GRABS[name]))
    if (machine.name, name) in NOT_PREVENTED:
        assert done.stdout, "isolation is better than documented"
        return
    assert done.stdout == ""
    assert (done.outcome, done.stderr) == (ExecutionOutcome.OK, ""), "the attack itself is broken"
    assert {one.name: one.read_text() for one in machine.outside.iterdir()} == {"private": SECRET, "public": SECRET}
    assert stat.S_IMODE((machine.outside / "private").stat().st_mode) == 0o600


async def test_program_cannot_change_priorities_of_others(machine: Machine, client: SandboxClient) -> None:
    def priorities() -> dict[int, tuple[int, int]]:
        pids = {machine.server.process.pid, *machine.zygotes()}
        return {pid: (os.getpriority(os.PRIO_PROCESS, pid), psutil.Process(pid).ionice().ioclass) for pid in pids}

    before = priorities()
    code = """
        user, group = os.getuid(), os.getpgrp()
        for which, who in ((os.PRIO_USER, 0), (os.PRIO_USER, user), (os.PRIO_PGRP, 0), (os.PRIO_PGRP, group)):
            did((which, who), os.setpriority, which, who, 7)
            libc.syscall(NUMBERS["ioprio_set"], which + 1, who, 3 << 13)  # idle
        for pid in PROCESSES:
            did(pid, os.setpriority, os.PRIO_PROCESS, pid, 7)
            libc.syscall(NUMBERS["ioprio_set"], 1, pid, 3 << 13)
        """
    done = await client.run(attack(machine, code))
    assert (done.outcome, done.stderr) == (ExecutionOutcome.OK, ""), "the attack itself is broken"
    assert priorities() == before


# Name → exit status (None for a timeout) and program. Each ends soon, as a failure of the program with this status.
ENDS: dict[str, tuple[int | None, str]] = {
    "a loop that ignores signals": (
        None,
        """
        for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
        while True: pass
        """,
    ),
    "a loop with all signals blocked": (None, "signal.pthread_sigmask(0, range(1, 65))\nwhile True: pass"),
    "stops itself": (None, "os.kill(os.getpid(), signal.SIGSTOP)"),
    "stops its parent and all others": (None, "for pid in (os.getppid(), 1, -1, 0): did(0, os.kill, pid, 19)"),
    "kills its group": (-9, "os.killpg(0, 9)"),
    "kills all that it can": (3, "did('', os.kill, -1, 9)\nos._exit(3)"),
    "kills its parents": (3, "for pid in {os.getppid(), 1} - {0}: did(pid, os.kill, pid, 9)\nos._exit(3)"),
    "kills by every number": (
        3,
        """
        for pid in range(1, 5000):
            if pid != os.getpid(): did(pid, os.kill, pid, 9)
        os._exit(3)
        """,
    ),
    "every signal to the first process": (
        3,
        """
        for pid in {os.getppid(), 1} - {0}:
            for number in range(1, 65): did(pid, os.kill, pid, number)
        time.sleep(0.1)
        os._exit(3)
        """,
    ),
    "aborts": (-6, "os.abort()"),
    "recursion without a limit": (
        -11,
        """
        sys.setrecursionlimit(10**9)
        class A:
            def __repr__(self): return repr(self)
        repr(A())
        """,
    ),
    "a jump to nowhere": (-11, "ctypes.CFUNCTYPE(None)(1)()"),
    "a call that isn't there": (4, "libc.syscall(999_999)\nos._exit(4)"),
    "closes its streams": (5, "for fd in range(3): os.close(fd)\nos._exit(5)"),
    "leaves its main thread": (
        None,
        """
        threading.Thread(target=time.sleep, args=(60,)).start()
        libc.syscall(NUMBERS["exit"], 0)
        """,
    ),
    "another thread executes a program": (
        6,
        """
        threading.Thread(target=os.execv, args=("/bin/sh", ["sh", "-c", "exit 6"])).start()
        time.sleep(9)
        """,
    ),
    "a process of an odd name": (
        7,
        """
        libc.prctl(15, b") R 1 1 \\n\\xff", 0, 0, 0)
        os.fork() or time.sleep(60)
        os._exit(7)
        """,
    ),
    "zombies": (8, "for _ in range(150): os.fork() or os._exit(0)\nos._exit(8)"),
    "children that are never waited for": (
        8,
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(150): os.fork() or os._exit(0)
        os._exit(8)
        """,
    ),
    "a child that is the reaper": (
        8,
        """
        if os.fork() == 0:
            libc.prctl(36, 1, 0, 0, 0)
            os.setsid(), os.fork(), os.fork()
            time.sleep(60)
        os._exit(8)
        """,
    ),
    "a child in another session that keeps stdout": (
        9,
        """
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
        os._exit(9)
        """,
    ),
    "10,000 open files": (
        errno.EMFILE,
        """
        try: kept = [open("/dev/null") for _ in range(10_000)]
        except OSError as error: os._exit(error.errno)
        """,
    ),
    "10,000 threads": (
        11,
        """
        try:
            for _ in range(10_000): threading.Thread(target=time.sleep, args=(60,)).start()
        except RuntimeError: os._exit(11)
        """,
    ),
    "10 GB of memory": (1, "x = bytearray(10 << 30)"),
    "locked memory": (10, "os._exit(10 + (libc.mlock(ctypes.create_string_buffer(1 << 20), 1 << 20) == 0))"),
    "messages of success": (
        12,
        """
        for fd in range(256):
            for message in (b'{"status": 0, "seconds": 0, "cpu": 0}', b'{"error": "x"}', b'{"files": {}}'):
                for of in ("self", "1", os.getppid()):
                    did("", lambda: open(f"/proc/{of}/fd/{fd}", "wb").write(message + b"\\n"))
                did("", os.write, fd, message + b"\\n")
        os._exit(12)
        """,
    ),
    "removes all that it has": (
        13,
        """
        for path in (".", os.getcwd(), os.path.dirname(os.getcwd())): shutil.rmtree(path, ignore_errors=True)
        os._exit(13)
        """,
    ),
}
SIGNALLERS = [name for name in ENDS if re.search("kill|stop|signal to", name)]


def fetch_variants(machine: Machine) -> list[list[str]]:
    """Return lists of files to fetch. A program whose files are fetched runs under a supervisor, others do not."""
    return [[], ["main.py"]] if machine.name == "as it is" else [[]]


@pytest.mark.parametrize("name", ENDS)
async def test_crash_is_a_failure_of_the_program(name: str, machine: Machine, client: SandboxClient) -> None:
    status, code = ENDS[name]
    for fetch in fetch_variants(machine):
        began = time.monotonic()
        seconds = 0.4 if status is None else 60
        done = await client.run(attack(machine, code), run_timeout=seconds, fetch_files=fetch)
        assert time.monotonic() - began < 30, "the response waited for the timeout or for a child"
        assert done.attempts == 1
        if fetch and name in SIGNALLERS:  # the program may kill its supervisor
            assert done.outcome in (ExecutionOutcome.FAILED, ExecutionOutcome.TIMEOUT)
        elif status is None:
            assert (done.outcome, done.return_code) == (ExecutionOutcome.TIMEOUT, None)
        else:
            assert done.outcome in (ExecutionOutcome.FAILED, ExecutionOutcome.OUT_OF_MEMORY)
            assert done.return_code == status, done.stderr


BLOCKED = """
os.mkfifo("fifo")
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)])
"""


async def test_program_that_blocks_itself_is_a_timeout(machine: Machine, client: SandboxClient) -> None:
    """In the kernel, it waits like a program on a slow disk."""
    done = await client.run(attack(machine, BLOCKED), run_timeout=0.4, wall_timeout=3)
    assert (done.outcome, done.return_code, done.attempts) == (ExecutionOutcome.TIMEOUT, None, 1)


LEAVES = {
    "a daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                stay()
            os._exit(0)
        os.wait()
        time.sleep(0.1)
        """,
    "a daemon that is started at the very end": """
        import atexit
        atexit.register(lambda: os.fork() == 0 and (os.setsid(), stay()))
        """,
    "many": """
        for _ in range(60):
            if os.fork() == 0:
                os.setsid()
                stay()
        time.sleep(0.3)
        """,
    "a sibling": f"""
        if libc.syscall({NUMBERS["clone"]}, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:  # CLONE_PARENT
            stay()
        time.sleep(0.1)
        """,
    "a stopped process": """
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            stay()
        time.sleep(0.1)
        """,
}


def running(mark: str) -> list[int]:
    """Return the processes of this machine with `mark` among their arguments."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "cmdline").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("name", LEAVES)
async def test_program_leaves_no_process(name: str, machine: Machine, client: SandboxClient) -> None:
    for fetch in fetch_variants(machine):
        mark = f"{os.getpid()}.{time.monotonic_ns()}"
        stay = f"def stay():\n    os.execv('/bin/sh', ['sh', '-c', 'sleep 600; true', '{mark}'])\n"
        done = await client.run(PRELUDE + stay + dedent(LEAVES[name]), fetch_files=fetch, run_timeout=60)
        assert done.outcome is ExecutionOutcome.OK, done.stderr
        assert done.execution_time < 30, "the response waited for a process that was left"
        assert wait_until(lambda: not running(mark))  # noqa: B023 (called at once)


BOMBS = {
    "that grows": """
        while time.time() < ends:
            try: os.fork()
            except OSError: pass
        """,
    "that moves": """
        while time.time() < ends:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
        """,
    "that flees": """
        os.fork(), os.fork()
        while time.time() < ends:
            try:
                if os.fork() and os.getpid() % 3:
                    os.setsid()
                    os._exit(0)
            except OSError: pass
        """,
    "of threads": """
        def grow():
            while time.time() < ends:
                try: _thread.start_new_thread(grow, ())
                except RuntimeError: pass
        grow()
        """,
}


@pytest.mark.parametrize("name", BOMBS)
async def test_fork_bomb_is_bounded_and_killed(name: str, machine: Machine, client: SandboxClient) -> None:
    # The bomb ends by itself, so that it does not stay on this machine if the server fails.
    prelude = (
        "import _thread, os, signal, time\nends = time.time() + 20\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    )
    code = prelude + dedent(BOMBS[name])
    began = time.monotonic()
    running = asyncio.create_task(client.run(code, run_timeout=0.7, deadline=began + 30))
    max_processes = 0
    while not running.done():
        max_processes = max(max_processes, len(machine.server.processes()))
        await asyncio.sleep(0.1)
    done = running.result()
    assert time.monotonic() - began < 15, "the bomb ended by itself"
    assert done.attempts == 1
    assert max_processes < machine.before["processes"] + 300
    assert wait_until(lambda: len(machine.server.processes()) <= machine.before["processes"])


async def test_programs_share_no_state(machine: Machine, client: SandboxClient) -> None:
    """A program finds no files, shared memory or abstract sockets of another one."""
    leave = """
        import tempfile, time
        for directory in {".", tempfile.gettempdir(), "/tmp", "/dev/shm", "/var/tmp"}:
            try: open(f"{directory}/left-behind", "w").write("here")
            except OSError: pass
        try:
            kept = socket.socket(socket.AF_UNIX)
            kept.bind("\\0left-behind")
            kept.listen()
        except OSError: pass
        key = libc.syscall(NUMBERS["shmget"], SERVER, 1 << 20, 0o1666)
        print(os.getcwd(), os.getpid(), flush=True)
        time.sleep(SECONDS)
        """
    look = """
        for directory in (".", "..", "/tmp", "/dev/shm", "/var/tmp", *glob.glob("/tmp/*"), WHERE, f"/proc/{PID}/cwd"):
            got(directory, open, f"{directory}/left-behind")
        if PID != os.getpid():
            got("its streams", lambda: PID in [int(name) for name in os.listdir("/proc") if name.isdigit()]
                and os.readlink(f"/proc/{PID}/fd/1"))
            got("its environment", lambda: open(f"/proc/{PID}/environ").read())
            got("its life", lambda: CONCURRENT and TIER == "C" and (os.kill(PID, 9) or True))
        got("its socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0left-behind") or True)
        got("its shared memory", lambda: libc.syscall(NUMBERS["shmget"], SERVER, 0, 0) >= 0)
        """
    found = []
    for concurrent in (True, False):
        leaving = asyncio.create_task(client.run(attack(machine, f"SECONDS = {int(concurrent)}\n{dedent(leave)}")))
        await asyncio.sleep(0.4) if concurrent else await leaving
        where, pid = "/tmp/work", 2
        if not concurrent:
            where, number = leaving.result().stdout.split()
            pid = int(number)
        elif machine.tier == "C":
            directories = [directory for one in machine.server.fronts() for directory in directories_of(one.pid)]
            where = str(next(each for directory in directories for each in directory.iterdir()))
        facts = f"WHERE, PID, CONCURRENT, TIER = {where!r}, {pid}, {concurrent}, {machine.tier!r}\n"
        found.append(await client.run(attack(machine, facts + dedent(look))))
        assert (await leaving).outcome is ExecutionOutcome.OK
    for directory in ("/tmp", "/dev/shm", "/var/tmp"):
        assert not Path(directory, "left-behind").exists()
    key = machine.server.process.pid
    removed = subprocess.run(["ipcrm", "-M", str(key)], capture_output=True)
    assert [(one.stdout, one.stderr) for one in found] == [("", "")] * 2
    assert removed.returncode != 0, "shared memory was left on the host"


@contextmanager
def listening(outside: Path) -> Iterator[list[socket.socket]]:
    """Open sockets on the host that any user can reach: paths and abstract names, streams and datagrams, and UDP."""
    sockets = []
    names = [f"{outside}/stream", f"{outside}/datagram", f"\0outside-{os.getpid()}", f"\0outside-{os.getpid()}d"]
    for number, name in enumerate(names):
        sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if number % 2 else socket.SOCK_STREAM))
        sockets[-1].bind(name)
        if name.startswith("/"):
            os.chmod(name, 0o777)
    sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sockets[-1].bind(("127.0.0.1", 0))
    for one in sockets:
        one.setblocking(False)
        if one.type == socket.SOCK_STREAM:
            one.listen()
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()
        for name in names[:2]:
            Path(name).unlink()


async def test_sockets_of_the_host_are_unreachable(machine: Machine, client: SandboxClient) -> None:
    with listening(machine.outside) as sockets:
        names = [one.getsockname() for one in sockets]
        code = f"""
        for number, name in enumerate({names}):
            kind = socket.SOCK_DGRAM if number % 2 or number == 4 else socket.SOCK_STREAM
            try: socket.socket(socket.AF_INET if number == 4 else socket.AF_UNIX, kind).connect(name)
            except OSError: pass
            for make in (lambda: socket.socket(socket.AF_INET if number == 4 else socket.AF_UNIX, socket.SOCK_DGRAM),
                         lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0],
                         lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0]):
                try: make().sendto(b"hello", name)
                except (OSError, TypeError): pass
        """
        done = await client.run(attack(machine, code))
        assert (done.outcome, done.stderr) == (ExecutionOutcome.OK, "")
        for one in sockets:
            with pytest.raises(BlockingIOError):
                one.accept() if one.type == socket.SOCK_STREAM else one.recv(9)


async def test_deeply_nested_directories_are_removed(machine: Machine, client: SandboxClient) -> None:
    deeper = "os.mkdir('d'), os.chmod('.', 0o300), os.chdir('d')"
    code = f"import os\nfor _ in range(3000): {deeper}\nprint(1)"
    done = await client.run(code, run_timeout=20)
    assert done.stdout == "1\n"
    assert wait_until(lambda: machine.traces()["directories"] <= machine.before["directories"])


async def run_during(
    client: SandboxClient, work: str, *, seconds: float, report_figure: Callable[[str], None]
) -> Execution:
    """Run a program while `work` runs, for `seconds`; on a busy machine, for longer."""
    for timeout in (seconds, 5 * seconds):
        other = asyncio.create_task(client.run(work, run_timeout=timeout))
        await asyncio.sleep(1)
        await client.ping()
        done = await client.run("print(sum(range(10**6)))")
        assert (done.outcome, done.stdout) == (ExecutionOutcome.OK, "499999500000\n")
        served_meanwhile = not other.done()
        ended = await other
        if served_meanwhile:
            return ended
        report_figure(f"another program was not served within {timeout - 1:g} s")
    raise AssertionError("the program was not served before the other one ended")


HOGS = {
    "endless output": "while True: os.write(1, b'x' * 65536)",
    "endless output on both": "os.fork()\nwhile True: os.write(1, b'x' * 65536); os.write(2, b'x')",
    "endless small output": "while True: os.write(1, b'x')",
    "many processes that calculate": """
        for _ in range(100):
            if os.fork() == 0:
                while True: pass
        time.sleep(60)
        """,
}


@pytest.mark.parametrize("name", HOGS)
async def test_other_programs_are_served_meanwhile(
    name: str, machine: Machine, client: SandboxClient, report_figure: Callable[[str], None]
) -> None:
    # Without a CPU share per program, a hundred processes take most of the machine, and the other program is slower.
    seconds = 6 if "processes" in name else 3
    done = await run_during(
        client, f"import os, time\n{dedent(HOGS[name])}", seconds=seconds, report_figure=report_figure
    )
    assert done.outcome is ExecutionOutcome.TIMEOUT
    if "output" in name:
        assert done.stdout_truncated
        assert len(done.stdout) == 1 << 20


PER_USER_RESOURCES = {
    "timers": "libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0",
    "descriptors in flight": "socket.send_fds(new_pair()[0], [b'x'], [0] * 200) == 1",
    "memory of pipes": "fcntl.fcntl(new_pipe()[1], F_SETPIPE_SZ, 1 << 20) == 1 << 20",
    "processes": "start_process()",
}
"""What the kernel counts for each user → an expression that takes one of it. It is true or raises OSError."""
TAKE = """
import ctypes, fcntl, os, signal, socket, time
F_SETPIPE_SZ = 1031
libc, kept = ctypes.CDLL(None), []

def new_pair():
    kept.append(socket.socketpair())
    return kept[-1]

def new_pipe():
    kept.append(os.pipe())
    return kept[-1]

def start_process():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    return pid > 0

def take(count):
    taken = 0
    try:
        while taken < count and EXPRESSION:
            taken += 1
    except OSError:
        pass
    return taken
"""


@pytest.mark.parametrize("name", PER_USER_RESOURCES)
async def test_per_user_resources_are_not_exhausted(name: str, machine: Machine, client: SandboxClient) -> None:
    if any("per user" in gap for gap in (await client.ping()).gaps):
        pytest.skip("a gap of this tier, which the server reports")
    code = TAKE.replace("EXPRESSION", PER_USER_RESOURCES[name])
    taking = asyncio.create_task(client.run(f"{code}\nprint(take(200_000), flush=True)\ntime.sleep(2)"))
    await asyncio.sleep(1)
    other = await client.run(f"{code}\nprint(take(1))")
    taken = await taking
    assert 0 < int(taken.stdout) < 200_000, "the limit of this user was reached"
    assert other.stdout == "1\n", other.stderr


async def test_programs_have_different_users(machine: Machine, client: SandboxClient) -> None:
    if any("per user" in gap for gap in (await client.ping()).gaps):
        assert "a user" in machine.name, "only a server that runs as root can assign users"
        return
    code = f"{name_process('has-own-user')}; import time; time.sleep(30)"
    runs = [asyncio.create_task(client.run(code, run_timeout=30)) for _ in range(2)]
    find = functools.partial(machine.server.processes_named, "has-own-user")
    assert await asyncio.to_thread(wait_until, lambda: len(find()) == 2)
    users = {process.uids().real for process in find()}
    for run in runs:
        run.cancel()
    assert len(users) == 2
    assert users.isdisjoint({0, 65534, USER})


async def test_forged_answers_harm_only_their_session(machine: Machine, client: SandboxClient) -> None:
    """A cell can write to the channel over which its answers are sent."""
    forged = [
        r'{"ok": true, "display": [{"a": "\ud800"}], "error": {"ename": "\udfff"}, "exit": null}',
        '{"ok": true, "display": [{"a": ' + "[" * 400 + "]" * 400 + "}]}",
        '{"ok": true, "display": [{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]}",
        '{"ok": true, "display": [{"a": NaN, "b": -Infinity, "c": 1e999}], "exit": 1' + "0" * 4000 + "}",
        '{"ok": 1, "display": {"a": 1}, "error": [1], "exit": true}',
        '{"ok": [], "display": [1, null], "error": {"a": 1}, "exit": "x"}',
        "[]", "null", "{", "", "\\xff",
    ]  # fmt: skip
    for number, answer in enumerate(forged):
        data = f"({answer!r}).encode('latin-1')" if "\\xff" not in answer else "b'\\xff'"
        cell = f"import os, struct\nd = {data}\nos.write(3, struct.pack('>I', len(d)) + d)"
        done = await client.run(cell, session_id=f"forged-{number}")
        assert done.attempts == 1
        notebook = await client.run_jupyter([cell])
        assert notebook.attempts == 1


LARGE_REPLIES = {
    "many values": """
        reply = b'{"ok": true, "display": [' + b"{}," * (20 << 20) + b"{}]}"
        data = memoryview(struct.pack(">I", len(reply)) + reply)
        while data: data = data[os.write(3, data):]
        """,
    "many bytes": """
        os.write(3, struct.pack(">I", 3 << 30))
        for _ in range(800): os.write(3, bytes(1 << 20))
        """,
}


@pytest.mark.parametrize("name", LARGE_REPLIES)
async def test_session_cannot_grow_memory_of_the_server(name: str, machine: Machine, client: SandboxClient) -> None:
    cell = f"import os, struct\n{dedent(LARGE_REPLIES[name])}"

    def memory() -> int:
        return sum(front.memory_info().rss for front in machine.server.fronts())

    before = peak = memory()
    running = asyncio.create_task(client.run(cell, session_id=client.new_session()))
    slowest = 0.0
    while not running.done():
        began = time.monotonic()
        await client.ping()
        slowest = max(slowest, time.monotonic() - began)
        peak = max(peak, memory())
        await asyncio.sleep(0.01)
    await running
    assert slowest < 1
    assert peak - before < 400 << 20


def test_no_resources_remain_at_the_end(machine: Machine) -> None:
    """Runs last: the server uses no more resources of the host than before the attacks."""

    def growth() -> dict[str, int]:
        before = machine.before
        return {name: now - before[name] for name, now in machine.traces().items() if now > before[name]}

    assert wait_until(lambda: not growth()), growth()
