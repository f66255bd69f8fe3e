"""Cgroups are reused when they are empty, and abandoned ones are removed."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from toolroll.sandbox.server.isolation.cgroup import CgroupPool

pytestmark = pytest.mark.sandbox


@pytest.fixture
def cgroups() -> Iterator[CgroupPool]:
    found = CgroupPool.find(max_processes=8, max_spare=2)
    if found is None:
        pytest.skip("NOT TESTED: this process cannot create cgroups")
    yield found
    found.close()


def test_removed_spare_cgroup_is_recreated(cgroups: CgroupPool) -> None:
    cgroups.close()
    spare = cgroups.acquire(1 << 28)
    cgroups.release(spare)
    for directory in spare.directories:
        directory.rmdir()
    acquired = cgroups.acquire(1 << 28)
    assert acquired.directories != spare.directories
    assert all(directory.exists() for directory in acquired.directories)
    assert acquired.oom_kills() == 0
    cgroups.release(acquired)


def test_cgroup_with_charged_memory_is_not_reused(cgroups: CgroupPool) -> None:
    """In-memory files are freed shortly after their program ends; here, when the descriptor is closed."""
    cgroups.close()
    first = cgroups.acquire(1 << 28)
    file = os.memfd_create("left")
    writing = f"import os; os.write({first.descriptors[0]}, b'0'); os.write({file}, bytes(64 << 20))"
    subprocess.run([sys.executable, "-c", writing], pass_fds=[*first.descriptors, file], check=True, timeout=60)
    assert first.memory_in_use() > 60 << 20
    cgroups.release(first)
    second = cgroups.acquire(1 << 28)
    assert second.memory_in_use() < 1 << 20
    os.close(file)
    cgroups.release(second)
    assert cgroups.acquire(1 << 28) is second
    cgroups.release(second)


@pytest.mark.parametrize("limit", [1 << 27, 1 << 29])
def test_limit_of_reused_cgroup_includes_swap(cgroups: CgroupPool, limit: int) -> None:
    cgroups.close()
    cgroup = cgroups.acquire(1 << 28)
    memory, with_swap = (cgroup.memory / f"memory.{name}limit_in_bytes" for name in ("", "memsw."))
    if not with_swap.exists():
        pytest.skip("NOT TESTED: this machine has no limit that includes swap")
    cgroups.release(cgroup)
    assert cgroups.acquire(limit) is cgroup
    assert (int(memory.read_text()), int(with_swap.read_text())) == (limit, limit)
    cgroups.release(cgroup)


def test_only_abandoned_cgroups_are_removed(cgroups: CgroupPool) -> None:
    """A server in another pid namespace sees the cgroups but not the processes that own them."""
    ours = cgroups.acquire(1 << 28)
    abandoned = cgroups.acquire(1 << 28)
    for descriptor in abandoned.locks:  # as if its server had been killed
        os.close(descriptor)
    abandoned.locks = []
    start = (
        "from toolroll.sandbox.server.isolation.cgroup import CgroupPool\n"
        "CgroupPool.find(max_processes=8, max_spare=2).close()"
    )
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    subprocess.run([*alone, sys.executable, "-c", start], check=True, timeout=60)
    assert all(directory.exists() for directory in ours.directories)
    assert not any(directory.exists() for directory in abandoned.directories)
    cgroups.release(ours)
