"""Run a command in the jail of sandbox programs: without network, with a private /tmp, /proc and limited memory.

    python -I -S jailed_server.py IMPORT_ROOT CONFIG COMMAND [ARGUMENT...]

CONFIG is JSON with the isolation `plan`, the `spec` of the job, and the names of the variables of the `environment`
that the command inherits. The command runs in a new directory inside the jail, in a pid namespace whose first process
is a copy of this one, which reaps its orphans. Imports only the standard library and the jail.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

CANNOT_ISOLATE = 126


def main() -> NoReturn:
    """Run a command. See the module's docstring."""
    import_root, config_text, *command = sys.argv[1:]
    sys.path.insert(0, import_root)
    from toolroll.sandbox.server.isolation import jail, syscalls

    config: dict[str, Any] = json.loads(config_text)
    try:
        jail.reset_process_attributes()
        jail.isolate_zygote(config["plan"])
        program_jail = jail.ProgramJail(config["plan"], jail.MemoryUse.current())
        first, _ = syscalls.clone(jail.PROGRAM_NAMESPACES | syscalls.CLONE_NEWPID)
        if first == 0:
            directory = program_jail.enter(config["spec"])
            program_jail.drop_privileges(directory)
            if (server := os.fork()) == 0:
                program_jail.set_rlimits(config["spec"], is_python=False)
                jail.restore_default_signals()
                inherited = {name: os.environ[name] for name in config["environment"]}
                environment = jail.environment(config["plan"], directory, inherited)
                os.execvpe(command[0], command, environment)  # noqa: S606 (runs the server on purpose)
            wait_for(server)
    except OSError as error:
        os.write(2, f"Cannot run {command[0]!r} in the sandbox: {error.strerror}.\n".encode())
        os._exit(CANNOT_ISOLATE)
    wait_for(first)


def wait_for(child: int) -> NoReturn:
    """Reap children until this one ends, then exit with its status."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
