"""A process that connects to one Ray cluster after another."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

TWO_CLUSTERS = """
import time
import ray
from toolroll import get_limiter
from toolroll._internal.ray_cluster import start_local

for limit in (3, 5):
    start_local(num_cpus=1)
    time.sleep(1.0)  # in which a limiter of the first cluster could connect to the second one
    limiter = get_limiter("service", limit)
    with limiter.slot(hold=1):
        print(limiter.limit, flush=True)
    ray.shutdown()
"""


def test_next_cluster_gets_its_own_limits() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_CLUSTERS], capture_output=True, text=True, timeout=150)
    assert done.stdout == "3\n5\n", done.stderr
