"""Tests of the parts of the verl adapter that do not need verl: settings, rows, engine, rewards, records."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll import ConfigError, Limits, SandboxFusionTool, Trajectory
from toolroll.errors import EngineRefused, EngineUnavailable, validate
from toolroll.images import ImageSpan, read_image
from toolroll.integrations.summary import lost_fraction
from toolroll.integrations.verl import reward
from toolroll.integrations.verl.recording import RecordSink
from toolroll.integrations.verl.sample import (
    count_turns,
    generation_and_tool_seconds,
    left_out_reason,
    masked_row,
    sample_fields,
    token_rows,
    without_null_kwargs,
)
from toolroll.integrations.verl.server_engine import VerlServerEngine, finish_type
from toolroll.integrations.verl.settings import AgentSettings, RewardWeights, resolve_limits
from toolroll.integrations.verl.toolbox import add_tools, convert_tools
from toolroll.records import reader
from toolroll.rollout.engines.base import FinishType, GenerationTimings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, TurnRecord
from toolroll.schemas import Message

pytestmark = pytest.mark.virtual_time

# Settings


def rollout_config(**turns: Any) -> dict[str, Any]:
    """Return verl's default config."""
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


def test_limits_from_verl_config() -> None:
    limits = resolve_limits(rollout_config(), {})
    assert (limits.max_prompt_len, limits.max_response_len, limits.max_seq_len) == (512, 1024, None)
    assert limits.max_assistant_turns == 1024, "without a limit, each turn has at least one token"
    assert limits.max_parallel_calls == 1
    assert (limits.max_tool_response_tokens, limits.tool_response_truncate_side) == (64, "middle")
    assert limits.call_timeout == Limits().call_timeout, "verl has no such limit"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ({"max_assistant_turns": 5}, 5),
        ({"max_user_turns": 3}, 4),
        ({"max_assistant_turns": 2, "max_user_turns": 3}, 2),
    ],
)
def test_turn_limits(turns: dict[str, int], expected: int) -> None:
    assert resolve_limits(rollout_config(**turns), {}).max_assistant_turns == expected


@pytest.mark.parametrize(("verl_side", "side"), [("left", "start"), ("right", "end"), ("middle", "middle")])
def test_truncate_side(verl_side: str, side: str) -> None:
    assert resolve_limits(rollout_config(tool_response_truncate_side=verl_side), {}).tool_response_truncate_side == side


def test_own_limits_override_verl() -> None:
    limits = resolve_limits(rollout_config(), {"max_tool_response_tokens": 99, "call_timeout": 7})
    assert (limits.max_tool_response_tokens, limits.call_timeout) == (99, 7)
    with pytest.raises(ConfigError, match=r"limits: unknown key 'call_timeot' \(did you mean 'call_timeout'\?\)"):
        resolve_limits(rollout_config(), {"call_timeot": 7})


def test_settings_are_validated() -> None:
    assert validate(AgentSettings, {}, "settings").rewards is None
    assert validate(AgentSettings, {"rewards": {"steps": 0.5}}, "settings").rewards == RewardWeights(steps=0.5)
    with pytest.raises(ConfigError, match="unknown key 'limit'"):
        validate(AgentSettings, {"limit": {}}, "settings")


# Token rows


