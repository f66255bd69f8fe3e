"""Cgroups are reused when they are empty. Abandoned cgroups and directories are removed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolroll.sandbox.server.isolation import cgroup
from toolroll.sandbox.server.isolation.cgroup import CgroupPool
from toolroll.sandbox.server.isolation.scratch import ScratchDirectories

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
    limited = cgroups.acquire(1 << 28)
    memory, with_swap = (limited.memory / f"memory.{name}limit_in_bytes" for name in ("", "memsw."))
    if not with_swap.exists():
        pytest.skip("NOT TESTED: this machine has no limit that includes swap")
    cgroups.release(limited)
    assert cgroups.acquire(limit) is limited
    assert (int(memory.read_text()), int(with_swap.read_text())) == (limit, limit)
    cgroups.release(limited)


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


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cgroup of version 2 that an administrator made for this process, and named like the server's own."""
    named = tmp_path / "limited" / cgroup.SERVER_CGROUP
    named.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    (named / "cgroup.type").touch()
    monkeypatch.setattr(cgroup, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_parent_of_programs", None)
    monkeypatch.setattr(cgroup, "_cgroups_of_this_process", lambda: {"": f"/limited/{cgroup.SERVER_CGROUP}"})
    return named


def test_server_stays_within_cgroup_of_any_name(version_2: Path) -> None:
    assert cgroup.enter_server_cgroup() == version_2
    assert (version_2 / cgroup.SERVER_CGROUP / "cgroup.procs").read_text() == str(os.getpid())
    assert cgroup.enter_server_cgroup() == version_2, "it is in another cgroup by now"


def test_front_uses_cgroup_that_its_hub_left(version_2: Path) -> None:
    assert cgroup.enter_server_cgroup(version_2.parent) == version_2.parent
    assert cgroup.enter_server_cgroup() == version_2.parent


def test_directory_of_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    create = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from toolroll.sandbox.server.isolation.scratch import ScratchDirectories\n"
        "os.chmod(ScratchDirectories().create(), 0); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", create, str(tmp_path)], check=True, timeout=60)
    (abandoned,) = tmp_path.iterdir()
    first, second = ScratchDirectories(), ScratchDirectories()
    assert not abandoned.exists()
    assert sorted(tmp_path.iterdir()) == sorted([first.directory, second.directory])
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())
