"""States and length limits of a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.limits import Limits
from toolroll.rollout.request import TRANSITIONS, AsyncRolloutRequest, InvalidTransition, RequestState
from toolroll.rollout.trajectory import Fidelity, FinishReason
from toolroll.schemas import Message


def request(**limits: object) -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="?")], limits=Limits(**limits))  # type: ignore[arg-type]


def test_rollout_req_creation() -> None:
    """A case of the original test plan."""
    made = request()
    assert made.state is RequestState.PENDING
    assert (len(made.messages), made.finish_reason, made.turn, len(made.tokens)) == (1, None, 0, 0)
    assert made.request_id != request().request_id


@given(path=st.lists(st.sampled_from(RequestState), max_size=8))
def test_only_listed_transitions_are_allowed(path: list[RequestState]) -> None:
    made = request()
    for state in path:
        before = made.state
        if state in TRANSITIONS[before]:
            made.transition_to(state)
            assert made.state is state
        else:
            with pytest.raises(InvalidTransition):
                made.transition_to(state)
            assert made.state is before


def test_first_finish_reason_is_kept() -> None:
    made = request()
    made.finish(FinishReason.STOP)
    made.finish(FinishReason.INFRA, "later")
    assert (made.finish_reason, made.error) == (FinishReason.STOP, None)


@given(
    prompt=st.integers(1, 50),
    max_prompt=st.none() | st.integers(1, 50),
    max_response=st.integers(1, 50),
    max_seq=st.none() | st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
)
def test_length_limits_hold(
    prompt: int, max_prompt: int | None, max_response: int, max_seq: int | None, steps: list[tuple[int, int]]
) -> None:
    made = request(max_prompt_len=max_prompt, max_response_len=max_response, max_seq_len=max_seq)
    made.start([1] * prompt)
    if max_prompt is not None and prompt > max_prompt:
        assert made.finish_reason is FinishReason.LENGTH
    for turn_len, response_len in steps:
        if made.state is RequestState.FINISHED:
            break
        remaining = made.max_new_tokens()
        assert remaining > 0
        sampled = min(turn_len, remaining)
        made.tokens.append_sampled([2] * sampled, None, turn=made.turn)
        assert made.tokens.response_length <= max_response
        assert max_seq is None or len(made.tokens) <= max_seq
        made.transition_to(RequestState.TOOL_CALLING)
        made.append_tool_responses([3] * response_len, rerendered=False)
    if made.state is RequestState.FINISHED:
        assert made.finish_reason is FinishReason.LENGTH


def test_turn_limit_includes_tokens_before_interruption() -> None:
    made = request()
    made.sampling_params = {"max_new_tokens": 10}
    made.start([1, 2])
    assert made.max_new_tokens() == 10
    made.tokens.append_sampled([5] * 4, None, turn=0)
    assert made.max_new_tokens() == 6
    made.transition_to(RequestState.TOOL_CALLING)
    made.append_tool_responses([6], rerendered=False)
    assert made.max_new_tokens() == 10


def test_rerendering_starts_a_new_sequence() -> None:
    made = request(max_response_len=10)
    made.start([1, 2])
    made.tokens.append_sampled([3] * 4, [-1.0] * 4, turn=0)
    first = made.tokens
    made.transition_to(RequestState.TOOL_CALLING)
    made.append_tool_responses([1, 2, 9, 9, 9, 4], rerendered=True)
    assert made.fidelity is Fidelity.RERENDERED
    assert made.earlier == [first]
    assert list(made.tokens.mask) == [0] * 6, "no token of the new sequence is sampled yet"
    assert made.max_new_tokens() == 6, "max_response_len includes the earlier sequence"


def test_timeouts_must_nest() -> None:
    with pytest.raises(ValueError, match="Expected call_timeout"):
        Limits(call_timeout=10, turn_timeout=5)
