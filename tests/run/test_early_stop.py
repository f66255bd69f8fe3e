"""A run stops if everything fails in the same way, and only then."""

from hypothesis import given
from hypothesis import strategies as st

from toolroll.run.aggregates import SampleOutcome
from toolroll.run.early_stop import MAX_SAME_BUGS, MAX_SAME_ERRORS, EarlyStop

OK = SampleOutcome(0, 0, 1.0, "ok", "stop", 1, 5, 9, 0, 0, 0, 0.1, 0.0, 0.0, "exact")


def failed(error: str, *, retryable: bool = True) -> SampleOutcome:
    return OK._replace(outcome="infra", reward=None, error=error, retryable=retryable)


def watch(outcomes: list[SampleOutcome]) -> EarlyStop:
    stop = EarlyStop()
    for outcome in outcomes:
        stop.add(outcome)
    return stop


def test_same_error_from_the_start_stops_the_run() -> None:
    outcomes = [failed(f"http://a:30000: refused (attempts: {n}, in {n}.5 s; request {n:032x}).") for n in range(40)]
    assert watch(outcomes[: MAX_SAME_ERRORS - 1]).failure is None
    failure = watch(outcomes).failure
    assert failure is not None
    assert failure.startswith(f"The first {MAX_SAME_ERRORS} trajectories failed with the same error: http://a:30000")


def test_bug_stops_the_run_sooner() -> None:
    outcomes = [failed("Reward function 'right' failed: KeyError: 'a' (b.py:3).", retryable=False)] * MAX_SAME_BUGS
    assert watch(outcomes[:-1]).failure is None
    assert watch(outcomes).failure is not None


@given(st.lists(st.sampled_from([OK, failed("one"), failed("two"), failed("bug", retryable=False)]), max_size=100))
def test_run_with_any_success_or_several_errors_continues(outcomes: list[SampleOutcome]) -> None:
    stopped = watch(outcomes).failure is not None
    first = next((n for n, outcome in enumerate(outcomes) if outcome != outcomes[0]), len(outcomes))
    limit = MAX_SAME_ERRORS if outcomes and outcomes[0].retryable else MAX_SAME_BUGS
    assert stopped == (bool(outcomes) and outcomes[0].error is not None and first >= limit)
