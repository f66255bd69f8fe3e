"""A request's states and limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.limits import Limits
from toolroll.rollout.request import TRANSITIONS, AsyncRolloutRequest, State, WrongTransition
from toolroll.rollout.trajectory import Fidelity, FinishReason
from toolroll.schemas import Message


def request(**limits: object) -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="?")], limits=Limits(**limits))  # type: ignore[arg-type]


def test_rollout_req_creation() -> None:
    """The original's test plan: one request, PENDING."""
    made = request()
    assert made.state is State.PENDING
    assert (len(made.messages), made.finish_reason, made.turn, len(made.tokens)) == (1, None, 0, 0)
    assert made.request_id != request().request_id


@given(path=st.lists(st.sampled_from(State), max_size=8))
def test_only_what_the_table_allows_can_happen(path: list[State]) -> None:
    made = request()
    for state in path:
        before = made.state
        if state in TRANSITIONS[before]:
            made.go(state)
            assert made.state is state
        else:
            with pytest.raises(WrongTransition):
                made.go(state)
            assert made.state is before


def test_the_first_reason_to_end_stays() -> None:
    made = request()
    made.finish(FinishReason.STOP)
    made.finish(FinishReason.INFRA, "later")
    assert (made.finish_reason, made.error) == (FinishReason.STOP, None)


@given(
    prompt=st.integers(1, 50),
    most_prompt=st.none() | st.integers(1, 50),
    most_response=st.integers(1, 50),
    most_all=st.none() | st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
)
def test_the_limits_hold_if_no_more_is_written_than_there_is_room_for(
    prompt: int, most_prompt: int | None, most_response: int, most_all: int | None, steps: list[tuple[int, int]]
) -> None:
    made = request(max_prompt_len=most_prompt, max_response_len=most_response, max_seq_len=most_all)
    made.begin([1] * prompt)
    if most_prompt is not None and prompt > most_prompt:
        assert made.finish_reason is FinishReason.LENGTH
    for write, answer in steps:
        if made.state is State.FINISHED:
            break
        room = made.room()
        assert room > 0
        wrote = min(write, room)
        made.tokens.sampled([2] * wrote, None, turn=made.turn)
        assert made.tokens.response_length <= most_response
        assert most_all is None or len(made.tokens) <= most_all
        made.go(State.TOOL_CALLING)
        made.go_on([3] * answer, rerendered=False)
    if made.state is State.FINISHED:
        assert made.finish_reason is FinishReason.LENGTH


def test_a_turns_own_limit_counts_what_was_written_before_an_interruption() -> None:
    made = request()
    made.sampling_params = {"max_new_tokens": 10}
    made.begin([1, 2])
    assert made.room() == 10
    made.tokens.sampled([5] * 4, None, turn=0)
    assert made.room() == 6
    made.go(State.TOOL_CALLING)
    made.go_on([6], rerendered=False)
    assert made.room() == 10


def test_where_it_is_rendered_anew_a_sequence_of_its_own_begins() -> None:
    made = request(max_response_len=10)
    made.begin([1, 2])
    made.tokens.sampled([3] * 4, [-1.0] * 4, turn=0)
    first = made.tokens
    made.go(State.TOOL_CALLING)
    made.go_on([1, 2, 9, 9, 9, 4], rerendered=True)
    assert made.fidelity is Fidelity.RERENDERED
    assert made.earlier == [first]
    assert list(made.tokens.mask) == [0] * 6, "what wasn't sampled here isn't trained here"
    assert made.room() == 6, "the limit is the whole response's"


def test_deadlines_nest() -> None:
    with pytest.raises(ValueError, match="deadlines nest"):
        Limits(call_timeout=10, turn_timeout=5)
