"""Replay of recorded runs: what is recorded is reproduced exactly, and nothing else is used."""

import json
import random
import socket
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_samples import trajectory
from rollout import small_tokenizer

from run import varied_engine
from toolroll import BaseTool
from toolroll.errors import ConfigError, InfraFault, ReplayMiss
from toolroll.records import recording
from toolroll.records.directory import DumpFile
from toolroll.records.reader import read_records
from toolroll.records.record import Record
from toolroll.records.recording import RecordDirectory
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.replay.recording import RecordedTrajectory
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import FinishReason, Rewards, TurnRecord
from toolroll.run import sample_worker
from toolroll.run.config import RunConfig
from toolroll.run.run import Run
from toolroll.run.status import RunSnapshot

ROWS, N = 250, 4
REPLAYED = (
    *("tokens", "earlier", "messages", "rewards", "score", "input", "output", "turns"),
    *("finish_reason", "outcome", "error", "fidelity", "gts"),
)
ENDS = {"stop", "length", "max_turns", "tool_stop", "deadline", "infra"}


@pytest.fixture
def without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_worker, "SAMPLE_RETRY_DELAYS_S", ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the config of a run of the varied engine."""

    def write(rows: int, n: int, **tool: Any) -> Path:
        (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "Question {row}?"}}\n' for row in range(rows)))
        entry = {"class_name": "run.varied_engine.VariedTool", **tool}
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
        config = {
            "engine": {"kind": "run.varied_engine.VariedEngine", "options": {"tokenizer": str(model)}},
            "model": str(model),
            "tool_prompt": "hermes",
            "thinking": "strip",
            "tools": "tools.yaml",
            "data": {"path": "data.jsonl"},
            "n": n,
            "limits": {
                "max_assistant_turns": 4,
                "max_tool_response_tokens": 700,
                "max_parallel_calls": 2,
                "max_response_len": 1400,
                "call_timeout": 2,
                "turn_timeout": 2,
            },
            "rollout_data_dir": "recorded",
        }
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        return tmp_path / "run.yaml"

    return write


async def run(file: Path, *overrides: str) -> RunSnapshot:
    async with Run(RunConfig.load(file, overrides)) as running:
        await running.wait()
    return await running.status()


async def replay(file: Path, *overrides: str) -> RunSnapshot:
    return await run(file, f"replay={file.parent / 'recorded'}", f"rollout_data_dir={file.parent / 'new'}", *overrides)


def records(directory: Path) -> dict[tuple[str | None, int | None], Record]:
    return {(record.group, record.sample): record for record in read_records(directory)}


def without_mark(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "metrics": {name: value for name, value in call["metrics"].items() if name != "replayed"}}


async def test_replayed_run_is_identical(
    configure: Callable[..., Path],
    without_retries: None,
    monkeypatch: pytest.MonkeyPatch,
    report_figure: Callable[[str], None],
) -> None:
    random.seed(0)
    file = configure(ROWS, N)
    await run(file)

    def refuse(*args: Any) -> None:
        raise AssertionError("The replay used the network.")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(varied_engine, "VariedEngine", varied_engine.NoEngine)
        patch.setattr(varied_engine.VariedTool, "create", refuse)
        await replay(file)
    old, new = records(file.parent / "recorded"), records(file.parent / "new")
    assert len(old) == ROWS * N
    assert old.keys() == new.keys()
    for sample, record in old.items():
        for name in REPLAYED:
            assert new[sample].fields[name] == record.fields[name], (sample, name, record.finish_reason, record.error)
        assert list(map(without_mark, new[sample].calls)) == record.calls
    ends = Counter(record.finish_reason for record in old.values())
    assert ends.keys() == ENDS
    assert "rerendered" in {record.fidelity for record in old.values()}
    assert any(len(record.turns) > len({turn["turn"] for turn in record.turns}) for record in old.values())
    report_figure(f"identical trajectories by end: {dict(ends)}")


@pytest.mark.parametrize(("on_miss", "outcome"), [("error", "infra"), ("call", "ok")])
async def test_changed_tool_version_is_a_miss(
    configure: Callable[..., Path], without_retries: None, on_miss: str, outcome: str
) -> None:
    random.seed(1)
    await run(configure(10, 1))
    file = configure(10, 1, config={"type": "native", "changed": True})
    directory = file.parent / "recorded"
    options = [f"replay.directory={directory}", f"replay.on_miss={on_miss}", f"rollout_data_dir={file.parent / 'new'}"]
    await run(file, *options)
    old, new = records(directory), records(file.parent / "new")
    for sample, record in old.items():
        if any(call["tool"] == "act" for call in record.calls[:1]):
            replayed = new[sample]
            assert replayed.outcome == "infra" or outcome == "ok"
            assert "replayed" not in replayed.calls[0]["metrics"]
            if on_miss == "error":
                assert "the tool has changed" in str(replayed.error)
        elif not record.calls:
            # The reward of a changed tool is unknown, also without calls.
            assert new[sample].outcome == ("infra" if on_miss == "error" else record.outcome)


async def test_sample_without_record_is_a_miss(configure: Callable[..., Path], without_retries: None) -> None:
    random.seed(2)
    await run(configure(2, 1))
    file = configure(3, 1)
    await replay(file)
    new = records(file.parent / "new")
    assert "No record of sample 0 of group '2'" in str(new["2", 0].error)
    assert "Question 2" not in str(new["1", 0].error)


async def test_other_prompt_is_a_miss(configure: Callable[..., Path], without_retries: None) -> None:
    random.seed(3)
    file = configure(2, 1)
    await run(file)
    (file.parent / "data.jsonl").write_text('{"prompt": "Question 0?"}\n{"prompt": "Another question?"}\n')
    await replay(file)
    assert "The prompt of turn 0 differs" in str(records(file.parent / "new")["1", 0].error)


@pytest.mark.parametrize("limit", ["max_assistant_turns=1", "max_response_len=20", "max_prompt_len=5"])
async def test_replay_that_ends_early_is_a_miss(
    configure: Callable[..., Path], without_retries: None, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Also if no tool has a reward, so that nothing else depends on the calls."""
    monkeypatch.setattr(varied_engine.VariedTool, "calc_reward", BaseTool.calc_reward)
    file = configure(2, 1)
    await run(file, "engine.kind=run.varied_engine.SteadyEngine")
    await replay(file, f"limits.{limit}")
    for record in records(file.parent / "new").values():
        assert record.outcome == "infra"
        assert "of 2 recorded generations" in str(record.error)
        assert "the limits or the parsing of tool calls have changed" in str(record.error)