def stream(prompt: list[int], *parts: list[int]) -> TokenStream:
    """Return a token stream in which the model and the tools alternate."""
    tokens = TokenStream(prompt)
    for number, ids in enumerate(parts):
        if number % 2:
            tokens.append_unsampled(ids, turn=number // 2)
        else:
            tokens.append_sampled(ids, [-0.5] * len(ids), turn=number // 2)
    return tokens


def trajectory(tokens: TokenStream, earlier: list[TokenStream] | None = None, **more: Any) -> Trajectory:
    fields: dict[str, Any] = {
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
        logprobs_mode="processed_logprobs",
        seconds=1.0,
        extra={},
        **fields,
    )


def test_row_is_split_at_end_of_prompt() -> None:
    (row,) = token_rows(trajectory(stream([1, 2], [3, 4], [5], [6])), response_length=10, logprobs=True)
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row.response_logprobs == [-0.5, -0.5, 0.0, -0.5]


def test_tool_response_beyond_limit_is_truncated() -> None:
    (row,) = token_rows(trajectory(stream([1], [2, 3], [4, 5, 6, 7])), response_length=4, logprobs=False)
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([2, 3, 4, 5], [1, 1, 0, 0], None)


def test_rerendered_turns_are_masked_response() -> None:
    before, after = stream([1, 2], [3, 4], [5]), stream([1, 2, 30, 40, 5, 6], [7, 8])
    first, last = token_rows(trajectory(after, [before]), response_length=10, logprobs=True)
    assert (first.prompt_ids, first.response_ids) == ([1, 2], [3, 4, 5])
    assert (last.prompt_ids, last.response_ids) == ([1, 2], [30, 40, 5, 6, 7, 8])
    assert last.response_mask == [0, 0, 0, 0, 1, 1]
    assert last.response_logprobs == [0.0] * 4 + [-0.5] * 2


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 20),
    st.booleans(),
)
def test_rows_have_equal_lengths_and_masked_rows_no_mask(
    parts: list[list[int]], response_length: int, logprobs: bool
) -> None:
    one = trajectory(stream(parts[0], *parts[1:]))
    options: dict[str, Any] = {"response_length": response_length, "logprobs": logprobs}
    masked = masked_row(token_rows(one, **options)[-1], prompt_length=4, filler=7)
    for row in (*token_rows(one, **options), masked):
        assert len(row.response_ids) == len(row.response_mask) <= response_length
        assert (row.response_logprobs is not None) == logprobs
        assert row.response_logprobs is None or len(row.response_logprobs) == len(row.response_ids)
    assert not any(masked.response_mask)
    assert 1 <= len(masked.prompt_ids) <= 4
    assert masked.response_ids


IMAGES = [read_image(PIL.Image.new("RGB", (size, size))) for size in (10, 20)]


def stream_with_images() -> TokenStream:
    """Return a prompt and a tool response with an image each. 9 is its placeholder, 8 the token before it."""
    tokens = TokenStream([1, 8, 9, 9, 7], [ImageSpan(IMAGES[0], 2, 4)])
    tokens.append_sampled([2], [-0.5], turn=0)
    tokens.append_unsampled([8, 9, 9, 9, 7], turn=0, images=[ImageSpan(IMAGES[1], 1, 4)])
    return tokens


@pytest.mark.parametrize(
    ("response_length", "ids", "images"),
    [(20, [2, 8, 9, 9, 9, 7], 2), (5, [2, 8, 9, 9, 9], 2), (4, [2], 1), (2, [2], 1), (1, [2], 1)],
)
def test_truncated_row_has_only_whole_images(response_length: int, ids: list[int], images: int) -> None:
    (row,) = token_rows(trajectory(stream_with_images()), response_length=response_length, logprobs=True)
    assert row.response_ids == ids
    assert row.images == tuple(IMAGES[:images])


def test_masked_row_has_no_images() -> None:
    (row,) = token_rows(trajectory(stream_with_images()), response_length=9, logprobs=True)
    masked = masked_row(row, prompt_length=4, filler=7)
    assert (masked.prompt_ids, masked.response_ids, masked.images) == ([7], [7], ())


async def test_engine_passes_images_as_verl_does() -> None:
    servers = Servers()
    tokens = stream_with_images()
    params = {**PARAMS, "logit_bias": {"9": -100.0}}
    await VerlServerEngine(servers, "session-1").generate("r-0", tokens.ids, params, images=tokens.images)
    [request] = servers.requests
    assert request["sampling_params"]["logit_bias"] == {9: -100.0}, "verl passes it to vLLM's class"
    assert request["prompt_ids"] == tokens.ids.tolist(), "verl reduces the placeholders itself"
    assert [image.size for image in request["image_data"]] == [(10, 10), (20, 20)]


def test_empty_trajectory_has_masked_row() -> None:
    (empty,) = token_rows(trajectory(TokenStream([])), response_length=8, logprobs=True)
    row = masked_row(empty, prompt_length=4, filler=7)
    assert (row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs) == ([7], [7], [0], [0.0])


