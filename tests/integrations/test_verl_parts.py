"""The parts of the verl integration that need no verl: settings, rows, the engine over its servers, the reward."""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll import ConfigError, Limits, Trajectory
from toolroll.errors import EngineRefused, EngineUnavailable
from toolroll.integrations.verl import reward
from toolroll.integrations.verl.recording import Recording
from toolroll.integrations.verl.sample import (
    clean_kwargs,
    fields_of,
    masked_row,
    rows_of,
    seconds_of,
    turns_of,
    why_left_out,
)
from toolroll.integrations.verl.server_engine import ServerEngine, finish_of
from toolroll.integrations.verl.settings import AgentSettings, RewardWeights, limits_of
from toolroll.records import reader
from toolroll.rollout.engines.engine import Finish, Timings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, TurnRecord
from toolroll.schemas import Message

# What verl's config says


def rollout_config(**turns: Any) -> dict[str, Any]:
    """verl's defaults."""
    multi_turn = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
    }
    return {
        "prompt_length": 512,
        "response_length": 1024,
        "max_model_len": None,
        "multi_turn": {**multi_turn, **turns},
    }


def test_verls_keys_are_the_limits() -> None:
    limits = limits_of(rollout_config(), {})
    assert (limits.max_prompt_len, limits.max_response_len, limits.max_seq_len) == (512, 1024, None)
    assert limits.max_assistant_turns == 1024, "no limit of its own: a turn has a token at least"
    assert limits.max_parallel_calls == 1
    assert (limits.max_tool_response_tokens, limits.cut_tool_response) == (64, "middle")
    assert limits.call_timeout == Limits().call_timeout, "verl has none"


@pytest.mark.parametrize(
    ("turns", "most"),
    [
        ({"max_assistant_turns": 5}, 5),
        ({"max_user_turns": 3}, 4),
        ({"max_assistant_turns": 2, "max_user_turns": 3}, 2),
    ],
)
def test_turns_are_limited_as_verl_limits_them(turns: dict[str, int], most: int) -> None:
    assert limits_of(rollout_config(**turns), {}).max_assistant_turns == most


@pytest.mark.parametrize(("side", "cut"), [("left", "start"), ("right", "end"), ("middle", "middle")])
def test_the_side_that_is_cut_off(side: str, cut: str) -> None:
    assert limits_of(rollout_config(tool_response_truncate_side=side), {}).cut_tool_response == cut


def test_a_limit_of_ours_goes_before_verls() -> None:
    limits = limits_of(rollout_config(), {"max_tool_response_tokens": 99, "call_timeout": 7})
    assert (limits.max_tool_response_tokens, limits.call_timeout) == (99, 7)
    with pytest.raises(ConfigError, match=r"limits: there is no key 'call_timeot' \(did you mean 'call_timeout'\?\)"):
        limits_of(rollout_config(), {"call_timeot": 7})


def test_settings_are_checked() -> None:
    assert AgentSettings.read({}).rewards is None
    assert AgentSettings.read({"rewards": {"steps": 0.5}}).rewards == RewardWeights(steps=0.5)
    with pytest.raises(ConfigError, match="there is no key 'limit'"):
        AgentSettings.read({"limit": {}})


# What verl gets


