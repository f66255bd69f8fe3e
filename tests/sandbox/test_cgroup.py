"""The limits on all processes of a program together."""

import pytest

from toolroll.sandbox.server.cgroup import Cgroups


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_spare_one_that_somebody_cleared_away_is_made_anew(looked_at: bool) -> None:
    """As a server in a container beside this one does, which sees its cgroups and not its process."""
    cgroups = Cgroups.find(processes=8, keep=2)
    if cgroups is None:
        pytest.skip("there are no cgroups here")
    try:
        cgroups.close()
        spare = cgroups.take(1 << 28)
        if looked_at:
            assert spare.memory_kills() == 0
        cgroups.give_back(spare)
        for directory in spare.directories:
            directory.rmdir()
        taken = cgroups.take(1 << 28)
        assert taken.directories != spare.directories
        assert all(directory.exists() for directory in taken.directories)
        assert taken.memory_kills() == 0
        cgroups.give_back(taken)
    finally:
        cgroups.close()
