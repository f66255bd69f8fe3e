"""Measure the minimum cost of an isolated execution: a zygote that clones itself into the jail repeatedly.

    python benchmarks/bare_fork.py COUNT

It needs neither server nor requests: each clone enters the jail, runs `print(1 + 1)` and exits, and the zygote waits
for it. Prints as JSON, in milliseconds:

- `cpu_ms_per_exec`: CPU time per execution, from the kernel's accounting.
- `wall_ms_per_exec`: median time of one execution at a time, in which the zygote also creates pipes for the standard
  streams and reads the output.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import sys
import time
from collections.abc import Sequence

from toolroll.sandbox.server.interpreter import script_runner
from toolroll.sandbox.server.interpreter.zygote import START_ENVIRONMENT, PidNamespace
from toolroll.sandbox.server.isolation import jail, syscalls
from toolroll.sandbox.server.job_spec import WORK, JailPlan, JobSpec

SPEC: JobSpec = {
    "kind": "script", "filename": "main.py", "code": "print(1 + 1)", "files": {}, "fetch": [], "fetch_limit": 0,
    "memory": 1 << 30, "memory_by_rlimit": False, "stages": [],
}  # fmt: skip
PATH = f"{WORK}/main.py"


def run_program(program_jail: jail.ProgramJail) -> None:
    """Enter the jail and run the program. Called in a clone."""
    program_jail.drop_privileges(program_jail.enter(SPEC))
    program_jail.set_rlimits(SPEC, is_python=True)
    script_runner.run(SPEC["code"], PATH)


class ProgramStarter:
    """Starts programs one after the other, as a zygote does, in one pid namespace.

    Args:
        plan: How programs are isolated.
    """

    def __init__(self, plan: JailPlan) -> None:
        jail.isolate_zygote(plan)
        self.jail = jail.ProgramJail(plan, jail.MemoryUse.current())
        gc.collect()
        gc.freeze()
        self.namespace = PidNamespace.create()
        self.own_namespace_fd = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def start(self, streams: Sequence[int] = ()) -> int:
        """Start a program and return its process id.

        Args:
            streams: Descriptors for its standard streams. By default it has those of this process.
        """
        syscalls.setns(self.namespace.namespace_fd, syscalls.CLONE_NEWPID)
        pid, pidfd = syscalls.clone(jail.PROGRAM_NAMESPACES)
        if pid == 0:
            if streams:
                for number, fd in enumerate(streams):
                    os.dup2(fd, number)
                syscalls.close_from(3)
            run_program(self.jail)
        syscalls.setns(self.own_namespace_fd, syscalls.CLONE_NEWPID)
        os.close(pidfd)
        return pid

    def run(self) -> None:
        """Run a program without pipes."""
        check_end(self.start())

    def run_with_pipes(self) -> None:
        """Run a program and read its output."""
        (stdin, stdin_writer), (stdout_reader, stdout), (stderr_reader, stderr) = os.pipe(), os.pipe(), os.pipe()
        pid = self.start((stdin, stdout, stderr))
        for fd in (stdin, stdin_writer, stdout, stderr):
            os.close(fd)
        outputs = []
        for fd in (stdout_reader, stderr_reader):
            with io.FileIO(fd) as stream:
                outputs.append(stream.readall())
        check_end(pid)
        assert outputs == [b"2\n", b""], outputs


def check_end(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert status == 0, status


def measure(plan: JailPlan, count: int) -> dict[str, float]:
    """Return the figures of `count` executions of each kind."""
    programs = ProgramStarter(plan)
    for _ in range(20):
        programs.run()
    cpu_before = cpu_seconds()
    for _ in range(count):
        programs.run()
    cpu_s = cpu_seconds() - cpu_before
    wall_times_s = []
    for _ in range(count):
        started_at = time.perf_counter()
        programs.run_with_pipes()
        wall_times_s.append(time.perf_counter() - started_at)
    return {"cpu_ms_per_exec": cpu_s / count * 1000, "wall_ms_per_exec": sorted(wall_times_s)[count // 2] * 1000}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def find_plan() -> JailPlan:
    """Return how a server on this machine would isolate programs."""
    import asyncio

    from toolroll.sandbox.server.execution import isolation_tiers
    from toolroll.sandbox.server.settings import ServerSettings

    return asyncio.run(isolation_tiers.find(ServerSettings())).plan


def main() -> None:
    if len(sys.argv) == 2:  # restart without the modules that find_plan() imported, and as zygotes are started
        arguments = [sys.executable, "-X", "utf8", *sys.argv, json.dumps(find_plan())]
        os.execve(sys.executable, arguments, {**os.environ, **START_ENVIRONMENT})
    count, plan = int(sys.argv[1]), json.loads(sys.argv[2])
    result = os.dup(1)
    unread = os.pipe()
    os.dup2(unread[1], 1)
    script_runner.open_streams()
    script_runner.install_main_module(PATH)
    os.write(result, json.dumps(measure(plan, count)).encode())


if __name__ == "__main__":
    main()