def stream(prompt: list[int], *parts: list[int]) -> TokenStream:
    """A stream in which the model and the tools write by turns."""
    made = TokenStream(prompt)
    for number, ids in enumerate(parts):
        if number % 2:
            made.given(ids, turn=number // 2)
        else:
            made.sampled(ids, [-0.5] * len(ids), turn=number // 2)
    return made


def trajectory(tokens: TokenStream, earlier: list[TokenStream] | None = None, **more: Any) -> Trajectory:
    given: dict[str, Any] = {
        "outcome": "ok",
        "finish_reason": FinishReason.STOP,
        "rewards": Rewards(total=1.0, steps=(0.5,), tools={"count": 0.5}),
        "calls": [],
        "turns": [],
        "messages": [Message(role="user", content="?"), Message(role="assistant", content="!")],
        **more,
    }
    return Trajectory(
        request_id="r",
        group="g",
        sample=0,
        tokens=tokens,
        earlier=earlier or [],
        fidelity=Fidelity.RERENDERED if earlier else Fidelity.EXACT,
        logprobs_of="scaled",
        seconds=1.0,
        extra={},
        **given,
    )


def test_a_row_is_the_stream_split_where_the_prompt_ends() -> None:
    (row,) = rows_of(trajectory(stream([1, 2], [3, 4], [5], [6])), response_length=10, logprobs=True)
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row.response_logprobs == [-0.5, -0.5, 0.0, -0.5]


def test_an_answer_of_a_tool_that_didnt_fit_is_cut_off() -> None:
    (row,) = rows_of(trajectory(stream([1], [2, 3], [4, 5, 6, 7])), response_length=4, logprobs=False)
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([2, 3, 4, 5], [1, 1, 0, 0], None)


def test_what_was_written_anew_is_part_of_the_response_and_masked() -> None:
    before, after = stream([1, 2], [3, 4], [5]), stream([1, 2, 30, 40, 5, 6], [7, 8])
    first, last = rows_of(trajectory(after, [before]), response_length=10, logprobs=True)
    assert (first.prompt_ids, first.response_ids) == ([1, 2], [3, 4, 5])
    assert (last.prompt_ids, last.response_ids) == ([1, 2], [30, 40, 5, 6, 7, 8])
    assert last.response_mask == [0, 0, 0, 0, 1, 1]
    assert last.response_logprobs == [0.0] * 4 + [-0.5] * 2


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 20),
    st.booleans(),
)
def test_rows_are_of_one_length_and_a_masked_one_has_nothing_to_learn_in(
    parts: list[list[int]], longest: int, logprobs: bool
) -> None:
    one = trajectory(stream(parts[0], *parts[1:]))
    kinds: dict[str, Any] = {"response_length": longest, "logprobs": logprobs}
    masked = masked_row(one, prompt_length=4, filler=7, **kinds)
    for row in (*rows_of(one, **kinds), masked):
        assert len(row.response_ids) == len(row.response_mask) <= longest
        assert (row.response_logprobs is not None) == logprobs
        assert row.response_logprobs is None or len(row.response_logprobs) == len(row.response_ids)
    assert not any(masked.response_mask)
    assert 1 <= len(masked.prompt_ids) <= 4
    assert masked.response_ids


def test_a_trajectory_without_anything_has_a_masked_row_all_the_same() -> None:
    row = masked_row(trajectory(TokenStream([])), prompt_length=4, response_length=8, logprobs=True, filler=7)
    assert (row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs) == ([7], [7], [0], [0.0])


def test_who_is_left_out() -> None:
    written = stream([1], [2])
    assert why_left_out(trajectory(written)) is None
    broken = trajectory(written, outcome="infra", finish_reason=FinishReason.INFRA, error="the sandbox is gone")
    assert why_left_out(broken) == "the sandbox is gone"
    aborted = trajectory(written, outcome="infra", finish_reason=FinishReason.ABORTED)
    assert why_left_out(aborted) == "it ended as aborted"
    assert "written nothing" in str(why_left_out(trajectory(stream([1]), finish_reason=FinishReason.DEADLINE)))
    assert why_left_out(trajectory(written, finish_reason=FinishReason.DEADLINE)) is None
    unknown = trajectory(written, rewards=Rewards(total=None, steps=(0.0,)))
    assert why_left_out(unknown) is None, "verl's reward loop gives the score"
    assert "reward function" in str(why_left_out(unknown, scored=True))


def test_a_trajectory_that_was_rendered_anew_before_the_model_wrote_again_is_kept() -> None:
    assert why_left_out(trajectory(stream([1, 2, 3]), [stream([1], [2])])) is None


def test_fields_and_times() -> None:
    def call(turn: int, seconds: float, reward: float | None) -> CallRecord:
        return CallRecord(turn=turn, tool="t", arguments={}, answer="", seconds=seconds, reward=reward)

    def turn(seconds: float) -> TurnRecord:
        return TurnRecord(turn=0, tokens=1, finish="stop", weight_version=None, timings=Timings(total=seconds))

    roles: Any = ["system", "user", "assistant", "tool", "tool", "assistant"]
    one = trajectory(
        stream([1], [2]),
        calls=[call(0, 1.0, 0.25), call(0, 3.0, None), call(1, 0.5, -1.0)],
        turns=[turn(2.0), turn(1.0)],
        messages=[Message(role=role, content="") for role in roles],
    )
    fields = fields_of(one, None)
    assert fields["turn_scores"] == [0.5]
    assert fields["tool_rewards"] == [0.25, -1.0]
    assert fields["toolroll"]["tools"] == {"count": 0.5}
    assert seconds_of(one) == (3.0, 3.5)
    assert turns_of(one, prompt_messages=2) == 4


