"""The limits on all processes of a program together."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from toolroll.sandbox.server.cgroup import Cgroups


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    found = Cgroups.find(processes=8, keep=2)
    if found is None:
        pytest.skip("NOT TESTED: this process may make no cgroups here")
    yield found
    found.close()


def test_a_spare_one_that_somebody_cleared_away_is_made_anew(cgroups: Cgroups) -> None:
    cgroups.close()
    spare = cgroups.take(1 << 28)
    cgroups.give_back(spare)
    for directory in spare.directories:
        directory.rmdir()
    taken = cgroups.take(1 << 28)
    assert taken.directories != spare.directories
    assert all(directory.exists() for directory in taken.directories)
    assert taken.memory_kills() == 0
    cgroups.give_back(taken)


def test_one_that_what_its_last_program_wrote_is_still_charged_to_is_not_used_again(cgroups: Cgroups) -> None:
    """Files in memory outlive their program for a moment; here, for as long as the descriptor is open."""
    cgroups.close()
    first = cgroups.take(1 << 28)
    file = os.memfd_create("left")
    writing = f"import os; os.write({first.descriptors[0]}, b'0'); os.write({file}, bytes(64 << 20))"
    subprocess.run([sys.executable, "-c", writing], pass_fds=[*first.descriptors, file], check=True, timeout=60)
    assert first.memory_in_use() > 60 << 20
    cgroups.give_back(first)
    second = cgroups.take(1 << 28)
    assert second.memory_in_use() < 1 << 20
    os.close(file)
    cgroups.give_back(second)
    assert cgroups.take(1 << 28) is second
    cgroups.give_back(second)


def test_a_server_in_a_container_beside_this_one_clears_away_what_is_nobodys_only(cgroups: Cgroups) -> None:
    """It sees these cgroups, and not the process that they belong to."""
    ours = cgroups.take(1 << 28)
    left_behind = cgroups.take(1 << 28)
    for descriptor in left_behind.held:  # as if the process that made it had been killed
        os.close(descriptor)
    left_behind.held = []
    beginning = "from toolroll.sandbox.server.cgroup import Cgroups; Cgroups.find(processes=8, keep=2).close()"
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    subprocess.run([*alone, sys.executable, "-c", beginning], check=True, timeout=60)
    assert all(directory.exists() for directory in ours.directories)
    assert not any(directory.exists() for directory in left_behind.directories)
    cgroups.give_back(ours)