def test_exclusion_reasons() -> None:
    sampled = stream([1], [2])
    assert left_out_reason(trajectory(sampled)) is None
    broken = trajectory(sampled, outcome="infra", finish_reason=FinishReason.INFRA, error="the sandbox is gone")
    assert left_out_reason(broken) == "the sandbox is gone"
    aborted = trajectory(sampled, outcome="infra", finish_reason=FinishReason.ABORTED)
    assert left_out_reason(aborted) == "infra fault (finish_reason=aborted)"
    assert "no tokens were sampled" in str(
        left_out_reason(trajectory(stream([1]), finish_reason=FinishReason.DEADLINE))
    )
    assert left_out_reason(trajectory(sampled, finish_reason=FinishReason.DEADLINE)) is None
    unknown = trajectory(sampled, rewards=Rewards(total=None, steps=(0.0,)))
    assert left_out_reason(unknown) is None, "verl's reward loop computes the score"
    assert "reward function" in str(left_out_reason(unknown, needs_reward=True))


def test_rerendered_trajectory_with_earlier_tokens_is_kept() -> None:
    assert left_out_reason(trajectory(stream([1, 2, 3]), [stream([1], [2])])) is None


def test_part_without_sampled_tokens_is_no_row() -> None:
    earlier = [stream([1, 2], [3, 4], [5]), stream([1, 2, 30, 40, 5], [6])]
    ended = trajectory(stream([1, 2, 30, 40, 5, 60, 7]), earlier)
    rows = token_rows(ended, response_length=10, logprobs=True)
    assert [(row.part, sum(row.response_mask)) for row in rows] == [(0, 2), (1, 1)]
    truncated = token_rows(trajectory(earlier[1], earlier[:1]), response_length=3, logprobs=True)
    assert [row.part for row in truncated] == [0], "the sampled tokens of the second part are beyond the limit"
    assert lost_fraction(ended, trained_tokens=1) == pytest.approx(2 / 3)
    assert sample_fields(ended, None, 0.25)["toolroll"]["lost_tokens"] == 0.25


def test_fields_and_durations() -> None:
    def call(turn: int, seconds: float, reward: float | None) -> CallRecord:
        return CallRecord(turn=turn, tool="t", arguments={}, answer="", seconds=seconds, reward=reward)

    def turn(seconds: float) -> TurnRecord:
        return TurnRecord(
            turn=0, tokens=1, finish="stop", weight_version=None, timings=GenerationTimings(total=seconds)
        )

    roles: Any = ["system", "user", "assistant", "tool", "tool", "assistant"]
    one = trajectory(
        stream([1], [2]),
        calls=[call(0, 1.0, 0.25), call(0, 3.0, None), call(1, 0.5, -1.0)],
        turns=[turn(2.0), turn(1.0)],
        messages=[Message(role=role, content="") for role in roles],
    )
    fields = sample_fields(one, None)
    assert fields["turn_scores"] == [0.5]
    assert fields["tool_rewards"] == [0.25, -1.0]
    assert fields["toolroll"]["tools"] == {"count": 0.5}
    assert generation_and_tool_seconds(one) == (3.0, 3.5)
    assert count_turns(one, prompt_messages=2) == 4


def test_nulls_of_parquet_are_removed() -> None:
    kwargs = {"a": {"create_kwargs": {"x": None, "y": 1}, "execute_kwargs": None}, "b": None}
    assert without_null_kwargs(kwargs) == {"a": {"create_kwargs": {"x": None, "y": 1}}}
    assert without_null_kwargs(None) == {}


# Engine


@dataclass
class Servers:
    """Fake of verl's client."""

    ids: list[int] = field(default_factory=lambda: [5, 6, 2])
    reason: str | None = "stop"
    logprobs: list[float] | None = field(default_factory=lambda: [-0.1, -0.2, -0.3])
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"global_steps": 3})
    routed_experts: Any = None
    delay: float = 0.0
    error: Exception | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0

    async def generate(self, **request: Any) -> Any:
        self.requests.append(request)
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
            routed_experts=self.routed_experts,
            extra_fields=self.extra_fields,
        )


PARAMS = {"temperature": 1.0, "logprobs": True, "max_new_tokens": 9, "stop_token_ids": (2,)}


