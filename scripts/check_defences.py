"""Disable each defence of the sandbox in turn, and check that a test notices.

A test that still passes without the defence that it is about proves nothing. The changes are made in a copy of the
checkout. Prints a table; the exit status is 1 if a defence can be disabled without a failing test.

    python scripts/check_defences.py              # all, about ten minutes
    python scripts/check_defences.py Landlock     # those whose name contains "Landlock"
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVER = Path("toolroll/sandbox/server")
ATTACKS, VERDICTS = "tests/sandbox/test_attacks.py", "tests/sandbox/test_verdicts.py"
TIMEOUT_S = 900
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Defence:
    """A defence, the change that disables it, and the test that notices."""

    name: str
    file: Path
    code: str
    """Code to replace. It occurs once in the file."""
    disabled: str
    test: str


def access(what: str, machine: str = "as it is") -> str:
    """Return the test of a program that tries to access something."""
    return f"{ATTACKS}::test_program_cannot_access[{machine}-{what}]"


DEFENCES = [
    Defence(
        "private root file system",
        SERVER / "isolation/rootfs.py",
        "    for path in readable:\n        target",
        '    for path in [*readable, "/etc", "/root"]:\n        target',
        access("files of the machine"),
    ),
    Defence(
        "network namespace",
        SERVER / "isolation/jail.py",
        " | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWNET",
        " | syscalls.CLONE_NEWIPC",
        f"{ATTACKS}::test_sockets_of_the_host_are_unreachable[as it is]",
    ),
    Defence(
        "separate user for each program",
        SERVER / "execution/isolation_tiers.py",
        "users = ProgramUsers.find()",
        "users = None",
        f"{ATTACKS}::test_programs_have_different_users[as it is]",
    ),
    Defence(
        "counts of the kernel per user",
        SERVER / "isolation/program_users.py",
        "        self._next += 1\n        return self._next - 1\n",
        "        return self._next\n",
        f"{ATTACKS}::test_per_user_resources_are_not_exhausted[as it is-memory of pipes]",
    ),
    Defence(
        "dropped capabilities",
        SERVER / "isolation/syscalls.py",
        ', prepare("capset", header, sets)]',
        "]",
        access("more rights"),
    ),
    Defence(
        "seccomp",
        SERVER / "isolation/jail.py",
        " if program else []",
        " if False else []",
        access("system calls"),
    ),
    Defence(
        "Landlock: files",
        SERVER / "isolation/jail.py",
        '        elif self.plan["landlock"]:\n',
        "        elif False:\n",
        access("files of the machine", "a container"),
    ),
    Defence(
        "Landlock: signals",
        SERVER / "isolation/landlock.py",
        "_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if",
        "_SCOPE_ABSTRACT_SOCKETS if",
        access("power over the server", "a user in a container"),
    ),
    Defence(
        "memory limit of the cgroup",
        SERVER / "isolation/cgroup.py",
        "        if limit == self.memory_limit:\n            return\n",
        "        return\n",
        "tests/sandbox/test_attack_files.py::test_memory_limit_covers_all_processes[files in memory]",
    ),
    Defence(
        "limit of open files",
        SERVER / "isolation/jail.py",
        '            (resource.RLIMIT_NOFILE, limits["open_files"]),\n',
        "",
        f"{ATTACKS}::test_crash_is_a_failure_of_the_program[as it is-10,000 open files]",
    ),
    Defence(
        "closed descriptors",
        SERVER / "interpreter/child_setup.py",
        "        syscalls.close_from(SPEC_FD)\n",
        "",
        f"{VERDICTS}::test_python_has_only_the_standard_streams[as it is-{{}}]",
    ),
    Defence(
        "empty environment",
        SERVER / "interpreter/zygote_handle.py",
        "                    env=environment,\n",
        "                    env={**os.environ, **environment},\n",
        access("the secrets of the server's environment"),
    ),
    Defence(
        "kill of all processes of a program",
        SERVER / "interpreter/zygote.py",
        "is_reusable and has_room and job.namespace.is_empty()",
        "is_reusable and has_room",
        f"{ATTACKS}::test_program_leaves_no_process[as it is-a daemon]",
    ),
    Defence(
        "kill of all processes without namespaces",
        SERVER / "interpreter/supervisor.py",
        "        self._signal_all(signal.SIGKILL)\n        with",
        "        with",
        f"{ATTACKS}::test_program_leaves_no_process[a container-a daemon]",
    ),
    Defence(
        "default signals of commands",
        SERVER / "interpreter/child_setup.py",
        "        jail.restore_default_signals()\n",
        "",
        f"{VERDICTS}::test_pipelines_end[as it is]",
    ),
    Defence(
        "attributes of a login shell",
        SERVER / "interpreter/zygote.py",
        "        jail.reset_process_attributes()\n",
        "",
        f"{VERDICTS}::test_process_attributes_are_those_of_a_login_shell[as it is-bash]",
    ),
    Defence(
        "CPU time limit",
        SERVER / "execution/time_limit.py",
        "if sample.cpu_s >= self.limit_s or own_s",
        "if own_s",
        f"{VERDICTS}::test_sleeping_program_has_more_time_than_a_busy_one[as it is]",
    ),
    Defence(
        "no timeout after the end",
        SERVER / "execution/job.py",
        "if self.process.has_ended() or (self._verdict is TimeVerdict.TIMEOUT and not is_running):",
        "if False:",
        f"{VERDICTS}::test_ended_program_does_not_time_out[as it is-python]",
    ),
    Defence(
        "stopped sessions",
        SERVER / "execution/sessions.py",
        ".call_later(STOP_DELAY_S, self.process.stop)",
        ".call_later(STOP_DELAY_S, int)",
        f"{VERDICTS}::test_sessions_are_stopped_between_cells[as it is]",
    ),
    Defence(
        "limit of the output",
        SERVER / "execution/executor.py",
        "self._output_limit_bytes = settings.output_kb * 1024",
        "self._output_limit_bytes = 1 << 30",
        f"{ATTACKS}::test_other_programs_are_served_meanwhile[as it is-endless output]",
    ),
    Defence(
        "limit of the size of a session's replies",
        SERVER / "execution/sessions.py",
        " or size > MAX_REPLY_BYTES or",
        " or",
        f"{ATTACKS}::test_session_cannot_grow_memory_of_the_server[as it is-many bytes]",
    ),
    Defence(
        "limit of the values of a session's replies",
        SERVER / "execution/sessions.py",
        "> MAX_REPLY_NODES:",
        "> 10**12:",
        f"{ATTACKS}::test_session_cannot_grow_memory_of_the_server[as it is-many values]",
    ),
]


def main() -> int:
    """Check the defences whose name contains an argument, or all."""
    chosen = [one for one in DEFENCES if any(text in one.name for text in sys.argv[1:] or [""])]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        python = make_environment(Path(directory))
        width = max(len(one.name) for one in chosen)
        unnoticed = 0
        for defence in chosen:
            result = check(defence, Path(directory, "checkout"), python)
            unnoticed += result != "noticed"
            print(f"{defence.name:{width}}  {result:12}  {defence.test}", flush=True)
    return int(unnoticed > 0)


def make_environment(directory: Path) -> Path:
    """Copy the checkout and this environment, in which the copy of the checkout is installed.

    Returns:
        The Python interpreter of the copy.
    """
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, directory / "checkout", ignore=ignored)
    shutil.copytree(sys.prefix, directory / "venv", symlinks=True, copy_function=link_or_copy)
    (packages,) = (directory / "venv").glob("lib/python*/site-packages")
    for installed in (*packages.glob("*toolroll*.pth"), *packages.glob("toolroll")):
        shutil.rmtree(installed) if installed.is_dir() else installed.unlink()
    (packages / "copy.pth").write_text(f"{directory / 'checkout'}\n")
    return directory / "venv" / "bin" / "python"


def link_or_copy(source: str, target: str) -> None:
    """Link a file, which takes no space, or copy it if the target is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def check(defence: Defence, checkout: Path, python: Path) -> str:
    """Return whether the test of a defence fails if, and only if, the defence is disabled."""
    file = checkout / defence.file
    original = file.read_text()
    if original.count(defence.code) != 1:
        return "not found"
    if run_test(defence.test, checkout, python) != PASSED:
        return "test fails"
    file.write_text(original.replace(defence.code, defence.disabled))
    try:
        return "noticed" if run_test(defence.test, checkout, python) == FAILED else "unnoticed"
    finally:
        file.write_text(original)


def run_test(test: str, checkout: Path, python: Path) -> int:
    """Run a test in the copy. Return the exit status of pytest."""
    command = [str(python), "-m", "pytest", "--quiet", "--exitfirst", "-p", "no:cacheprovider", test]
    with tempfile.TemporaryFile() as output:
        try:
            return subprocess.run(command, cwd=checkout, stdout=output, stderr=output, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            return FAILED


if __name__ == "__main__":
    sys.exit(main())
