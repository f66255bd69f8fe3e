"""Compile the seccomp filters that decide which system calls a program may make.

The filter is an allowlist. There are two ways to reject a call:

- EPERM: the call is known and too dangerous. It changes namespaces, mounts, keys, modules or the memory of other
  processes, or it opens a kernel subsystem with a history of vulnerabilities.
- ENOSYS: the call is on neither list. Libraries then fall back as they do on an older kernel. clone3 is rejected in
  this way, because a filter cannot see its flags.

There are two filters: one is loaded by the zygote and inherited by every program. The other is loaded by each program,
and removes the calls that are needed only to enter the jail.

A filter is a program in the kernel's classic BPF. It finds the number of the call by binary search, then compares
arguments where a rule has conditions. A call of another architecture (32-bit programs, x32) kills the process.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from toolroll.sandbox.server.isolation.syscall_numbers import SYSCALL_NUMBERS

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync flock fsetxattr fstat fstatfs fsync
ftruncate futimesat fgetxattr flistxattr fremovexattr getcwd getdents getdents64 getxattr ioctl lchown lgetxattr link
linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat memfd_create mkdir mkdirat mknod mknodat newfstatat
open openat openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat
readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat sync
sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""
_MEMORY = """
brk madvise membarrier mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap
pkey_alloc pkey_free pkey_mprotect process_mrelease
"""
_PROCESSES = """
arch_prctl capget exit exit_group fork getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority
getresgid getresuid getrlimit getrusage getsid gettid getuid kill pidfd_open pidfd_send_signal prctl prlimit64 rseq
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield set_robust_list
get_robust_list set_tid_address setpgid setpriority setrlimit setsid setuid setgid setreuid setregid setresuid setresgid
setfsuid setfsgid setgroups sysinfo tgkill times tkill uname vfork wait4 waitid execve execveat getcpu ioprio_get
ioprio_set landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp capset
"""
_TIME_AND_WAITING = """
alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
epoll_wait eventfd eventfd2 futex futex_waitv futex_wait futex_wake futex_requeue getitimer gettimeofday nanosleep pause
poll ppoll pselect6 restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo select setitimer sigaltstack signalfd signalfd4 time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime getrandom
"""
_COMMUNICATION = """
accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open mq_timedreceive
mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd recvfrom recvmmsg recvmsg semctl semget semop semtimedop sendmmsg
sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown
"""
ALLOWED = frozenset((_FILES + _MEMORY + _PROCESSES + _TIME_AND_WAITING + _COMMUNICATION).split())

_DANGEROUS = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init fanotify_mark finit_module
fsconfig fsmount fsopen fspick init_module io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit
io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie
mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise process_vm_readv
process_vm_writev ptrace quotactl quotactl_fd reboot remap_file_pages request_key set_mempolicy setdomainname
sethostname setns settimeofday swapoff swapon syslog umount2 unshare uselib userfaultfd ustat vhangup
"""
DENIED = frozenset(_DANGEROUS.split())
JAIL_SETUP = frozenset({"mount", "setns", "unshare"})
"""Calls that the zygote and its children need until the program starts."""

_DENIED_CLONE_FLAGS = 0x7E020000 | 0x8000
"""Every CLONE_NEW* flag, and CLONE_PARENT, with which a process becomes its parent's sibling and would outlive it."""
_DENIED_WITHOUT_NAMESPACES = """
shmget semget msgget mq_open setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr chown lchown fchown
fchownat socket
"""
"""Calls that would affect the host, or leave something behind on it, without namespaces."""


class ArgumentEquals(NamedTuple):
    """Condition that an argument of a call has a value.

    Only the bits in `mask` are compared. By default these are the 32 bits of a C int: the kernel ignores the others.
    """

    argument: int
    value: int
    mask: int = 0xFFFFFFFF


class FilterRule(NamedTuple):
    """Action for a call whose arguments meet all conditions."""

    call: str
    action: int
    conditions: tuple[ArgumentEquals, ...] = ()


ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000


def fail_with(error: int) -> int:
    """Return the action that rejects a call with this errno."""
    return 0x00050000 | error


_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_ONLY_ON_CALLER = (
    FilterRule("setpriority", ALLOW, (ArgumentEquals(0, _PRIO_PROCESS), ArgumentEquals(1, 0))),
    FilterRule("ioprio_set", ALLOW, (ArgumentEquals(0, _IOPRIO_WHO_PROCESS), ArgumentEquals(1, 0))),
    *(
        FilterRule(call, ALLOW, (ArgumentEquals(0, 0),))
        for call in ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
    ),
)
"""Calls that are allowed only on the caller, whose process id is 0: other processes may be the server's."""
_CLONE_WITHOUT_DENIED_FLAGS = FilterRule("clone", ALLOW, (ArgumentEquals(0, 0, _DENIED_CLONE_FLAGS),))
_RULES_WITH_NAMESPACES = (
    *(
        FilterRule("socket", ALLOW, (ArgumentEquals(0, family),))
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    ),
    # The kernel charges the receive queues of netlink sockets to no cgroup. With this error, unlike others, libzmq
    # works without a list of network interfaces instead of aborting; the C library looks up names without it.
    FilterRule("socket", fail_with(errno.EOPNOTSUPP), (ArgumentEquals(0, socket.AF_NETLINK),)),
    FilterRule("socketpair", ALLOW, (ArgumentEquals(0, socket.AF_UNIX),)),
)
_RULES_WITHOUT_NAMESPACES = (
    *_ONLY_ON_CALLER,
    _CLONE_WITHOUT_DENIED_FLAGS,
    *(
        FilterRule("socketpair", ALLOW, (ArgumentEquals(0, socket.AF_UNIX), ArgumentEquals(1, kind, 0xF)))
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)  # other types can send to any socket path
    ),
)


