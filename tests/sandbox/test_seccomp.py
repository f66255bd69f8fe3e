"""Seccomp filters decide as those of libseccomp, for every call, argument and architecture, and in real processes."""

from __future__ import annotations

import errno
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from textwrap import dedent
from typing import Any, NamedTuple

import pyseccomp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.sandbox.server.isolation import seccomp
from toolroll.sandbox.server.isolation.seccomp import ALLOW, KILL_PROCESS, ArgumentEquals, FilterRule, fail_with
from toolroll.sandbox.server.isolation.syscall_numbers import SYSCALL_NUMBERS

pytestmark = pytest.mark.process  # libseccomp is not installed everywhere

EPERM, ENOSYS = fail_with(errno.EPERM), fail_with(errno.ENOSYS)
MACHINES = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}
X32_BIT = 0x40000000
WORD = 0xFFFFFFFF
LONG = 0xFFFFFFFFFFFFFFFF
MAX_INSTRUCTIONS_PER_CALL = 40


class Call(NamedTuple):
    """A system call as a filter sees it."""

    arch: int
    number: int
    arguments: tuple[int, ...] = (0, 0, 0, 0, 0, 0)


@lru_cache(maxsize=4)
def decode(program: bytes) -> list[tuple[int, int, int, int]]:
    return [(code, if_true, if_false, k) for code, if_true, if_false, k in struct.iter_unpack("=HBBI", program)]


def decide(program: bytes, call: Call) -> tuple[int, int]:
    """Run a filter, as the kernel does.

    Returns:
        The action and the number of executed instructions.
    """
    data = struct.pack("=IIQ6Q", call.number, call.arch, 0, *call.arguments)
    code = decode(program)
    position = executed = accumulator = 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position, executed = position + 1, executed + 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, operand)[0]
            case 0x54:
                accumulator &= operand
            case 0x05:
                position += operand
            case 0x15:
                position += if_true if accumulator == operand else if_false
            case 0x25:
                position += if_true if accumulator > operand else if_false
            case 0x35:
                position += if_true if accumulator >= operand else if_false
            case 0x45:
                position += if_true if accumulator & operand else if_false
            case 0x06:
                return operand, executed
            case _:
                raise AssertionError(f"operation {operation:#x} is not implemented")


def argument(index: int, value: int, mask: int = WORD) -> pyseccomp.Arg:
    return pyseccomp.Arg(index, pyseccomp.MASKED_EQ, mask, value)


def compile_with_libseccomp(default: int, rules: Sequence[tuple[Any, ...]], machine: str) -> bytes:
    """Compile rules, each of an action, a call and conditions."""
    filter_ = pyseccomp.SyscallFilter(default)
    filter_.set_attr(pyseccomp.Attr.ACT_BADARCH, KILL_PROCESS)
    if MACHINES[machine] != pyseccomp.system_arch():
        filter_.add_arch(MACHINES[machine])
        filter_.remove_arch(pyseccomp.system_arch())
    for action, name, *conditions in rules:
        if name in SYSCALL_NUMBERS[machine] and action != default:
            filter_.add_rule_exactly(action, name, *conditions)
    with tempfile.TemporaryFile() as file:
        filter_.export_bpf(file)
        return os.pread(file.fileno(), 1 << 20, 0)


WITHOUT_NAMESPACES = {
    "shmget", "semget", "msgget", "mq_open", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr",
    "fremovexattr", "chown", "lchown", "fchown", "fchownat", "socket",
}  # fmt: skip
BY_PROCESS_ID = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
DENIED_CLONE_FLAGS = [0x8000, 0x20000, *(1 << bit for bit in range(25, 31))]


def expected_zygote_filter(namespaces: bool, machine: str) -> bytes:
    rules: list[tuple[Any, ...]]
    if namespaces:
        allowed = (seccomp.ALLOWED | {"clone", "mount", "setns", "unshare"}) - {"socket", "socketpair"}
        denied = seccomp.DENIED - {"mount", "setns", "unshare"}
        rules = [(ALLOW, "socket", argument(0, family)) for family in (1, 2, 10)]
        rules.append((fail_with(errno.EOPNOTSUPP), "socket", argument(0, socket.AF_NETLINK)))
        rules.append((ALLOW, "socketpair", argument(0, socket.AF_UNIX)))
    else:
        denied = seccomp.DENIED | WITHOUT_NAMESPACES
        allowed = seccomp.ALLOWED - denied - {*BY_PROCESS_ID, "setpriority", "ioprio_set"}
        rules = [(ALLOW, name, argument(0, 0)) for name in BY_PROCESS_ID]
        rules.append((ALLOW, "setpriority", argument(0, os.PRIO_PROCESS), argument(1, 0)))
        rules.append((ALLOW, "ioprio_set", argument(0, 1), argument(1, 0)))
        rules.append((ALLOW, "clone", argument(0, 0, sum(DENIED_CLONE_FLAGS))))
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            rules.append((ALLOW, "socketpair", argument(0, socket.AF_UNIX), argument(1, kind, 0xF)))
    rules += [(ALLOW, name) for name in sorted(allowed)] + [(EPERM, name) for name in sorted(denied)]
    return compile_with_libseccomp(ENOSYS, rules, machine)


