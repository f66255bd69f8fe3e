"""Which files a process may touch, by the kernel's Landlock. Works without any privilege.

What isn't allowed is denied, for the process and for all that it starts, for good. Only the standard library is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from toolroll.sandbox.server import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
_LAST_RIGHT_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
"""ABI → how many rights on files it knows; 16 from the fifth on."""
_TCP = 0b11
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10

# Not all of /dev: a terminal of the server's user must not be typed into.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SIGNALS_FROM = 6
"""The first ABI that keeps a process from signalling those outside."""


def restrict(
    abi: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], *, network: bool
) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, use of devices, and nothing else.

    Without `network`, TCP is denied too, where the kernel can. Sockets and processes outside can't be reached by
    abstract name or by signal, where the kernel can. Needs no_new_privs.
    """
    all_rights = (1 << _LAST_RIGHT_OF_ABI.get(abi, 16)) - 1
    reading = EXECUTE | READ_FILE | READ_DIR
    ruleset = kernel.landlock_create_ruleset(
        all_rights,
        0 if network or abi < 4 else _TCP,
        _ABSTRACT_SOCKETS | _SIGNALS if abi >= SIGNALS_FROM else 0,
    )
    for path in readable:
        if os.path.isdir(path):
            kernel.landlock_allow_beneath(ruleset, path, reading)
        elif os.path.exists(path):
            kernel.landlock_allow_beneath(ruleset, path, reading & ~READ_DIR)
    for path in writable:
        kernel.landlock_allow_beneath(ruleset, path, all_rights)
    for path in devices:
        rights = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
        kernel.landlock_allow_beneath(ruleset, path, rights & all_rights)
    kernel.landlock_restrict_self(ruleset)
    os.close(ruleset)
