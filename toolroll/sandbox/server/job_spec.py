"""Data that the server sends to zygotes and their children.

A JailPlan is sent as JSON. A JobSpec is sent by marshal, because a new child can read it while touching little memory.

Only the standard library is imported: the receiving side runs in the interpreter that executes the model's code.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

WORK = "/tmp/work"  # noqa: S108 (inside the jail, where each program has its own /tmp)
"""Working directory of a program that has its own file system."""
SPEC_MARSHAL_VERSION = 4
"""Version of the marshal format, which every Python from 3.4 on can read."""


JobKind = Literal["script", "commands", "cells"]
"""A Python program, commands of another language, or a session's interpreter."""


class JobLimits(TypedDict):
    """Resource limits of every program. The memory limit is part of the JobSpec."""

    processes: int
    """Maximum number of processes and threads."""
    open_files: int
    disk: int
    """Maximum size of all files, in bytes."""
    inodes: int


class JailPlan(TypedDict):
    """Isolation of programs. It is chosen when the server starts and is the same for every program."""

    tier: str
    namespaces: bool
    landlock: int
    """Landlock ABI of the kernel; 0 for none."""
    seccomp: str
    """Seccomp filter of zygotes in base64, which programs inherit; empty for none."""
    seccomp_of_program: str
    """Additional seccomp filter of programs."""
    readable: list[str]
    """Paths of the host that programs may read and execute."""
    limits: JobLimits
    path: str
    """PATH of the programs."""
    users: tuple[int, int] | None
    """First and number of the user ids of programs, or None if all programs have the same user id."""


class CommandStage(TypedDict):
    """One command of a program in a language other than Python: the compiler, or the compiled program."""

    argv: list[str]
    timeout: float


class ProgramSpec(TypedDict):
    """The files and commands of a program. They depend on its language."""

    filename: str
    """File in the working directory to which the code is written. Empty if the program has only other files."""
    code: str
    show_value: NotRequired[bool]
    """Whether to print the value of a script's last expression."""
    files: dict[str, str]
    """Content of additional files in base64, by path."""
    stages: list[CommandStage]
    """The compiler, if the language has one, then the program. Empty for Python."""
    environment: NotRequired[dict[str, str]]
    """Additional environment variables."""
    executable: NotRequired[tuple[str, bytes]]
    """Path and content of the compiled program, if it is not compiled by this job."""


class JobSpec(ProgramSpec):
    """One program to run."""

    kind: JobKind
    fetch: list[str]
    """Paths of files to return after the run."""
    fetch_limit: int
    """Maximum size of all fetched files together, in bytes."""
    memory: int
    """Memory limit in bytes."""
    memory_by_rlimit: bool
    """Whether the memory limit is enforced by rlimits, because cgroups are not available."""
    user: NotRequired[int]
    """User id of the program, if each program has a separate user."""
    directory: NotRequired[str]
    """Working directory, if the program does not have its own file system."""


def is_supervised(plan: JailPlan, spec: JobSpec) -> bool:
    """Return True if the program runs under a supervisor, and not in the zygote's child itself."""
    return not plan["namespaces"] or spec["kind"] == "commands" or bool(spec["fetch"])


def separate_user(plan: JailPlan, spec: JobSpec) -> int | None:
    """Return the user of a program whose supervisor has another one. With namespaces, both have the same."""
    return None if plan["namespaces"] else spec.get("user")
