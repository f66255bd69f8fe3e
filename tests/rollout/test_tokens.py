"""Invariants of TokenStream for any sequence of appends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from toolroll.rollout.tokens import Author, TokenStream

IDS = st.lists(st.integers(0, 200_000), max_size=20)
LOGPROBS = st.floats(-50, 0, width=32)


class TokenStreamMachine(RuleBasedStateMachine):
    """Compares a stream with plain lists."""

    @initialize(prompt=IDS, with_logprobs=st.booleans())
    def start(self, prompt: list[int], with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self.stream = TokenStream(prompt)
        self.ids, self.mask, self.logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
        self.prompt, self.turn = len(prompt), 0
        self.before: list[int] = []

    @rule(ids=IDS, data=st.data(), version=st.none() | st.text(max_size=3))
    def append_sampled(self, ids: list[int], data: st.DataObject, version: str | None) -> None:
        logprobs = data.draw(st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids))) if self.with_logprobs else None
        self.stream.append_sampled(ids, logprobs, turn=self.turn, weight_version=version)
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)

    @rule(ids=IDS)
    def append_unsampled(self, ids: list[int]) -> None:
        self.stream.append_unsampled(ids, turn=self.turn)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.turn += 1

    @invariant()
    def equals_lists(self) -> None:
        stream = self.stream
        assert list(stream.ids) == self.ids
        assert list(stream.mask) == self.mask
        assert list(stream.logprobs) == self.logprobs
        assert list(stream.ids)[: len(self.before)] == self.before, "append-only"
        self.before = list(self.ids)

    @invariant()
    def spans_cover_stream(self) -> None:
        ends = 0
        for span in self.stream.spans:
            assert span.start == ends < span.end
            ends = span.end
            sampled = span.author is Author.MODEL
            assert set(self.stream.mask[span.start : span.end]) == {int(sampled)}
        assert ends == len(self.stream)

    @invariant()
    def prompt_and_response_cover_stream(self) -> None:
        stream = self.stream
        assert stream.prompt_ids + stream.response_ids == self.ids
        assert stream.prompt_length == self.prompt
        assert len(stream.response_mask) == stream.response_length == len(self.ids) - self.prompt
        if stream.response_logprobs is not None:
            assert len(stream.response_logprobs) == stream.response_length


TestTokenStream = TokenStreamMachine.TestCase


def test_inconsistent_logprobs_are_rejected() -> None:
    stream = TokenStream([1])
    with pytest.raises(ValueError, match="got 1 for 2 tokens"):
        stream.append_sampled([1, 2], [0.0], turn=0)
    stream.append_sampled([1, 2], [-1.0, -2.0], turn=0)
    with pytest.raises(ValueError, match="only some of the sampled tokens"):
        stream.append_sampled([3], None, turn=1)
    assert list(stream.ids) == [1, 1, 2], "a rejected append has no effect"


@given(logprobs=st.lists(LOGPROBS, min_size=1, max_size=20))
def test_logprobs_round_trip(logprobs: list[float]) -> None:
    stream = TokenStream([])
    stream.append_sampled([7] * len(logprobs), logprobs, turn=0)
    assert stream.response_logprobs == logprobs
    assert not any(math.isnan(one) for one in logprobs)


def test_memory_per_token_is_small() -> None:
    stream = TokenStream(range(100_000))
    assert stream.ids.itemsize * len(stream) + len(stream.mask) + stream.logprobs.itemsize * len(stream) < 1_400_000
