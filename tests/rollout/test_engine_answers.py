"""Wrong answers of engines, none of which becomes part of a trajectory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox.fault_server import FaultServer, answer

from rollout.fake_servers import IDS, FakeVLLM
from rollout.scripted_model import Model
from toolroll.errors import EngineUnavailable, Fault, fault_of
from toolroll.rollout.engines.base import FinishType, Generation, GenerationTimings
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.engines.vllm import VLLMEngine
from toolroll.rollout.generation_checks import find_fault
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Trajectory

PARAMS = {"max_new_tokens": 8}
PROMPT = [1, 2, 3]


def sglang_answer(**meta: Any) -> dict[str, Any]:
    """Return a response of SGLang."""
    entries = [[-0.5, 5, None], [-0.25, 6, None], [-1.0, 2, None]]
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "output_token_logprobs": entries,
        **meta,
    }
    return {"text": "", "output_ids": [5, 6, 2], "meta_info": meta}


SGLANG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "NaN in the model": ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "output was NaN"),
    "log-probabilities of other ids": (
        {"output_token_logprobs": [[-0.25, 6, None], [-1.0, 2, None], [-0.5, 5, None]]},
        "log-probability 0 belongs to id 6, but id 5 was sampled",
    ),
    "log-probabilities of other ids after an abort": (
        {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.25, 6, None], [-1.0, 2, None]]},
        "log-probability 0 belongs to id 6, but id 5 was sampled",
    ),
    "shortened prompt": ({"prompt_tokens": 2}, "the prompt had 3 ids, but the server used 2"),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize(("meta", "message"), SGLANG_FAULTS.values(), ids=SGLANG_FAULTS)
async def test_wrong_engine_answer_of_sglang_is_an_infra_fault(meta: dict[str, Any], message: str) -> None:
    async with FaultServer([answer(200, sglang_answer(**meta))]) as server:
        async with SGLangEngine(server.url, vocab_size=100) as engine:
            with pytest.raises(EngineUnavailable, match=message) as caught:
                await engine.generate("r", PROMPT, PARAMS)
        assert fault_of(caught.value) is Fault.INFRA
        assert len(server.requests) == 1, "the server would return the same again"


@pytest.mark.virtual_time
async def test_right_engine_answer_of_sglang_is_accepted() -> None:
    async with (
        FaultServer([answer(200, sglang_answer())]) as server,
        SGLangEngine(server.url, vocab_size=100) as engine,
    ):
        right = await engine.generate("r", PROMPT, PARAMS)
    assert (right.ids, right.logprobs) == ([5, 6, 2], [-0.5, -0.25, -1.0])


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens API", "completions API"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shortened", [0, 1])
async def test_wrong_engine_answer_of_vllm_is_an_infra_fault(scale_out: bool, shift: int, shortened: int) -> None:
    server = FakeVLLM(scale_out=scale_out, shift=shift, shortened=shortened)
    async with server.serve() as url, VLLMEngine(url) as engine:
        if not shift and not shortened:
            assert (await engine.generate("r", PROMPT, PARAMS)).ids == IDS
            return
        with pytest.raises(EngineUnavailable, match="belongs to id" if not shortened else "the server used 2"):
            await engine.generate("r", PROMPT, PARAMS)


# Answers of any engine


def generation(ids: list[int], logprobs: list[Any] | None = None, **fields: Any) -> Generation:
    finish = fields.pop("finish", FinishType.STOP)
    return Generation(ids=ids, logprobs=logprobs or [-0.5] * len(ids), finish=finish, **fields)


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.5, -9999.0, -10000.0, "x"])
def test_impossible_logprob_in_engine_answer_is_found(value: Any) -> None:
    fault = find_fault(generation([5, 6, 2], [-1.0, value, -1.0]), TokenStream(PROMPT), {}, decode)
    assert fault is not None
    assert fault.startswith("log-probability 1 is ")


@given(st.lists(st.floats(-9998.0, 0.0), min_size=1, max_size=8), st.sampled_from(FinishType))
def test_possible_logprobs_in_engine_answer_are_accepted(logprobs: list[float], finish: FinishType) -> None:
    answered = generation([5] * len(logprobs), logprobs, finish=finish)
    assert find_fault(answered, TokenStream(PROMPT), {"stop_token_ids": [2]}, decode) is None


STOP: dict[str, Any] = {"stop_token_ids": [2], "stop": ["END"]}


@pytest.mark.parametrize(
    ("ids", "params", "finish", "fault"),
    [
        ([5, 2], STOP, FinishType.STOP, None),
        ([5, 2, 6], STOP, FinishType.STOP, "1 ids follow the stop token 2"),
        ([5, 2, 6], STOP, FinishType.LENGTH, "1 ids follow the stop token 2"),
        ([5, 2, 6], STOP | {"ignore_eos": True}, FinishType.LENGTH, None),
        ([*map(ord, "xEND")], STOP, FinishType.STOP, None),
        ([*map(ord, "xENDy")], STOP, FinishType.STOP, "ids follow the stop text 'END'"),
        ([*map(ord, "xENDy")], {"stop": "END"}, FinishType.STOP, "ids follow the stop text 'END'"),
        ([], STOP, FinishType.LENGTH, None),
    ],
)
def test_ids_behind_the_end_in_engine_answer_are_found(
    ids: list[int], params: dict[str, Any], finish: FinishType, fault: str | None
) -> None:
    assert find_fault(generation(ids, finish=finish), TokenStream(PROMPT), params, decode) == fault


@pytest.mark.parametrize(
    ("version", "cached", "keeps_cache", "is_stale"),
    [
        ("2", 6, False, True),
        ("2", 5, False, False),  # the prompt and the first turn of another sample of the group
        ("1", 6, False, False),
        (None, 6, False, False),
        ("2", None, False, False),
        ("2", 6, True, False),
    ],
)
def test_cache_of_old_weights_in_engine_answer_is_found(
    version: str | None, cached: int | None, keeps_cache: bool, is_stale: bool
) -> None:
    tokens = TokenStream(PROMPT)
    tokens.append_sampled([5, 2], [-1.0, -1.0], turn=0, weight_version="1")
    tokens.append_unsampled([7, 8], turn=0)
    timings = GenerationTimings(total=0.0, cached_tokens=cached)
    answered = generation([5, 2], weight_version=version, timings=timings)
    fault = find_fault(answered, tokens, {}, decode, may_keep_cache=keeps_cache)
    assert (fault is not None) == is_stale
    if fault:
        assert "Reset the prefix cache after each update of the weights" in fault


class LyingEngine(ScriptedEngine):
    """An engine that returns wrong answers."""

    def __init__(self, lie: Callable[[Generation], Generation], ids: list[int]) -> None:
        super().__init__([ids])
        self._lie = lie

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        return self._lie(await super().generate(*args, **kwargs))


async def test_wrong_engine_answer_excludes_the_trajectory(model: Model) -> None:
    def lie(right: Generation) -> Generation:
        return Generation(ids=right.ids, logprobs=[math.nan] * len(right.ids), finish=right.finish)

    engine = LyingEngine(lie, [*model.rendering.encode("Done."), *model.rendering.stop_ids[:1]])
    rollout = Rollout(engine=engine, rendering=model.rendering)
    [trajectory] = [trajectory async for trajectory in rollout.run(["Hi"])]
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.outcome, trajectory.finish_reason) == ("infra", "infra")
    assert "returned an invalid answer: log-probability 0 is nan" in str(trajectory.error)
    assert trajectory.tokens.response_length == 0


def test_token_stream_appends_all_or_nothing() -> None:
    stream = TokenStream(PROMPT)
    for ids, logprobs in (([1, None], [-1.0, -1.0]), ([1, 2], [-1.0, None]), ([1, "x"], [-1.0, -1.0])):
        with pytest.raises(TypeError):
            stream.append_sampled(ids, logprobs, turn=0)  # type: ignore[arg-type]
        assert len(stream.ids) == len(stream.mask) == len(stream.logprobs) == 3
        assert len(stream.spans) == 1
