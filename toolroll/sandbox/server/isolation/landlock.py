"""Restrict the files that a process can access, with the kernel's Landlock. Requires no privileges.

Everything that is not allowed is denied, irrevocably, for the process and its children. Imports only the standard
library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from toolroll.sandbox.server.isolation import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
_FS_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
"""ABI version → number of file system rights that it supports. Versions from 5 support 16."""
_TCP_RIGHTS = 0b11
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 0b01, 0b10

# Not all of /dev: a program must not write to a terminal of the server's user.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SIGNAL_SCOPE_ABI = 6
"""First ABI version that prevents a process from signalling processes outside its domain."""


def prepare(
    abi: int, readable: Iterable[str], writable: str, devices: Iterable[str], *, network: bool
) -> list[syscalls.PreparedCall]:
    """Return calls that restrict this process and its future children. They require no_new_privs.

    From ABI `SIGNAL_SCOPE_ABI`, abstract Unix sockets and signals to processes outside the domain are denied too.

    Args:
        abi: Landlock ABI version of the kernel.
        readable: Paths below which files can be read and executed. Missing paths are skipped.
        writable: Path below which everything is allowed.
        devices: Device files that can be read and written.
        network: Allow TCP. Without it, TCP is denied from ABI version 4.
    """
    all_rights = (1 << _FS_RIGHTS_BY_ABI.get(abi, 16)) - 1
    read_rights = EXECUTE | READ_FILE | READ_DIR
    device_rights = (READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV) & all_rights
    denied_tcp_rights = 0 if network or abi < 4 else _TCP_RIGHTS
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= SIGNAL_SCOPE_ABI else 0
    rules = {}
    for path in readable:
        if os.path.exists(path):
            rules[path] = read_rights if os.path.isdir(path) else read_rights & ~READ_DIR
    rules |= {writable: all_rights, **dict.fromkeys(devices, device_rights)}
    return syscalls.prepare_landlock(all_rights, denied_tcp_rights, scopes, rules)