@pytest.mark.parametrize(
    ("engine", "fails", "retryable"),
    [
        (True, "reward", True),
        (True, "call", False),
        (False, "reward", True),
        (False, "engine", True),
        (False, "call", False),
        (False, "tool reward", False),
    ],
)
async def test_only_live_faults_of_a_replay_are_retried(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, *, engine: bool, fails: str, retryable: bool
) -> None:
    file, kind = configure(1, 1), "engine.kind=run.varied_engine.SteadyEngine"
    await run(file, kind)

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise InfraFault("It is down.")

    match fails:
        case "engine":
            monkeypatch.setattr(varied_engine.SteadyEngine, "generate", fail)
        case "call":
            monkeypatch.setattr(RecordedTrajectory, "find_call", miss)
        case "tool reward":
            find = RecordDirectory.find
            monkeypatch.setattr(RecordDirectory, "find", lambda *args: replace(find(*args), is_scored=False))
    setting = f"replay={{directory: {file.parent / 'recorded'}, engine: {str(engine).lower()}}}"
    rollout = sample_worker.make_rollout(RunConfig.load(file, [kind, setting, "rollout_data_dir=new"]))
    if fails == "reward":
        rollout._loop.rewards = RewardRule(functions={"judge": fail})
    async with rollout:
        found = await rollout.sample("Question 0?", group="0", sample=0)
    assert (found.outcome, found.retryable) == ("infra", retryable), found.error


def miss(*args: Any) -> Any:
    raise ReplayMiss("No recorded result.")


async def test_tools_are_replayed_for_an_engine(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, engine = configure(3, 1), "engine.kind=run.varied_engine.SteadyEngine"
    await run(file, engine)
    called: list[Any] = []
    monkeypatch.setattr(varied_engine.VariedTool, "execute", lambda *args, **kwargs: called.append(args))
    directory = f"replay.directory={file.parent / 'recorded'}"
    options = ["replay.engine=false", "replay.on_miss=call", f"rollout_data_dir={file.parent / 'new'}"]
    await run(file, engine, directory, *options)
    old, new = records(file.parent / "recorded"), records(file.parent / "new")
    assert len(old) == 3
    for sample, record in old.items():
        [replayed] = new[sample].calls
        assert replayed["metrics"]["replayed"] is True
        assert [without_mark(replayed)] == record.calls
        assert new[sample].fields["messages"] == record.fields["messages"]
    assert called == []


def test_recorded_prompts_are_not_copied() -> None:
    stream = TokenStream(range(100_000))
    for turn in range(50):
        stream.append_sampled([turn], None, turn=turn)
    turns = [TurnRecord(turn=turn, tokens=1, finish="stop", timings=GenerationTimings(total=0)) for turn in range(50)]
    sampled = trajectory(tokens=stream, turns=turns)
    tracemalloc.start()
    recorded = RecordedTrajectory.of(sampled)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert recorded.generations is not None
    assert len(recorded.generations) == 50
    assert used < 100_000


@pytest.mark.parametrize(
    ("finish_reason", "steps", "error"),
    [(FinishReason.LENGTH, (0.0,), None), (FinishReason.INFRA, (0.0,), "failed"), (FinishReason.LENGTH, (), "failed")],
)
def test_error_of_a_reward_function_is_not_replayed(
    finish_reason: FinishReason, steps: tuple[float, ...], error: str | None
) -> None:
    """The error of a conversation, or of the `calc_reward` of a tool, is."""
    rewards = Rewards(total=None, steps=steps)
    one = trajectory(outcome="infra", error="failed", finish_reason=finish_reason, rewards=rewards)
    assert RecordedTrajectory.of(one).error == error


def test_unreadable_file_of_a_recording_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DumpFile(str(tmp_path / "1.jsonl"), "1", 1)
    monkeypatch.setattr(recording, "dump_files", lambda _: [file])
    with pytest.raises(ConfigError, match=r"Cannot read .*1\.jsonl: No such file"):
        RecordDirectory(tmp_path)


def test_replay_into_its_own_directory_is_refused(configure: Callable[..., Path]) -> None:
    file = configure(1, 1)
    with pytest.raises(ConfigError, match="set rollout_data_dir to another one"):
        RunConfig.load(file, [f"replay={file.parent / 'recorded'}"])


async def test_missing_directory_is_reported(configure: Callable[..., Path]) -> None:
    file = configure(1, 1)
    with pytest.raises(ConfigError, match="No such directory"):
        await run(file, f"replay={file.parent / 'missing'}")
