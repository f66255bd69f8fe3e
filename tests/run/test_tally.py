"""What came of a run: the figures are those that one would count by hand, however they were gathered."""

import json
import pickle
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import TRAJECTORIES, trajectory

from toolroll.records.json_line import encode
from toolroll.records.line import fields_of
from toolroll.records.record import Record
from toolroll.rollout.trajectory import Trajectory
from toolroll.run.pass_at_k import pass_at_k
from toolroll.run.status import Rates, Status, seconds_left
from toolroll.run.tally import ERRORS, Outcome, Tally


def outcome(row: int = 0, sample: int = 0, reward: float | None = 1.0, **other: Any) -> Outcome:
    given: dict[str, Any] = {
        "outcome": "ok", "finish_reason": "stop", "turns": 2, "sampled": 10, "tokens": 20, "calls": 1,
        "policy_faults": 0, "infra_faults": 0, "seconds": 1.0, "tool_seconds": 0.5, "queue_wait": 0.1,
        "fidelity": "exact",
    }  # fmt: skip
    return Outcome(row=row, sample=sample, reward=reward, **{**given, **other})


def tallied(outcomes: list[Outcome], n: int = 1, **other: Any) -> Tally:
    tally = Tally(n, **other)
    for one in outcomes:
        tally.add(one)
    return tally


def by_hand(rewards: list[list[float | None]], k: int) -> float | None:
    """pass@k by its definition: of all ways to choose k scored samples, the part in which one has solved it."""
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
def test_pass_at_k_is_what_its_definition_says_in_any_order_and_in_parts(
    prompts: tuple[int, list[list[float | None]]], order: Any, cut: float
) -> None:
    n, rewards = prompts
    outcomes = [outcome(row, place, reward) for row, some in enumerate(rewards) for place, reward in enumerate(some)]
    order.shuffle(outcomes)
    at = int(cut * len(outcomes))
    whole, part, rest = tallied(outcomes, n), tallied(outcomes[:at], n), tallied(outcomes[at:], n)
    state = json.loads(json.dumps(part.state()))
    merged = Tally.of_state(state)
    merged.merge(rest)
    figures = whole.figures()
    for k, found in figures["pass_at_k"].items():
        assert found == pytest.approx(by_hand(rewards, int(k)), abs=1e-6)
    assert {"1", str(n)} >= figures["pass_at_k"].keys() - {"2", "4"}
    assert merged.figures()["pass_at_k"] == pytest.approx(figures["pass_at_k"], abs=2e-6)
    for name in ("trajectories", "prompts", "incomplete_prompts", "scored", "solved", "finish_reasons", "seconds"):
        assert merged.figures()[name] == figures[name]


def test_pass_at_k_of_known_cases() -> None:
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(10, 10, 5) == 1.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(2, 1, 2) == 1.0
    figures = tallied([outcome(0, place, float(place == 0)) for place in range(8)], n=8).figures()
    assert figures["pass_at_k"] == {"1": 0.125, "2": 0.25, "4": 0.5, "8": 1.0}


def test_what_the_infrastructure_did_is_no_failure_of_the_models() -> None:
    lost = outcome(0, 1, None, outcome="infra", finish_reason="infra", infra_faults=1, error="The sandbox is down.")
    figures = tallied([outcome(0, 0, 1.0), lost], n=2).figures()
    assert figures["mean_reward"] == 1.0
    assert figures["pass_at_k"] == {"1": 1.0}, "there are no two scored samples of any prompt"
    assert figures["faults"] == {"policy": 0, "infra": 1}
    assert figures["errors"] == {"The sandbox is down.": 1}
    assert figures["outcomes"] == {"ok": 1, "infra": 1}


def test_nothing_has_come_of_nothing() -> None:
    figures = Tally(4).figures()
    assert (figures["trajectories"], figures["mean_reward"], figures["pass_at_k"]) == (0, None, {})
    json.dumps(figures, allow_nan=False)


def test_where_a_problem_counts_as_solved_is_the_users_to_say() -> None:
    assert tallied([outcome(reward=0.6)], solved_at=0.5).figures()["pass_at_k"] == {"1": 1.0}
    assert tallied([outcome(reward=0.6)]).figures()["pass_at_k"] == {"1": 0.0}


def test_however_many_there_are_it_stays_small() -> None:
    tally = Tally(4)
    for number in range(40_000):
        error = f"error {number}" if number % 100 == 0 else None
        tally.add(outcome(number // 4, number % 4, float(number % 3 == 0), seconds=number * 0.01, error=error))
    assert len(json.dumps(tally.state())) < 16_000
    assert len(tally.figures()["errors"]) <= ERRORS + 1
    assert tally.figures()["incomplete_prompts"] == 0
    assert tally.figures()["prompts"] == 10_000


@settings(max_examples=50)
@given(given=TRAJECTORIES)
def test_a_record_says_of_a_trajectory_what_it_says_itself(given: Trajectory) -> None:
    record = Record.parse(encode(fields_of(given, 3)))
    assert Outcome.of_record(record, 7) == Outcome.of(given, 7)


def test_an_outcome_is_small_enough_to_be_sent_about() -> None:
    told = Outcome.of(trajectory(9), 1)
    assert told.sample == 1
    assert (told.turns, told.sampled, told.tokens, told.calls) == (2, 5, 11, 1)
    assert told.queue_wait == 0.25
    assert len(pickle.dumps(told)) < 250
    assert pickle.loads(pickle.dumps(told)) == told


def status(**other: Any) -> Status:
    given: dict[str, Any] = {
        "done": 0, "running": 0, "queued": None, "total": None, "tokens": 0, "calls": 0, "in_flight": None,
        "limit": None, "workers": 1, "seconds": 0.0,
    }  # fmt: skip
    return Status(**{**given, **other})


def test_rates_and_the_time_left() -> None:
    before, after = status(done=100, resumed=100), status(done=150, tokens=500, calls=5, seconds=10.0, resumed=100)
    assert Rates.between(before, after) == Rates(5.0, 50.0, 0.5)
    assert Rates.between(after, after) == Rates()
    assert seconds_left(after) is None
    assert seconds_left(status(done=150, total=200, seconds=10.0, resumed=100)) == pytest.approx(10.0)
    assert seconds_left(status(done=100, total=200, seconds=10.0, resumed=100)) is None
