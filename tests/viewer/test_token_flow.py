"""Rows of tokens and their styles."""

import math
import time

from hypothesis import given
from hypothesis import strategies as st

from toolroll.records.packed_tokens import PackedTokens, pack, unpack
from toolroll.rollout.tokens import TokenStream
from toolroll.viewer.documents.token_flow import TokenFlow, probability_style


def tokens(prompt: list[int], sampled: list[int], tool: list[int], logprobs: list[float] | None) -> PackedTokens:
    stream = TokenStream(prompt)
    stream.append_sampled(sampled, logprobs, turn=0, weight_version="v7")
    stream.append_unsampled(tool, turn=0)
    return unpack(pack(stream) | {"spans": [span_dict(span) for span in stream.spans]})


def span_dict(span: object) -> dict[str, object]:
    return {name: getattr(span, name) for name in ("author", "turn", "start", "end", "weight_version")}


IDS = st.lists(st.integers(0, 50_000), max_size=30)


@given(IDS, IDS, IDS, st.integers(8, 60))
def test_every_token_is_on_one_row_in_order(prompt: list[int], sampled: list[int], tool: list[int], width: int) -> None:
    flow = TokenFlow(tokens(prompt, sampled, tool, None), width)
    drawn = [shown.number for row in range(len(flow)) for shown in flow.row(row)]
    assert drawn == list(range(len(prompt) + len(sampled) + len(tool)))
    assert all(flow.row(row) for row in range(len(flow)))


def test_styles_follow_mask_and_probability() -> None:
    flow = TokenFlow(tokens([1], [2, 3, 4, 5, 6], [7], [math.log(p) for p in (0.95, 0.6, 0.2, 0.05, 0.001)]), 80)
    assert [flow.style(token) for token in range(7)] == [
        "token.prompt",
        "token.p90",
        "token.p50",
        "token.p10",
        "token.p01",
        "token.p00",
        "token.tool",
    ]
    assert flow.count_by_author() == {"prompt": 1, "model": 5, "tool": 1}
    assert flow.weight_versions() == ["v7"]
    assert flow.mean_logprob() is not None
    assert probability_style(float("nan")) == probability_style(None) == "token.sampled"
    assert probability_style(float("-inf")) == "token.p00"


def test_newline_ends_row_and_text_is_sanitized() -> None:
    texts = {1: "a\n", 2: "\x1b[2J", 3: "", 4: "[bold]"}
    flow = TokenFlow(tokens([1, 2, 3, 4], [1], [], None), 80, texts.__getitem__)
    assert [[shown.text for shown in flow.row(row)] for row in range(len(flow))] == [
        ["a⏎"],
        ["␛[2J", "∅", "[bold]", "a⏎"],
    ]


def test_100k_tokens_are_laid_out_quickly() -> None:
    many = tokens([], [number * 7919 % 50_000 for number in range(100_000)], [], [-0.1] * 100_000)
    began = time.process_time()
    flow = TokenFlow(many, 70)
    assert len(flow) > 5_000
    assert flow.row(len(flow) - 1)
    assert time.process_time() - began < 2