def expected_program_filter(machine: str) -> bytes:
    rules = [(EPERM, name) for name in ("mount", "setns", "unshare")]
    rules += [(EPERM, "clone", argument(0, flag, flag)) for flag in DENIED_CLONE_FLAGS]
    return compile_with_libseccomp(ALLOW, rules, machine)


FILTERS = {
    "with namespaces": (
        lambda machine: seccomp.zygote_filter(namespaces=True, machine=machine),
        lambda machine: expected_zygote_filter(True, machine),
    ),
    "without namespaces": (
        lambda machine: seccomp.zygote_filter(namespaces=False, machine=machine),
        lambda machine: expected_zygote_filter(False, machine),
    ),
    "of a program": (seccomp.program_filter, expected_program_filter),
}


@pytest.fixture(scope="module", params=[(name, machine) for name in FILTERS for machine in MACHINES], ids=str)
def filters(request: pytest.FixtureRequest) -> tuple[str, bytes, bytes]:
    """Return an architecture, the filter for it and the same filter by libseccomp."""
    name, machine = request.param
    compiled, expected = FILTERS[name]
    return machine, compiled(machine), expected(machine)


def test_filter_decides_on_every_number_as_libseccomp(filters: tuple[str, bytes, bytes]) -> None:
    _, compiled, expected = filters
    special = [X32_BIT - 1, WORD - 1, WORD, *(X32_BIT | number for number in range(600))]
    for arch in AUDIT_ARCH.values():
        for number in [*range(600), *special]:
            for arguments in ((0,) * 6, (LONG,) * 6):
                call = Call(arch, number, arguments)
                assert decide(compiled, call)[0] == decide(expected, call)[0], call


CONDITIONAL = ("clone", "socket", "socketpair", "setpriority", "ioprio_set", *BY_PROCESS_ID)
SMALL = st.integers(0, 20)
ARGUMENT = st.integers(0, LONG) | SMALL | SMALL.map(lambda n: n | 1 << 32) | st.integers(0, 63).map(lambda n: 1 << n)


@settings(max_examples=scaled(200))
@given(name=st.sampled_from(CONDITIONAL), arguments=st.tuples(*[ARGUMENT] * 6))
def test_filter_decides_on_arguments_as_libseccomp(
    filters: tuple[str, bytes, bytes], name: str, arguments: tuple[int, ...]
) -> None:
    machine, compiled, expected = filters
    call = Call(AUDIT_ARCH[machine], SYSCALL_NUMBERS[machine][name], arguments)
    assert decide(compiled, call)[0] == decide(expected, call)[0]


def test_filter_decides_within_few_instructions(filters: tuple[str, bytes, bytes]) -> None:
    machine, compiled, _ = filters
    calls = [Call(AUDIT_ARCH[machine], number, (LONG,) * 6) for number in range(600)]
    assert max(decide(compiled, call)[1] for call in calls) <= MAX_INSTRUCTIONS_PER_CALL


@st.composite
def conditions(draw: st.DrawFn) -> tuple[ArgumentEquals, ...]:
    indexes = draw(st.lists(st.integers(0, 5), max_size=3, unique=True))
    masks = st.sampled_from([WORD, LONG, LONG ^ WORD, 0xF, 1 << 40]) | st.integers(1, LONG)
    drawn = [(index, draw(masks), draw(ARGUMENT)) for index in indexes]
    return tuple(ArgumentEquals(index, value & mask, mask) for index, mask, value in drawn)


