"""The time limit: CPU time decides, and only a program that had its time is blamed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.protocol import FULL_TIME_FRACTION, max_wall_time
from toolroll.sandbox.server.execution.time_limit import ThreadTimes, TimeLimit, TimeSample, TimeVerdict

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


@pytest.mark.parametrize(("elapsed_s", "verdict"), [(3.9, TimeVerdict.WITHIN_LIMIT), (4.0, TimeVerdict.TIMEOUT)])
def test_blocked_time_postpones_a_timeout(elapsed_s: float, verdict: TimeVerdict) -> None:
    blocked = TimeSample(elapsed_s, cpu_s=0.0, waited_s=0.0, blocked_s=elapsed_s)
    assert TimeLimit(1.0, max_elapsed_s=4.0).check(blocked) is verdict


@pytest.mark.parametrize(
    ("earlier_own_s", "own_s", "verdict"),
    [(15.0, 6.0, TimeVerdict.TIMEOUT), (8.0, 1.0, TimeVerdict.TIMEOUT), (8.0, 0.9, TimeVerdict.STARVED)],
)
def test_own_time_of_earlier_cells_counts(earlier_own_s: float, own_s: float, verdict: TimeVerdict) -> None:
    limit = TimeLimit(10.0, max_elapsed_s=6.0, full_own_s=FULL_TIME_FRACTION * 10.0 - earlier_own_s)
    assert limit.check(TimeSample(6.0, 0.0, waited_s=6.0 - own_s)) is verdict


@st.composite
def timelines(draw: st.DrawFn) -> list[tuple[str, float]]:
    """Return what a thread does, with durations: it runs, and then waits or sleeps and waits until it runs again."""
    durations = st.floats(0.001, 1)
    timeline = []
    for _ in range(draw(st.integers(1, 8))):
        timeline += [("wait", draw(durations))] if draw(st.booleans()) else []
        timeline += [("run", draw(durations))]
        timeline += [("sleep", draw(durations))] if draw(st.booleans()) else []
    return timeline[: draw(st.integers(1, len(timeline)))]


def kernel_times(timeline: list[tuple[str, float]], at_s: float) -> ThreadTimes:
    """Return the times that the kernel reports at a moment."""
    run_s = waits_s = 0.0
    runs, state = 0, ""
    for state, duration_s in timeline:
        runs += state == "run"
        run_s += min(duration_s, at_s) * (state == "run")
        if (at_s := at_s - duration_s) <= 1e-9:  # rounded: at its end, a state has not ended
            break
        waits_s += duration_s * (state == "wait")
    return ThreadTimes(run_s, waits_s, runs, is_ready=state != "sleep")


@given(timelines(), st.floats(0.01, 0.5))
def test_waits_are_counted_before_they_end(timeline: list[tuple[str, float]], interval_s: float) -> None:
    """The measured time differs from the true one by at most one interval, and is 0 if the thread never waits."""
    end_s = sum(duration_s for _, duration_s in timeline)
    times = ThreadTimes(0.0, 0.0, 0, is_ready=False)
    for number in range(1, int(end_s / interval_s) + 1):
        times = kernel_times(timeline, number * interval_s).since(times, interval_s)
    waited_s, at_s, position_s = 0.0, int(end_s / interval_s) * interval_s, 0.0
    for state, duration_s in timeline:
        waited_s += max(0.0, min(duration_s, at_s - position_s)) * (state == "wait")
        position_s += duration_s
    assert waited_s - interval_s - 1e-6 <= times.waited_s
    # The last sleep can be counted, if it began and ended between two measurements.
    assert times.waited_s <= waited_s + (interval_s if times.current_wait_s else 0) + 1e-6
    if not any(state == "wait" for state, _ in timeline):
        assert times.waited_s <= 1e-6
