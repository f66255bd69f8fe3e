"""Measure the minimum cost of an isolated execution: a zygote that clones itself into the jail repeatedly.

    python benchmarks/bare_fork.py COUNT

It needs neither server nor requests nor pipes: each clone enters the jail, runs `print(1 + 1)` and exits, and the
zygote waits for it. Prints the CPU time per execution in milliseconds, from the kernel's accounting, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys

from toolroll.sandbox.server.interpreter import script_runner
from toolroll.sandbox.server.interpreter.zygote import PidNamespace
from toolroll.sandbox.server.isolation import jail, syscalls
from toolroll.sandbox.server.job_spec import JailPlan, JobSpec

SPEC: JobSpec = {
    "kind": "script", "filename": "main.py", "code": "print(1 + 1)", "files": {}, "fetch": [], "fetch_limit": 0,
    "memory": 1 << 30, "memory_by_rlimit": False, "stages": [],
}  # fmt: skip


def run_program(plan: JailPlan) -> None:
    """Enter the jail and run the program. Called in a clone."""
    directory = jail.enter(plan, SPEC)
    jail.drop_privileges(plan, directory)
    jail.set_rlimits(plan["limits"], SPEC, jail.MemoryUse(1 << 30, 1 << 30))
    script_runner.run(SPEC["code"], f"{directory}/main.py")


def run_all(plan: JailPlan, count: int) -> float:
    """Return the CPU time of `count` executions, in seconds."""
    jail.isolate_zygote(plan)
    gc.collect()
    gc.freeze()
    namespace = PidNamespace.create()
    own_namespace_fd = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def once() -> None:
        syscalls.setns(namespace.namespace_fd, syscalls.CLONE_NEWPID)
        pid, pidfd = syscalls.clone(jail.PROGRAM_NAMESPACES)
        if pid == 0:
            run_program(plan)
        syscalls.setns(own_namespace_fd, syscalls.CLONE_NEWPID)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        assert status == 0, status

    for _ in range(20):
        once()
    before = cpu_seconds()
    for _ in range(count):
        once()
    return cpu_seconds() - before


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
    if len(sys.argv) == 2:  # restart without the modules that find_plan() imported
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv, json.dumps(find_plan())])
    count, plan = int(sys.argv[1]), json.loads(sys.argv[2])
    result = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.set_blocking(reading, False)
    script_runner.open_streams()
    seconds = run_all(plan, count)
    os.write(result, json.dumps({"cpu_ms_per_exec": seconds / count * 1000}).encode())


if __name__ == "__main__":
    main()