@st.composite
def rules_and_calls(draw: st.DrawFn) -> tuple[str, int, list[FilterRule], list[Call]]:
    """Draw an architecture, a default action, rules with at most one condition set per call, and calls."""
    machine = draw(st.sampled_from([*MACHINES]))
    numbers = SYSCALL_NUMBERS[machine]
    actions = st.sampled_from([ALLOW, EPERM, ENOSYS, fail_with(errno.EINVAL), KILL_PROCESS])
    names = draw(st.lists(st.sampled_from(sorted(numbers)), min_size=1, max_size=30, unique=True))
    rules = [FilterRule(name, draw(actions), draw(conditions())) for name in names]
    calls = []
    for rule in draw(st.lists(st.sampled_from(rules), min_size=1, max_size=10)):
        arguments = [draw(ARGUMENT) for _ in range(6)]
        for index, value, mask in rule.conditions:
            arguments[index] = arguments[index] & ~mask | value
        flipped = draw(st.none() | st.tuples(st.integers(0, 5), st.integers(0, 63)))
        if flipped:
            arguments[flipped[0]] ^= 1 << flipped[1]
        near = st.sampled_from([0, 0, 0, 1, -1, X32_BIT])
        number = max(numbers[rule.call] + draw(near), 0)
        arch = draw(st.sampled_from([AUDIT_ARCH[machine]] * 4 + [*AUDIT_ARCH.values()]))
        calls.append(Call(arch, number, tuple(arguments)))
    return machine, draw(actions), rules, calls


@settings(max_examples=scaled(200))
@given(rules_and_calls())
def test_compiler_agrees_with_libseccomp(example: tuple[str, int, list[FilterRule], list[Call]]) -> None:
    machine, default, rules, calls = example
    compiled = seccomp.compile_filter(rules, default, machine)
    by_libseccomp = [(action, name, *(argument(*one) for one in conditions)) for name, action, conditions in rules]
    expected = compile_with_libseccomp(default, by_libseccomp, machine)
    for call in calls:
        assert decide(compiled, call)[0] == decide(expected, call)[0], call


def test_first_rule_of_a_call_that_matches_applies() -> None:
    rules = [
        FilterRule("read", EPERM, (ArgumentEquals(0, 3), ArgumentEquals(2, 1 << 40, LONG))),
        FilterRule("read", ENOSYS, (ArgumentEquals(0, 3),)),
        FilterRule("read", ALLOW),
    ]
    program = seccomp.compile_filter(rules, KILL_PROCESS, "x86_64")
    decisions = {
        (3, 0, 1 << 40, 0, 0, 0): EPERM,
        (3 | 7 << 32, 0, 1 << 40, 0, 0, 0): EPERM,  # the kernel ignores the upper half of an int
        (3, 0, 1, 0, 0, 0): ENOSYS,
        (4, 0, 1 << 40, 0, 0, 0): ALLOW,
    }
    for arguments, action in decisions.items():
        assert decide(program, Call(AUDIT_ARCH["x86_64"], 0, arguments))[0] == action
    assert decide(program, Call(AUDIT_ARCH["x86_64"], 1))[0] == KILL_PROCESS


def test_many_rules_need_long_jumps() -> None:
    """With more than 255 instructions between a comparison and its target, the filter still decides correctly."""
    numbers = SYSCALL_NUMBERS["x86_64"]
    rules = [
        FilterRule(name, fail_with(1 + number), tuple(ArgumentEquals(index, number, LONG) for index in range(6)))
        for name, number in numbers.items()
    ]
    program = seccomp.compile_filter(rules, ALLOW, "x86_64")
    assert len(program) // 8 > 4 * 255
    for number in numbers.values():
        assert decide(program, Call(AUDIT_ARCH["x86_64"], number, (number,) * 6))[0] == fail_with(1 + number)
        assert decide(program, Call(AUDIT_ARCH["x86_64"], number, (number,) * 5 + (999,)))[0] == ALLOW


def test_numbers_are_those_of_libseccomp() -> None:
    for machine, arch in MACHINES.items():
        for name, number in SYSCALL_NUMBERS[machine].items():
            assert pyseccomp.resolve_syscall(arch, name) == number, (machine, name)
    only_x86_64 = SYSCALL_NUMBERS["x86_64"].keys() - SYSCALL_NUMBERS["aarch64"].keys()
    assert all(pyseccomp.resolve_syscall(pyseccomp.Arch.AARCH64, name) < 0 for name in only_x86_64)


def test_every_call_of_the_lists_has_a_number() -> None:
    named = seccomp.ALLOWED | seccomp.DENIED | WITHOUT_NAMESPACES | {"clone", "socketpair"}
    assert named == SYSCALL_NUMBERS["x86_64"].keys()


