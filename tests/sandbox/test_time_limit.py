"""The time limit: CPU time decides, and only a program that had its time is blamed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.protocol import FULL_TIME_FRACTION, max_wall_time
from toolroll.sandbox.server.execution.time_limit import TimeLimit, TimeSample, TimeVerdict

SECONDS = st.floats(0, 1e4)


@given(limit_s=st.floats(0.01, 100), elapsed_s=SECONDS, idle=st.floats(0, 1), busy_machine=st.floats(0, 1))
def test_program_with_little_own_time_is_never_blamed(
    limit_s: float, elapsed_s: float, idle: float, busy_machine: float
) -> None:
    """A program runs, waits for the processor, or sleeps. The first two do not depend on its choice."""
    waited_s = elapsed_s * busy_machine
    own_s = elapsed_s - waited_s
    sample = TimeSample(elapsed_s, cpu_s=own_s * (1 - idle), waited_s=waited_s)
    verdict = TimeLimit(limit_s).check(sample)
    if own_s < limit_s * FULL_TIME_FRACTION * 0.99:
        assert verdict is not TimeVerdict.TIMEOUT
    if own_s > max_wall_time(limit_s) * 1.01:
        assert verdict is TimeVerdict.TIMEOUT


@given(limit_s=st.floats(0.01, 100), cpu_share=st.floats(0, 4), waiting_share=st.floats(0, 1))
def test_every_program_is_stopped_in_the_end(limit_s: float, cpu_share: float, waiting_share: float) -> None:
    limit = TimeLimit(limit_s)
    elapsed_s = limit.first_check_s
    for _ in range(10_000):
        sample = TimeSample(elapsed_s, elapsed_s * cpu_share, elapsed_s * waiting_share)
        if limit.check(sample) is not TimeVerdict.WITHIN_LIMIT:
            break
        elapsed_s += limit.until_next_check(sample)
    assert elapsed_s < limit.max_elapsed_s + 1


@pytest.mark.parametrize(
    ("elapsed_s", "waited_s", "verdict"),
    [(3.0, 0.0, TimeVerdict.TIMEOUT), (3.0, 2.5, TimeVerdict.STARVED), (2.9, 2.5, TimeVerdict.WITHIN_LIMIT)],
)
def test_elapsed_time_of_request_is_limited(elapsed_s: float, waited_s: float, verdict: TimeVerdict) -> None:
    assert TimeLimit(1.5, max_elapsed_s=3.0).check(TimeSample(elapsed_s, 0.1, waited_s)) is verdict