async def test_requests_and_statistics_of_engine() -> None:
    servers = Servers()
    engine = VerlServerEngine(servers, "session-1")
    generation = await engine.generate("r-0", [1, 2], PARAMS)
    assert servers.requests == [
        {"request_id": "session-1", "prompt_ids": [1, 2], "sampling_params": {**PARAMS, "stop_token_ids": [2]}}
    ]
    assert (generation.ids, generation.logprobs, generation.finish) == ([5, 6, 2], [-0.1, -0.2, -0.3], FinishType.STOP)
    assert generation.weight_version == "3"
    servers.extra_fields = {"global_steps": 9, "min_global_steps": 4, "max_global_steps": 5, "spec_num_draft_tokens": 7}
    await engine.generate("r-1", [1, 2, 5, 6, 2], PARAMS)
    await engine.generate("r-2", [1, 2, 5, 6, 2], PARAMS)
    assert engine.steps == (3, 5), "first and last weight version"
    assert (engine.preempted, engine.counters) == (3, {"spec_num_draft_tokens": 14})


async def test_routed_experts_belong_to_a_part() -> None:
    servers = Servers()
    engine = VerlServerEngine(servers, "s")
    for number, prompt in enumerate(([1, 2], [1, 2, 5, 6, 2, 7], [1, 2, 50, 7], [1, 2, 50, 7, 5, 6, 2, 8])):
        servers.routed_experts = f"experts {number}"
        await engine.generate(f"r-{number}", prompt, PARAMS)
    assert engine.routed_experts == ["experts 1", "experts 3"], "those of the last call of each part"


@pytest.mark.parametrize(
    ("reason", "ids", "finish"),
    [
        ("stop", [5], FinishType.STOP),
        ("length", [5, 2], FinishType.LENGTH),
        ("abort", [5], FinishType.ABORT),
        ("aborted", [], FinishType.ABORT),
        ("completed", [5, 2], FinishType.STOP),
        ("completed", [5], FinishType.LENGTH),
        (None, [5, 2], FinishType.STOP),
        (None, [], FinishType.LENGTH),
    ],
)
def test_finish_type(reason: str | None, ids: list[int], finish: FinishType) -> None:
    assert finish_type(reason, ids, [2]) is finish


async def test_logprobs_are_returned_only_if_requested() -> None:
    without_logprobs = {**PARAMS, "logprobs": False}
    for logprobs in ([-0.1, -0.2, -0.3], [], None):
        assert (
            await VerlServerEngine(Servers(logprobs=logprobs), "s").generate("r", [1], without_logprobs)
        ).logprobs is None
    for logprobs in ([], None, [-0.1]):
        with pytest.raises(EngineUnavailable, match=r"log-probabilities"):
            await VerlServerEngine(Servers(logprobs=logprobs), "s").generate("r", [1], PARAMS)
    aborted = await VerlServerEngine(Servers(reason="aborted", logprobs=[-0.1]), "s").generate("r", [1], PARAMS)
    assert (aborted.ids, aborted.logprobs) == ([5], [-0.1]), "an abort may truncate the log-probabilities"


async def test_aborted_call_ends_without_ids() -> None:
    servers = Servers(delay=30)
    engine = VerlServerEngine(servers, "s")
    call = asyncio.create_task(engine.generate("r", [1], PARAMS))
    await asyncio.sleep(0.01)
    await engine.abort("other")
    await engine.abort("r")
    generation = await asyncio.wait_for(call, 2)
    assert (generation.ids, generation.finish) == ([], FinishType.ABORT)
    assert "are unknown" in str(generation.problem)
    await asyncio.sleep(0)
    assert servers.cancelled == 1


async def test_silent_server_is_infra_fault() -> None:
    with pytest.raises(EngineUnavailable, match="did not respond"):
        await VerlServerEngine(Servers(delay=30), "s").generate("r", [1], PARAMS, deadline=time.monotonic() + 0.05)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("a worker died\n  somewhere"), EngineUnavailable), (ValueError("too long"), EngineRefused)],
)
async def test_server_error_is_infra_fault(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"somewhere|too long"):
        await VerlServerEngine(Servers(error=error), "s").generate("r", [1], PARAMS)


async def test_cancelled_call_cancels_request() -> None:
    servers = Servers(delay=30)
    call = asyncio.create_task(VerlServerEngine(servers, "s").generate("r", [1], PARAMS))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert servers.cancelled == 1


