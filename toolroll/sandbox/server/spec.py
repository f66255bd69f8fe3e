"""What passes between the front and the processes that run programs: plain data.

A plan goes as JSON; a spec by marshal, which a process that was just cloned reads with the least of its memory touched.

Only the standard library is imported: the receiving side runs in the interpreter that executes the model's code.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

WORK = "/tmp/work"  # noqa: S108 (inside the jail, where /tmp is the program's own)
"""The working directory of a program that has a file system of its own."""


SPEC_FORMAT = 4
"""The format of marshal that every Python from 3.4 on reads."""


class Limits(TypedDict):
    """What every program may use. Memory is each request's own."""

    processes: int
    """Processes and threads."""
    open_files: int
    disk: int
    """Bytes that a program may keep in files."""
    inodes: int


class Plan(TypedDict):
    """How programs are isolated: decided when the server starts, the same for every program."""

    tier: str
    namespaces: bool
    landlock: int
    """The kernel's Landlock ABI; 0 for none."""
    seccomp: str
    """The filter of warm interpreters, which programs inherit, in base64; empty for none."""
    seccomp_of_program: str
    """What is added to it for a program."""
    readable: list[str]
    """The parts of the machine's file system that programs may read and execute."""
    limits: Limits
    path: str
    """PATH of the programs."""


class Stage(TypedDict):
    """One command of a program in another language than Python: a compiler, then what it made."""

    argv: list[str]
    timeout: float


class Spec(TypedDict):
    """One program to run."""

    kind: Literal["script", "commands", "cells"]
    filename: str
    """Where the code is written, in the working directory."""
    code: str
    show_value: NotRequired[bool]
    """Whether a script's last expression is shown."""
    files: dict[str, str]
    """Path → content in base64."""
    fetch: list[str]
    fetch_limit: int
    """Bytes that all fetched files together may have."""
    memory: int
    """Bytes."""
    memory_by_rlimit: bool
    """Whether no cgroup holds the memory limit."""
    stages: list[Stage]
    environment: NotRequired[dict[str, str]]
    user: NotRequired[int]
    """The user to become, where every program has one of its own and no namespace."""
    directory: NotRequired[str]
    """The program's own directory, where it has no file system of its own."""


def is_supervised(plan: Plan, spec: Spec) -> bool:
    """Whether a program runs under a supervisor, and not in the very process that was cloned for it."""
    return not plan["namespaces"] or spec["kind"] == "commands" or bool(spec["fetch"])
