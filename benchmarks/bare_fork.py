"""The least that an isolated execution costs: a warm interpreter that clones itself into the jail, over and over.

    python benchmarks/bare_fork.py COUNT

No server, no request, no pipes: each clone enters the jail, runs `print(1 + 1)` and ends; the interpreter waits for it.
Prints the CPU milliseconds per execution, from the kernel's accounting, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys

from toolroll.sandbox.server import jail, kernel, program
from toolroll.sandbox.server.spec import Plan, Spec
from toolroll.sandbox.server.warm import PidNamespace

SPEC: Spec = {
    "kind": "script", "filename": "main.py", "code": "print(1 + 1)", "files": {}, "fetch": [], "fetch_limit": 0,
    "memory": 1 << 30, "memory_by_rlimit": False, "stages": [],
}  # fmt: skip


def run_program(plan: Plan) -> None:
    """In a clone: into the jail, and be the program."""
    directory = jail.enter(plan, SPEC)
    jail.lock(plan, directory)
    jail.limit(plan["limits"], SPEC["memory"], own=jail.OwnMemory(1 << 30, 1 << 30), hard_memory=False)
    program.run(SPEC["code"], f"{directory}/main.py")


def run_all(plan: Plan, count: int) -> float:
    """CPU seconds of so many executions."""
    jail.move_in(plan)
    gc.collect()
    gc.freeze()
    space = PidNamespace.make()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def once() -> None:
        kernel.setns(space.handle, kernel.CLONE_NEWPID)
        pid, pidfd = kernel.clone(jail.PER_PROGRAM)
        if pid == 0:
            run_program(plan)
        kernel.setns(own, kernel.CLONE_NEWPID)
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
    """What this process and those that it has waited for have used."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def find_plan() -> Plan:
    """How the server would isolate programs here."""
    import asyncio

    from toolroll.sandbox.server import tier
    from toolroll.sandbox.server.server import prefixes
    from toolroll.sandbox.server.settings import ServerSettings

    settings = ServerSettings()
    readable = tier.readable_paths(settings.python, prefixes(settings.python), [])
    return asyncio.run(tier.find(settings, readable)).plan


def main() -> None:
    if len(sys.argv) == 2:  # anew, without all that it took to find the plan
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv, json.dumps(find_plan())])
    count, plan = int(sys.argv[1]), json.loads(sys.argv[2])
    result = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.set_blocking(reading, False)
    program.open_streams()
    seconds = run_all(plan, count)
    os.write(result, json.dumps({"cpu_ms_per_exec": seconds / count * 1000}).encode())


if __name__ == "__main__":
    main()