def test_what_parquet_put_in_is_taken_out() -> None:
    given = {"a": {"create_kwargs": {"x": None, "y": 1}, "execute_kwargs": None}, "b": None}
    assert clean_kwargs(given) == {"a": {"create_kwargs": {"x": None, "y": 1}}}
    assert clean_kwargs(None) == {}


# The engine


@dataclass
class Servers:
    """verl's client, as far as the engine asks it."""

    ids: list[int] = field(default_factory=lambda: [5, 6, 2])
    reason: str | None = "stop"
    logprobs: list[float] | None = field(default_factory=lambda: [-0.1, -0.2, -0.3])
    told: dict[str, Any] = field(default_factory=lambda: {"global_steps": 3})
    delay: float = 0.0
    error: Exception | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0

    async def generate(self, **given: Any) -> Any:
        self.asked.append(given)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return SimpleNamespace(
            token_ids=self.ids,
            log_probs=self.logprobs,
            stop_reason=self.reason,
            num_preempted=1,
            routed_experts=None,
            extra_fields=self.told,
        )


PARAMS = {"temperature": 1.0, "logprobs": True, "max_new_tokens": 9, "stop_token_ids": (2,)}


async def test_the_servers_are_asked_as_verls_own_loops_ask_them() -> None:
    servers = Servers()
    engine = ServerEngine(servers, "session-1")
    generation = await engine.generate("r-0", [1, 2], PARAMS)
    assert servers.asked == [
        {"request_id": "session-1", "prompt_ids": [1, 2], "sampling_params": {**PARAMS, "stop_token_ids": [2]}}
    ]
    assert (generation.ids, generation.logprobs, generation.finish) == ([5, 6, 2], [-0.1, -0.2, -0.3], Finish.STOP)
    assert generation.weight_version == "3"
    servers.told = {"global_steps": 9, "min_global_steps": 4, "max_global_steps": 5, "spec_num_draft_tokens": 7}
    await engine.generate("r-1", [1, 2, 5, 6, 2], PARAMS)
    await engine.generate("r-2", [1, 2, 5, 6, 2], PARAMS)
    assert engine.steps == (3, 5), "the first weights, and the last"
    assert (engine.preempted, engine.counted) == (3, {"spec_num_draft_tokens": 14})


@pytest.mark.parametrize(
    ("reason", "ids", "finish"),
    [
        ("stop", [5], Finish.STOP),
        ("length", [5, 2], Finish.LENGTH),
        ("abort", [5], Finish.ABORT),
        ("aborted", [], Finish.ABORT),
        ("completed", [5, 2], Finish.STOP),
        ("completed", [5], Finish.LENGTH),
        (None, [5, 2], Finish.STOP),
        (None, [], Finish.LENGTH),
    ],
)
def test_why_a_server_stopped(reason: str | None, ids: list[int], finish: Finish) -> None:
    assert finish_of(reason, ids, [2]) is finish


async def test_log_probabilities_come_if_they_are_wanted_and_only_then() -> None:
    plain = {**PARAMS, "logprobs": False}
    for given_ in ([-0.1, -0.2, -0.3], [], None):
        assert (await ServerEngine(Servers(logprobs=given_), "s").generate("r", [1], plain)).logprobs is None
    for given_ in ([], None, [-0.1]):
        with pytest.raises(EngineUnavailable, match=r"log-probabilities"):
            await ServerEngine(Servers(logprobs=given_), "s").generate("r", [1], PARAMS)
    aborted = await ServerEngine(Servers(reason="aborted", logprobs=[-0.1]), "s").generate("r", [1], PARAMS)
    assert (aborted.ids, aborted.logprobs) == ([5], [-0.1]), "an abort may come between the two"


