"""Which system calls a program may make. A list of what is allowed, so that a call nobody thought of is refused.

Refused with EPERM is what exists and is too dangerous: what changes namespaces, mounts, keys, modules, other processes'
memory, or opens a part of the kernel with a history of holes. Whatever is on neither list gets ENOSYS, as if the kernel
were older: libraries then fall back, which is also why clone3 is answered so (its flags can't be seen by a filter).

There are two filters, as loading a large one costs a millisecond. The large one is loaded by a warm interpreter, once,
and every program inherits it; a small one is loaded by each program and takes away the calls that only the way into the
jail needs.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
from functools import cache
from typing import Any

from toolroll.errors import ConfigError, MissingExtra

logger = logging.getLogger(__name__)

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
_TALKING = """
accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open mq_timedreceive
mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd recvfrom recvmmsg recvmsg semctl semget semop semtimedop sendmmsg
sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown
"""
ALLOWED = frozenset((_FILES + _MEMORY + _PROCESSES + _TIME_AND_WAITING + _TALKING).split())

_DANGEROUS = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init fanotify_mark finit_module
fsconfig fsmount fsopen fspick init_module io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit
io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie
mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise process_vm_readv
process_vm_writev ptrace quotactl quotactl_fd reboot remap_file_pages request_key set_mempolicy setdomainname
sethostname setns settimeofday swapoff swapon syslog umount umount2 unshare uselib userfaultfd ustat vhangup
"""
REFUSED = frozenset(_DANGEROUS.split())
ON_THE_WAY = frozenset({"mount", "setns", "unshare"})
"""Calls that a warm interpreter and its clones need until a program begins."""

_REFUSED_FLAGS = 0x7E020000 | 0x8000
"""Of clone: every CLONE_NEW*, and CLONE_PARENT, by which a process becomes its parent's sibling and escapes its end."""
_SHARED_WITHOUT_NAMESPACES = """
shmget semget msgget mq_open setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr chown lchown fchown
fchownat socket
"""
"""What would reach, or stay in, the machine itself where no namespace is around it."""
_OF_ITSELF_ONLY = {
    "prlimit64": 0, "sched_setaffinity": 0, "sched_setattr": 0, "sched_setparam": 0, "sched_setscheduler": 0,
    "setpriority": 1, "ioprio_set": 1,
}  # fmt: skip
"""Calls on a process, and which argument names it: 0 is the caller. Other processes may be the server's."""


@cache
def large_filter(*, namespaces: bool) -> bytes:
    """The filter of a warm interpreter that makes namespaces, or doesn't, as the kernel wants it.

    Without namespaces a program has no network, no IPC and no users of its own: it gets none of these at all.
    """
    pyseccomp = _pyseccomp()
    allow, refuse = pyseccomp.ALLOW, pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def is_(number: int, value: int, mask: int = 0xFFFFFFFF) -> Any:
        return pyseccomp.Arg(number, pyseccomp.MASKED_EQ, mask, value)

    if namespaces:
        allowed, refused = ALLOWED | ON_THE_WAY | {"clone", "socketpair"}, REFUSED - ON_THE_WAY
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
            _add(rules, allow, "socket", is_(0, family))
        # Name look-ups ask for the machine's addresses, and are answered with the loopback's.
        _add(rules, allow, "socket", is_(0, socket.AF_NETLINK), is_(2, 0))
    else:
        refused = REFUSED | set(_SHARED_WITHOUT_NAMESPACES.split())
        allowed = ALLOWED - refused - _OF_ITSELF_ONLY.keys()
        for name, argument in _OF_ITSELF_ONLY.items():
            _add(rules, allow, name, is_(argument, 0))
        _add(rules, allow, "clone", is_(0, 0, _REFUSED_FLAGS))
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):  # the others can be sent to any socket by its path
            _add(rules, allow, "socketpair", is_(1, kind, 0xF))
    for name in sorted(allowed):
        _add(rules, allow, name)
    for name in sorted(refused):
        _add(rules, refuse, name)
    return _exported(rules)


@cache
def small_filter() -> bytes:
    """The filter of a program that has come into its jail by way of namespaces."""
    pyseccomp = _pyseccomp()
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in sorted(ON_THE_WAY):
        _add(rules, pyseccomp.ERRNO(errno.EPERM), name)
    for flag in (1 << bit for bit in range(32) if _REFUSED_FLAGS >> bit & 1):
        _add(rules, pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    return _exported(rules)


def _pyseccomp() -> Any:
    try:
        import pyseccomp
    except ImportError as error:
        raise MissingExtra("pyseccomp", "sandbox") from error
    except (OSError, RuntimeError) as error:
        raise ConfigError("libseccomp is missing: install it (Debian: apt install libseccomp2).") from error
    return pyseccomp


def _exported(rules: Any) -> bytes:
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        return os.pread(file.fileno(), 1 << 20, 0)


def _add(rules: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        rules.add_rule(action, name, *arguments)
    except (OSError, ValueError):
        # A call that this libseccomp or this architecture doesn't know is answered with ENOSYS, like all the unknown.
        logger.debug("seccomp: %s is not known here", name)
