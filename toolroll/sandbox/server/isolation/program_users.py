"""Kernel user ids for programs, so that no two programs share what the kernel counts for each user.

Among these are epoll watches, pipe memory, descriptors in flight, pending signals and processes. Only root can assign
user ids: programs of a server that runs as an unprivileged user have the server's user id.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_USERS = 4096
_FIRST_UID = 961_000_000
"""Start of the range. It is above the ranges of login.defs and subuid."""
_MAX_SERVERS = 1 << 16
_SPREAD = 40_503
"""Factor that spreads consecutive numbers over `_MAX_SERVERS`."""


class ProgramUsers:
    """The user ids of one server.

    Servers on the same machine have different ones, which depend on the process id. Servers in different containers may
    have the same process id, so the ids also depend on the namespace of process ids.
    """

    def __init__(self) -> None:
        container = os.stat("/proc/self/ns/pid").st_ino
        self.first = _FIRST_UID + (container * _SPREAD + os.getpid()) % _MAX_SERVERS * MAX_USERS
        self._free: list[int] = []
        self._lost: set[int] = set()
        """Ids whose programs may still be running."""
        self._next = self.first

    @classmethod
    def find(cls) -> ProgramUsers | None:
        """Return the user ids of this server, or None if it cannot assign any."""
        id_maps = [Path(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
        if os.geteuid() != 0 or not all(id_map.exists() for id_map in id_maps):  # there are none on macOS
            return None
        users = cls()
        return users if all(users.are_mapped(id_map) for id_map in id_maps) else None

    def are_mapped(self, id_map: Path) -> bool:
        """Return True if all ids exist in this user namespace, whose ids are in the file `id_map`."""
        ranges = [[int(number) for number in line.split()] for line in id_map.read_text().splitlines()]
        last = self.first + MAX_USERS - 1
        return any(first <= self.first and last < first + count for first, _, count in ranges)

    def acquire(self) -> int:
        """Return a user id that no program has.

        Raises:
            OSError: If all ids are in use.
        """
        if self._free:
            return self._free.pop()
        if self._next == self.first + MAX_USERS:
            return self._acquire_lost()
        self._next += 1
        return self._next - 1

    def release(self, user: int, *, reusable: bool = True) -> None:
        """Make a user id available again.

        Args:
            user: The user id.
            reusable: Whether all processes of its program have ended. If not, the id is available when all ids have
                been used and it has no processes.
        """
        if reusable:
            self._free.append(user)
        else:
            self._lost.add(user)

    def _acquire_lost(self) -> int:
        if not (self._lost and (ended := self._lost - _users_of_processes())):
            raise OSError(f"all {MAX_USERS} user ids of programs are in use")
        self._lost -= ended
        self._free += ended
        return self._free.pop()


def _users_of_processes() -> set[int]:
    """Return the real user ids of all processes."""
    users = set[int]()
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # the process has ended
            users.add(int(path.read_text().partition("\nUid:")[2].split(maxsplit=1)[0]))
    return users