async def test_an_aborted_call_ends_at_once_and_says_that_nothing_is_known() -> None:
    servers = Servers(delay=30)
    engine = ServerEngine(servers, "s")
    call = asyncio.create_task(engine.generate("r", [1], PARAMS))
    await asyncio.sleep(0.01)
    await engine.abort("other")
    await engine.abort("r")
    generation = await asyncio.wait_for(call, 2)
    assert (generation.ids, generation.finish) == ([], Finish.ABORT)
    assert "isn't known" in str(generation.problem)
    await asyncio.sleep(0)
    assert servers.cancelled == 1


async def test_a_server_that_says_nothing_is_the_infrastructures_fault() -> None:
    with pytest.raises(EngineUnavailable, match="no answer"):
        await ServerEngine(Servers(delay=30), "s").generate("r", [1], PARAMS, deadline=time.monotonic() + 0.05)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("a worker died\n  somewhere"), EngineUnavailable), (ValueError("too long"), EngineRefused)],
)
async def test_what_a_server_raises_is_the_infrastructures_fault(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"somewhere|too long"):
        await ServerEngine(Servers(error=error), "s").generate("r", [1], PARAMS)


async def test_who_gives_up_takes_the_call_along() -> None:
    servers = Servers(delay=30)
    call = asyncio.create_task(ServerEngine(servers, "s").generate("r", [1], PARAMS))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert servers.cancelled == 1


# The reward


async def test_a_score_that_cant_be_had_is_raised_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[float | None] = [0.25, None]

    async def score(*_: Any, **__: Any) -> float | None:
        return scores.pop(0)

    monkeypatch.setattr(reward.code, "compute_score_async", score)
    assert await reward.compute_score_async("sums", "print(1)", {}) == 0.25
    with pytest.raises(reward.ScoreUnavailable, match="there is no score"):
        await reward.compute_score_async("sums", "print(1)", {})


async def test_a_reward_function_of_verls_is_told_the_same_by_our_loop() -> None:
    told: dict[str, Any] = {}

    def blocking(**given: Any) -> dict[str, Any]:
        told.update(given)
        return {"score": 0.75, "acc": True}

    async def unsure(**_: Any) -> None:
        return None

    one = trajectory(stream([1], [2, 3]))
    one.extra = {"data_source": "sums", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}}
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{list(ids)}")
    functions: list[Any] = [reward.as_reward_function(function, tokenizer) for function in (blocking, unsure)]
    assert [await function(one) for function in functions] == [0.75, None]
    assert (told["data_source"], told["solution_str"], told["ground_truth"]) == ("sums", "[2, 3]", "5")
    assert told["extra_info"] == {"index": 3, **fields_of(one, None)}


async def test_nobody_asks_the_sandbox_about_a_sample_that_was_left_out() -> None:
    told = {"toolroll": {"left_out": "the sandbox is gone"}}
    assert await reward.compute_score_async("sums", "print(1)", {}, told, sandbox_fusion_url="http://127.0.0.1:1") == 0
    assert reward.compute_score("sums", "print(1)", {}, told, sandbox_fusion_url="http://127.0.0.1:1") == 0


# Records


async def test_records_are_beside_verls_dump(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path), lambda ids: " ".join(map(str, ids)))
    await recording.write(trajectory(stream([1, 2], [3])), step=5)
    (folder,) = (tmp_path / "toolroll").iterdir()
    assert [file.name for file in folder.iterdir()] == ["5.jsonl"]
    (record,) = reader.read(tmp_path / "toolroll")
    assert (record.step, record.input, record.output) == (5, "1 2", "3")


async def test_a_record_that_cant_be_written_costs_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(str(tmp_path), lambda ids: str(1 / 0))
    await recording.write(trajectory(stream([1], [2])), step=1)
    assert "could not be written" in caplog.text


async def test_without_a_dump_of_verls_there_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await Recording(None, str).write(trajectory(stream([1], [2])), step=1)
    assert not list(tmp_path.iterdir())


# Without verl


def test_without_verl_the_extra_that_brings_it_is_named() -> None:
    program = "import sys\nsys.modules['verl'] = None\nfrom toolroll.integrations.verl import ToolrollAgentLoop"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install 'toolroll[verl]'" in done.stderr