# Rewards


async def test_missing_score_is_raised_and_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[float | None] = [0.25, None]

    async def score(*_: Any, **__: Any) -> float | None:
        return scores.pop(0)

    monkeypatch.setattr(reward.code, "compute_score_async", score)
    assert await reward.compute_score_async("sums", "print(1)", {}) == 0.25
    with pytest.raises(reward.ScoreUnavailable, match="could not be computed"):
        await reward.compute_score_async("sums", "print(1)", {})


async def test_verl_reward_function_gets_same_arguments() -> None:
    received: dict[str, Any] = {}

    def blocking(**arguments: Any) -> dict[str, Any]:
        received.update(arguments)
        return {"score": 0.75, "acc": True}

    async def without_score(**_: Any) -> None:
        return None

    one = trajectory(stream([1], [2, 3]))
    one.extra = {"data_source": "sums", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}}
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{list(ids)}")
    functions: list[Any] = [reward.adapt_reward_function(function, tokenizer) for function in (blocking, without_score)]
    assert [await function(one) for function in functions] == [0.75, None]
    assert (received["data_source"], received["solution_str"], received["ground_truth"]) == ("sums", "[2, 3]", "5")
    assert received["extra_info"] == {"index": 3, **sample_fields(one, None)}


async def test_excluded_sample_is_not_sent_to_sandbox() -> None:
    extra_info = {"toolroll": {"left_out": "the sandbox is gone"}}
    assert (
        await reward.compute_score_async("sums", "print(1)", {}, extra_info, sandbox_fusion_url="http://127.0.0.1:1")
        == 0
    )
    assert reward.compute_score("sums", "print(1)", {}, extra_info, sandbox_fusion_url="http://127.0.0.1:1") == 0


# Records


async def test_records_are_written_next_to_verl_dump(tmp_path: Path) -> None:
    sink = RecordSink(str(tmp_path), lambda ids: " ".join(map(str, ids)))
    await sink.write(trajectory(stream([1, 2], [3])), step=5)
    (directory,) = (tmp_path / "toolroll").iterdir()
    assert [file.name for file in directory.iterdir()] == ["5.jsonl"]
    (record,) = reader.read_records(tmp_path / "toolroll")
    assert (record.step, record.input, record.output) == (5, "1 2", "3")


async def test_failed_record_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = RecordSink(str(tmp_path), lambda ids: str(1 / 0))
    await sink.write(trajectory(stream([1], [2])), step=1)
    assert "could not be written" in caplog.text


async def test_no_records_without_rollout_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await RecordSink(None, str).write(trajectory(stream([1], [2])), step=1)
    assert not list(tmp_path.iterdir())


# Without verl


@pytest.mark.process
def test_missing_verl_names_extra() -> None:
    program = "import sys\nsys.modules['verl'] = None\nfrom toolroll.integrations.verl import ToolrollAgentLoop"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install 'toolroll[verl]'" in completed.stderr


def test_tools_that_verl_cannot_load_are_added(root: Path) -> None:
    config = str(root / "examples/gsm8k/tool_config.yaml")
    [checker] = add_tools([], config)
    assert add_tools([checker], None) == [checker]
    with pytest.raises(ConfigError, match="verl has loaded a tool with the same name, 'calc_gsm8k_reward'"):
        add_tools([checker], config)


def test_cache_of_a_converted_tool(tmp_path: Path) -> None:
    """The path is relative to the config file. A tool written for verl may keep state."""
    config = tmp_path / "tools.yaml"
    settings = {"sandbox_fusion_url": "http://127.0.0.1:8080"}
    entry = {"class_name": "toolroll.SandboxFusionTool", "config": settings, "cache": {"path": "results.sqlite"}}
    config.write_text(json.dumps({"tools": [entry]}))
    native = SandboxFusionTool(settings)
    [converted] = convert_tools([native], str(config))
    assert converted.cache is not None
    assert converted.cache.path == str(tmp_path / "results.sqlite")
    with pytest.raises(ConfigError, match="cache: results of 'code_interpreter' may depend on the trajectory"):
        convert_tools([SimpleNamespace(tool_schema=native.tool_schema)], str(config))
