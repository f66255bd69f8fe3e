"""Sort order: numeric, unknown values last."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.query.listing import SORT_COLUMNS, SampleOrder, sorted_indices

SCORES = [9, None, 2e-05, 10, float("nan"), -0.05, 1.0, 0.5]


def test_scores_sort_numerically() -> None:
    assert [SCORES[index] for index in sorted_indices(SCORES)[:6]] == [-0.05, 2e-05, 0.5, 1.0, 9, 10]
    assert [SCORES[index] for index in sorted_indices(SCORES, descending=True)[:6]] == [10, 9, 1.0, 0.5, 2e-05, -0.05]


@given(st.lists(st.none() | st.floats()), st.booleans())
def test_unknown_values_are_last_and_sort_is_stable(scores: list[float | None], descending: bool) -> None:
    indices = sorted_indices(scores, descending)
    assert sorted(indices) == list(range(len(scores)))
    values = [scores[item] for item in indices]
    known = [value for value in values if value is not None and value == value]
    assert values[: len(known)] == known
    assert known == sorted(known, reverse=descending)
    for one, other in itertools.pairwise(indices):
        assert scores[one] != scores[other] or one < other


def test_next_cycles_through_columns() -> None:
    order, seen = SampleOrder(), []
    for _ in SORT_COLUMNS:
        seen.append(order.column)
        order = order.next()
    assert tuple(seen) == SORT_COLUMNS
    assert order == SampleOrder()
    assert order.reversed().reversed() == order
