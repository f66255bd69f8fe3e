"""Sorting: by number, what is unknown last."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.ordering import COLUMNS, Order, in_order

SCORES = [9, None, 2e-05, 10, float("nan"), -0.05, 1.0, 0.5]


def test_scores_are_numbers() -> None:
    assert [SCORES[place] for place in in_order(SCORES)[:6]] == [-0.05, 2e-05, 0.5, 1.0, 9, 10]
    assert [SCORES[place] for place in in_order(SCORES, descending=True)[:6]] == [10, 9, 1.0, 0.5, 2e-05, -0.05]


@given(st.lists(st.none() | st.floats()), st.booleans())
def test_what_is_unknown_is_last_and_equals_stay_in_order(scores: list[float | None], descending: bool) -> None:
    made = in_order(scores, descending)
    assert sorted(made) == list(range(len(scores)))
    values = [scores[item] for item in made]
    known = [value for value in values if value is not None and value == value]
    assert values[: len(known)] == known
    assert known == sorted(known, reverse=descending)
    for one, other in itertools.pairwise(made):
        assert scores[one] != scores[other] or one < other


def test_the_key_goes_through_all_columns_and_around() -> None:
    order, seen = Order(), []
    for _ in COLUMNS:
        seen.append(order.column)
        order = order.next()
    assert tuple(seen) == COLUMNS
    assert order == Order()
    assert order.turned().turned() == order