@cache
def zygote_filter(*, namespaces: bool, machine: str = platform.machine()) -> bytes:
    """Return the filter of the zygote, as BPF.

    Args:
        namespaces: Whether programs have namespaces. Without them, network, IPC and changes of ownership are denied.
        machine: Architecture, as in `platform.machine()`.
    """
    if namespaces:
        rules, denied = _RULES_WITH_NAMESPACES, DENIED - JAIL_SETUP
        allowed = ALLOWED | JAIL_SETUP | {"clone"}
    else:
        denied = DENIED | set(_DENIED_WITHOUT_NAMESPACES.split())
        rules, allowed = _RULES_WITHOUT_NAMESPACES, ALLOWED - denied - {rule.call for rule in _ONLY_ON_CALLER}
    deny = fail_with(errno.EPERM)
    unconditional = [FilterRule(call, ALLOW) for call in allowed] + [FilterRule(call, deny) for call in denied]
    return compile_filter([*rules, *unconditional], fail_with(errno.ENOSYS), machine)


@cache
def program_filter(machine: str = platform.machine()) -> bytes:
    """Return the filter that a program with namespaces adds to that of the zygote, as BPF."""
    denied = [FilterRule(call, fail_with(errno.EPERM)) for call in ("clone", *JAIL_SETUP)]
    return compile_filter([_CLONE_WITHOUT_DENIED_FLAGS, *denied], ALLOW, machine)


_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_FIRST, _NO_CALL = 0x40000000, 0xFFFFFFFF
"""First number of the x32 calls of x86_64, and the number -1 after them."""
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16  # in struct seccomp_data
_LOAD, _AND, _JUMP, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_MAX_CONDITIONAL_JUMP = 255


def compile_filter(rules: Iterable[FilterRule], default: int, machine: str) -> bytes:
    """Compile rules to BPF.

    Args:
        rules: The first rule for the call whose conditions are met applies. Rules for calls that the architecture does
            not have are ignored.
        default: Action if no rule applies.
        machine: Architecture, as in `platform.machine()`.

    Returns:
        An array of `struct sock_filter`.
    """
    numbers = SYSCALL_NUMBERS[machine]
    rules_by_number: defaultdict[int, list[FilterRule]] = defaultdict(list)
    for rule in rules:
        if rule.call in numbers:
            rules_by_number[numbers[rule.call]].append(rule)
    otherwise, kill = _instruction(_RETURN, default), _instruction(_RETURN, KILL_PROCESS)
    code_by_start = {0: otherwise}  # the key is the first number of a range of calls
    for number in sorted(rules_by_number):
        code_by_start |= {number: _apply(rules_by_number[number], default), number + 1: otherwise}
    if machine == "x86_64":
        code_by_start |= {_X32_FIRST: kill, _NO_CALL: otherwise}
    ranges: list[tuple[int, bytes]] = []
    for start, code in sorted(code_by_start.items()):
        if not ranges or code != ranges[-1][1]:
            ranges.append((start, code))
    check_arch = _instruction(_LOAD, _ARCH_OFFSET) + _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCH[machine], 1, 0) + kill
    return check_arch + _instruction(_LOAD, _NUMBER_OFFSET) + _search(ranges)


def _apply(rules: Iterable[FilterRule], default: int) -> bytes:
    """Return code that applies the first matching rule."""
    code = _instruction(_RETURN, default)
    for rule in reversed([*rules]):
        match = _instruction(_RETURN, rule.action)
        for argument, value, mask in rule.conditions:
            for half in (0, 1):  # the lower 32 bits come first
                value_half, mask_half = (number >> 32 * half & 0xFFFFFFFF for number in (value, mask))
                if mask_half:
                    load = _instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument + 4 * half)
                    test = _instruction(_JUMP_IF_EQUAL, value_half, 0, _count(match))
                    match = load + _instruction(_AND, mask_half) + test + match
        code = match + code if rule.conditions else match
    return code


def _search(ranges: list[tuple[int, bytes]]) -> bytes:
    """Return code that finds the range of the loaded number and continues with its code."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    lower, upper = _search(ranges[:middle]), _search(ranges[middle:])
    pivot, skip_upper = ranges[middle][0], _count(upper)
    if skip_upper <= _MAX_CONDITIONAL_JUMP:
        return _instruction(_JUMP_IF_GREATER_OR_EQUAL, pivot, 0, skip_upper) + upper + lower
    return _instruction(_JUMP_IF_GREATER_OR_EQUAL, pivot, 1, 0) + _instruction(_JUMP, skip_upper) + upper + lower


def _instruction(operation: int, operand: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, skip_if_true, skip_if_false, operand)


def _count(code: bytes) -> int:
    return len(code) // 8