PRELUDE = """
    import ctypes, errno, os, socket, sys, threading
    from toolroll.sandbox.server.isolation import seccomp, syscalls
    from toolroll.sandbox.server.isolation.syscall_numbers import SYSCALL_NUMBERS

    libc = ctypes.CDLL(None, use_errno=True)
    NUMBERS = SYSCALL_NUMBERS[os.uname().machine]

    def call(name, *arguments):
        number = NUMBERS.get(name, name)
        result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
        return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]

    def load(filter):
        syscalls.make([syscalls.prepare_seccomp(filter)])

    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
"""
LOAD = {
    True: "load(seccomp.zygote_filter(namespaces=True)); load(seccomp.program_filter())",
    False: "load(seccomp.zygote_filter(namespaces=False))",
}


def run_filtered(namespaces: bool, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has loaded the filters of a program."""
    script = f"{dedent(PRELUDE)}\n{LOAD[namespaces]}\n{dedent(code)}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


UPPER = 1 << 32
"""A bit that the kernel ignores in an argument of type int."""
RESULTS: dict[str, tuple[str, str]] = {
    # call: result with namespaces, without
    "call('getpid')": ("ok", "ok"),
    "call('unshare', 0x10000000)": ("EPERM", "EPERM"),
    "call('setns', -1, 0)": ("EPERM", "EPERM"),
    "call('ptrace', 0, 0, 0, 0)": ("EPERM", "EPERM"),
    "call('clone', 0x10000011, 0, 0, 0, 0)": ("EPERM", "ENOSYS"),
    "call(435, 0, 0)": ("ENOSYS", "ENOSYS"),  # clone3
    "call(999_999)": ("ENOSYS", "ENOSYS"),
    "call('socket', socket.AF_INET, socket.SOCK_STREAM, 0)": ("ok", "EPERM"),
    "call('socket', socket.AF_NETLINK, socket.SOCK_RAW, 0)": ("ENOTSUP", "EPERM"),  # the same number as EOPNOTSUPP
    f"call('socket', socket.AF_NETLINK | {UPPER}, socket.SOCK_RAW, 0)": ("ENOTSUP", "EPERM"),
    "call('socket', socket.AF_PACKET, socket.SOCK_RAW, 0)": ("ENOSYS", "EPERM"),
    "call('socket', socket.AF_VSOCK, socket.SOCK_STREAM, 0)": ("ENOSYS", "EPERM"),
    "call('socketpair', socket.AF_NETLINK, socket.SOCK_RAW, 0, 0)": ("ENOSYS", "ENOSYS"),
    "type(socket.socketpair()).__name__": ("tuple", "tuple"),
    "call('setpriority', os.PRIO_PROCESS, 0, 1)": ("ok", "ok"),
    f"call('setpriority', os.PRIO_PROCESS | {UPPER}, {UPPER}, 1)": ("ok", "ok"),
    "call('setpriority', os.PRIO_PGRP, 0, 1)": ("ok", "ENOSYS"),
    "call('setpriority', os.PRIO_PROCESS, os.getpid(), 1)": ("ok", "ENOSYS"),
    "call('ioprio_set', 1, 0, 2 << 13)": ("ok", "ok"),
    "call('ioprio_set', 2, 0, 2 << 13)": ("ok", "ENOSYS"),
    "call('ioprio_set', 1, os.getpid(), 2 << 13)": ("ok", "ENOSYS"),
    "call('sched_setaffinity', os.getpid(), 0, 0)": ("EINVAL", "ENOSYS"),
}


@pytest.mark.parametrize("namespaces", [True, False])
def test_kernel_applies_the_filter(namespaces: bool) -> None:
    done = run_filtered(namespaces, "".join(f"print({expression})\n" for expression in RESULTS))
    expected = {expression: results[0 if namespaces else 1] for expression, results in RESULTS.items()}
    assert dict(zip(RESULTS, done.stdout.split(), strict=True)) == expected, done.stderr


@pytest.mark.parametrize("namespaces", [True, False])
def test_threads_and_children_work_under_the_filter(namespaces: bool) -> None:
    code = """
        import subprocess
        threads = [threading.Thread(target=print, args=("thread",)) for _ in range(3)]
        for thread in threads: thread.start(); thread.join()
        print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
    """
    done = run_filtered(namespaces, code)
    assert done.stdout.split() == ["thread"] * 3 + ["child"], done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 exists on x86_64 only")
@pytest.mark.parametrize("namespaces", [True, False])
def test_x32_call_kills_the_process(namespaces: bool) -> None:
    done = run_filtered(namespaces, f"call({X32_BIT} | NUMBERS['getpid'])")
    assert done.returncode == -signal.SIGSYS
