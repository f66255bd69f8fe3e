"""Aggregates of a run match a direct computation, in any order and in parts."""

import json
import pickle
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import TRAJECTORIES, trajectory
from strategies import scaled

from toolroll.records.json_line import encode
from toolroll.records.line import trajectory_fields
from toolroll.records.record import Record
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.aggregates import MAX_DISTINCT_ERRORS, RunAggregates, SampleOutcome
from toolroll.run.pass_at_k import pass_at_k
from toolroll.run.status import RunRates, RunSnapshot, seconds_left


def outcome(row: int = 0, sample: int = 0, reward: float | None = 1.0, **other: Any) -> SampleOutcome:
    given: dict[str, Any] = {
        "outcome": "ok", "finish_reason": "stop", "turns": 2, "sampled": 10, "tokens": 20, "calls": 1,
        "policy_faults": 0, "infra_faults": 0, "seconds": 1.0, "tool_seconds": 0.5, "queue_wait": 0.1,
        "fidelity": "exact",
    }  # fmt: skip
    return SampleOutcome(row=row, sample=sample, reward=reward, **{**given, **other})


def aggregate(outcomes: list[SampleOutcome], n: int = 1, **other: Any) -> RunAggregates:
    aggregates = RunAggregates(n, **other)
    for one in outcomes:
        aggregates.add(one)
    return aggregates


def brute_force(rewards: list[list[float | None]], k: int) -> float | None:
    """Compute pass@k by its definition: the share of choices of k scored samples in which at least one is solved."""
    parts = []
    for samples in rewards:
        scored = [reward >= 1.0 for reward in samples if reward is not None]
        if len(scored) >= k:
            chosen = list(combinations(scored, k))
            parts.append(fmean(any(some) for some in chosen))
    return fmean(parts) if parts else None


PROMPTS = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=n), max_size=8)
    )
)


@given(prompts=PROMPTS, order=st.randoms(use_true_random=False), cut=st.floats(0, 1))
def test_pass_at_k_matches_definition_in_any_order(
    prompts: tuple[int, list[list[float | None]]], order: Any, cut: float
) -> None:
    n, rewards = prompts
    outcomes = [outcome(row, place, reward) for row, some in enumerate(rewards) for place, reward in enumerate(some)]
    order.shuffle(outcomes)
    at = int(cut * len(outcomes))
    whole, part, rest = aggregate(outcomes, n), aggregate(outcomes[:at], n), aggregate(outcomes[at:], n)
    state = json.loads(json.dumps(part.state()))
    merged = RunAggregates.from_state(state)
    merged.merge(rest)
    summary = whole.summary()
    for k, found in summary["pass_at_k"].items():
        assert found == pytest.approx(brute_force(rewards, int(k)), abs=1e-6)
    assert {"1", str(n)} >= summary["pass_at_k"].keys() - {"2", "4"}
    assert merged.summary()["pass_at_k"] == pytest.approx(summary["pass_at_k"], abs=2e-6)
    for name in ("trajectories", "prompts", "incomplete_prompts", "scored", "solved", "finish_reasons", "seconds"):
        assert merged.summary()[name] == summary[name]


def test_pass_at_k_of_known_cases() -> None:
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(10, 10, 5) == 1.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(2, 1, 2) == 1.0
    summary = aggregate([outcome(0, place, float(place == 0)) for place in range(8)], n=8).summary()
    assert summary["pass_at_k"] == {"1": 0.125, "2": 0.25, "4": 0.5, "8": 1.0}


def test_infra_faults_do_not_count_against_the_model() -> None:
    lost = outcome(0, 1, None, outcome="infra", finish_reason="infra", infra_faults=1, error="The sandbox is down.")
    summary = aggregate([outcome(0, 0, 1.0), lost], n=2).summary()
    assert summary["mean_reward"] == 1.0
    assert summary["pass_at_k"] == {"1": 1.0}, "no prompt has two scored samples"
    assert summary["faults"] == {"policy": 0, "infra": 1}
    assert summary["errors"] == {"The sandbox is down.": 1}
    assert summary["outcomes"] == {"ok": 1, "infra": 1}


def test_empty_aggregates_have_no_reward() -> None:
    summary = RunAggregates(4).summary()
    assert (summary["trajectories"], summary["mean_reward"], summary["pass_at_k"]) == (0, None, {})
    json.dumps(summary, allow_nan=False)


def test_solved_at_sets_the_threshold() -> None:
    assert aggregate([outcome(reward=0.6)], solved_at=0.5).summary()["pass_at_k"] == {"1": 1.0}
    assert aggregate([outcome(reward=0.6)]).summary()["pass_at_k"] == {"1": 0.0}


def test_state_size_is_bounded() -> None:
    aggregates = RunAggregates(4)
    for number in range(40_000):
        error = f"error {number}" if number % 100 == 0 else None
        aggregates.add(outcome(number // 4, number % 4, float(number % 3 == 0), seconds=number * 0.01, error=error))
    assert len(json.dumps(aggregates.state())) < 16_000
    assert len(aggregates.summary()["errors"]) <= MAX_DISTINCT_ERRORS + 1
    assert aggregates.summary()["incomplete_prompts"] == 0
    assert aggregates.summary()["prompts"] == 10_000


@settings(max_examples=scaled(50))
@given(given=TRAJECTORIES)
def test_outcome_of_record_equals_that_of_trajectory(given: Trajectory) -> None:
    record = Record.parse(encode(trajectory_fields(given, 3)))
    assert SampleOutcome.from_record(record, 7) == SampleOutcome.from_trajectory(given, 7)


def test_pickled_outcome_is_small() -> None:
    made = SampleOutcome.from_trajectory(trajectory(9), 1)
    assert made.sample == 1
    assert (made.turns, made.sampled, made.tokens, made.calls) == (2, 5, 11, 1)
    assert made.queue_wait == 0.25
    assert len(pickle.dumps(made)) < 250
    assert pickle.loads(pickle.dumps(made)) == made


def status(**other: Any) -> RunSnapshot:
    given: dict[str, Any] = {
        "done": 0, "running": 0, "queued": None, "total": None, "tokens": 0, "calls": 0, "in_flight": None,
        "limit": None, "workers": 1, "seconds": 0.0,
    }  # fmt: skip
    return RunSnapshot(**{**given, **other})


def test_rates_and_remaining_time() -> None:
    before, after = status(done=100, resumed=100), status(done=150, tokens=500, calls=5, seconds=10.0, resumed=100)
    assert RunRates.between(before, after) == RunRates(5.0, 50.0, 0.5)
    assert RunRates.between(after, after) == RunRates()
    assert seconds_left(after) is None
    assert seconds_left(status(done=150, total=200, seconds=10.0, resumed=100)) == pytest.approx(10.0)
    assert seconds_left(status(done=100, total=200, seconds=10.0, resumed=100)) is None


def test_program_of_a_cached_result_is_not_counted() -> None:
    [call] = trajectory().calls
    cached = replace(call, metrics={**call.metrics, "cache": {"age_s": 1.0, "origin": "request-1"}})
    assert SampleOutcome.from_trajectory(trajectory(calls=[call, cached]), 0).programs == {"ok": 1}
