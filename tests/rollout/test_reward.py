"""Composition of rewards."""

import math
import threading
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.errors import BudgetExhausted, InfraFault
from toolroll.limiter.limited import limited
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.trajectory import Rewards

NUMBERS = st.floats(-100, 100)


@given(
    steps=st.lists(NUMBERS, max_size=5),
    tools=st.dictionaries(st.sampled_from("abc"), NUMBERS),
    functions=st.dictionaries(st.sampled_from("xyz"), st.none() | NUMBERS),
    weight=NUMBERS,
)
def test_total_is_weighted_sum(
    steps: list[float], tools: dict[str, float], functions: dict[str, float | None], weight: float
) -> None:
    rule = RewardRule(steps=weight, tools={"a": weight}, weights={"x": weight})
    total = rule.total(Rewards(total=None, steps=tuple(steps), tools=tools, functions=functions))
    if None in functions.values():
        assert total is None
        return
    expected = weight * math.fsum(steps)
    expected += sum((weight if name == "a" else 1) * value for name, value in tools.items())
    expected += sum((weight if name == "x" else 1) * value for name, value in functions.items() if value is not None)
    assert total == pytest.approx(expected, abs=1e-6)


async def test_functions_may_be_async_or_fail() -> None:
    async def async_function(_: object) -> float:
        return 2.0

    trajectory: object = object()
    rule = RewardRule(functions={"a": lambda _: 1.0, "b": async_function, "c": lambda _: None})
    scores = await rule.score(trajectory, 1.0)  # type: ignore[arg-type]
    assert scores == {"a": 1.0, "b": 2.0, "c": None}
    with pytest.raises(InfraFault, match="'a' failed: ZeroDivisionError"):
        await RewardRule(functions={"a": lambda _: 1 / 0}).score(trajectory, 1.0)  # type: ignore[arg-type]


async def test_limited_sync_function_runs_in_a_thread() -> None:
    resource, threads = f"judge-{uuid4().hex}", []

    @limited(resource=resource, budget={"calls": 2})
    def judge(trajectory: object) -> float:
        threads.append(threading.current_thread())
        return 1.0

    rule = RewardRule(functions={"judge": judge})
    for _ in range(2):
        assert await rule.score(object(), 5.0) == {"judge": 1.0}  # type: ignore[arg-type]
    assert threading.main_thread() not in threads
    with pytest.raises(BudgetExhausted):
        await rule.score(object(), 5.0)  # type: ignore[arg-type]
