"""In real TRL: two steps of the example with a real engine, real weights and the real sandbox; and what a damaged
sample does to what is learnt."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_engine import RealEngine

from integrations import trl_stage
from toolroll.records.reader import read
from toolroll.rollout.engines.sglang import SGLangEngine

IDS = [1, *range(300, 364)]
"""Any tokens, to see by their probabilities whether the engine's weights are others."""


async def look(engine: RealEngine) -> tuple[str | None, list[float]]:
    """The version of the engine's weights, and what it makes of some tokens."""
    async with SGLangEngine(engine.url) as asked:
        one = await asked.generate("look", IDS, {"max_new_tokens": 1})
        return one.weight_version, await asked.score(IDS)


async def give_back(engine: RealEngine) -> None:
    async with SGLangEngine(engine.url) as asked:
        await asked.update_weights(engine.model_dir, "default")


@pytest.fixture(scope="module")
def trained(sglang: RealEngine, sandbox_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps of train.py, and what was seen of them."""
    folder = tmp_path_factory.mktemp("trl")
    before = asyncio.run(look(sglang))
    small = ["--steps", "2", "--problems", "2", "--samples", "4", "--out", folder / "out"]
    where = ["--model", sglang.model_dir, "--engine", sglang.url, "--sandbox", sandbox_url]
    program = trl_stage.SIDE / "two_steps.py"
    try:
        said = trl_stage.run(
            program, trl_stage.EXAMPLE / "train.py", folder / "seen.json", *small, *where, folder=folder
        )
        after = asyncio.run(look(sglang))
    finally:
        asyncio.run(give_back(sglang))
    seen = json.loads((folder / "seen.json").read_text())
    return {**seen, "before": before, "after": after, "dumps": folder / "out" / "dumps", "said": said}


def test_two_steps_move_the_weights(trained: dict[str, Any]) -> None:
    steps = trained["log"][:2]
    assert any(step["grad_norm"] > 0 for step in steps), [step["reward_std"] for step in steps]
    assert trained["changed"] > 0.9
    assert sum(step["toolroll/calls"] for step in steps) > 0
    for step in steps:
        assert (step["toolroll/stale_tokens"], step["toolroll/unknown_weights"], step["toolroll/left_out"]) == (0, 0, 0)


def test_the_engine_samples_with_the_weights_of_the_step(trained: dict[str, Any]) -> None:
    versions: dict[int | None, set[str | None]] = {}
    for record in read(trained["dumps"]):
        assert record.tokens is not None
        by = {span.weight_version for span in record.tokens.spans if span.author == "model"}
        versions[record.step] = versions.get(record.step, set()) | by
    assert versions == {1: {"step-0"}, 2: {"step-1"}}
    assert trained["after"][0] == "step-2", "and has the last ones when it is over"
    assert trained["served_is_the_last"]
    assert trained["before"][1] != trained["after"][1], "they are others, not by name alone"


def test_the_tools_ran_in_the_sandbox_and_groups_are_whole(trained: dict[str, Any]) -> None:
    records = list(read(trained["dumps"]))
    assert len(records) == 16
    ran = [call for record in records for call in record.calls if call.get("fault") is None]
    assert ran
    assert all(call["metrics"]["outcome"] for call in ran)
    for step in (1, 2):
        of_step = [record for record in records if record.step == step]
        assert sorted((record.group, record.sample) for record in of_step) == [
            (group, sample) for group in ("0", "1") for sample in range(4)
        ]
        for group in ("0", "1"):
            assert len({record.fields["extra"]["question"] for record in of_step if record.group == group}) == 1
    logged = [step["reward"] for step in trained["log"][:2]]
    for step, reward in enumerate(logged, 1):
        scores = [record.score for record in records if record.step == step]
        assert sum(scores) / len(scores) == pytest.approx(reward, abs=1e-4)  # type: ignore[arg-type]


def test_the_log_probabilities_are_those_that_trl_computes(trained: dict[str, Any], say: Callable[[str], None]) -> None:
    say(f"TRL's over the engine's probabilities, at T = 0.7: {trained['ratios']}")
    for ratio in trained["ratios"]:
        assert ratio["tokens"] > 50
        assert ratio["mean"] == pytest.approx(1.0, abs=0.05), "bfloat16 gives some hundredths"
        assert ratio["apart"] < 0.1


def test_the_run_can_be_drawn(trained: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    subprocess.run([sys.executable, trl_stage.EXAMPLE / "plot.py", trained["dumps"], picture], check=True, timeout=120)
    assert picture.stat().st_size > 5000


def test_nothing_is_left_open(trained: dict[str, Any]) -> None:
    assert "Unclosed" not in trained["said"]


def test_a_damaged_sample_changes_neither_loss_nor_baseline(tmp_path: Path) -> None:
    trl_stage.run(trl_stage.SIDE / "losses.py", tmp_path / "seen.json", folder=tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for name in ("dapo", "bnpo", "cispo", "vespo", "by batch", "two functions"):
        case = seen[name]
        assert case["learnt"] > 0.1
        assert case["times"] == pytest.approx(1.0, abs=1e-5), f"{name}: the same is learnt with it as without it"
        assert case["apart"] < 1e-5 * case["learnt"]
        assert case["reward"][0] == case["reward"][1]
        assert case["left_out"] == 0.25
    for name in ("grpo", "dr_grpo", "sapo", "luspo"):
        assert seen[name]["times"] == pytest.approx(0.75, abs=1e-4), "a mean of rows: the same direction, and smaller"
        assert seen[name]["apart"] < 5e-4 * seen[name]["learnt"]
    zero = seen["zero in place of None"]
    assert zero["apart"] > 0.1 * zero["learnt"], "so it would be without"
