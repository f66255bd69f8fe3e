"""Tests with real TRL: two steps of the example with a real engine and sandbox, and the effect of an infra fault."""

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
from toolroll.records.reader import read_records
from toolroll.rollout.engines.sglang import SGLangEngine

pytestmark = pytest.mark.trl

IDS = [1, *range(300, 364)]
"""Arbitrary tokens. Their log-probabilities show whether the engine's weights have changed."""


async def inspect_weights(engine: RealEngine) -> tuple[str | None, list[float]]:
    """Return the version of the engine's weights, and its log-probabilities of `IDS`."""
    async with SGLangEngine(engine.url) as client:
        generation = await client.generate("inspect", IDS, {"max_new_tokens": 1})
        return generation.weight_version, await client.score(IDS)


async def restore_weights(engine: RealEngine) -> None:
    async with SGLangEngine(engine.url) as client:
        await client.update_weights(engine.model_dir, "default")


@pytest.fixture(scope="module")
def trained(sglang: RealEngine, sandbox_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two steps of train.py."""
    directory = tmp_path_factory.mktemp("trl")
    before = asyncio.run(inspect_weights(sglang))
    size = ["--steps", "2", "--problems", "2", "--samples", "2", "--out", directory / "out"]
    services = ["--model", sglang.model_dir, "--engine", sglang.url, "--sandbox", sandbox_url]
    program = trl_stage.SIDE / "two_steps.py"
    try:
        output = trl_stage.run(
            program, trl_stage.EXAMPLE / "train.py", directory / "results.json", *size, *services, directory=directory
        )
        after = asyncio.run(inspect_weights(sglang))
    finally:
        asyncio.run(restore_weights(sglang))
    results = json.loads((directory / "results.json").read_text())
    return {**results, "before": before, "after": after, "dumps": directory / "out" / "dumps", "output": output}


def test_two_steps_change_the_weights(trained: dict[str, Any]) -> None:
    steps = trained["log"][:2]
    assert any(step["grad_norm"] > 0 for step in steps), [step["reward_std"] for step in steps]
    assert trained["changed"] > 0.9
    assert sum(step["toolroll/calls"] for step in steps) > 0
    for step in steps:
        assert (step["toolroll/stale_tokens"], step["toolroll/unknown_weights"], step["toolroll/left_out"]) == (0, 0, 0)


def test_engine_samples_with_weights_of_step(trained: dict[str, Any]) -> None:
    versions: dict[int | None, set[str | None]] = {}
    for record in read_records(trained["dumps"]):
        assert record.tokens is not None
        used = {span.weight_version for span in record.tokens.spans if span.author == "model"}
        versions[record.step] = versions.get(record.step, set()) | used
    assert versions == {1: {"step-0"}, 2: {"step-1"}}
    assert trained["after"][0] == "step-2", "the engine has the final weights"
    assert trained["served_is_final"]
    assert trained["before"][1] != trained["after"][1], "the weights differ, not only the version"


def test_tools_ran_and_groups_are_complete(trained: dict[str, Any]) -> None:
    records = list(read_records(trained["dumps"]))
    assert len(records) == 8
    ran = [call for record in records for call in record.calls if call.get("fault") is None]
    assert ran
    assert all(call["metrics"]["outcome"] for call in ran)
    for step in (1, 2):
        of_step = [record for record in records if record.step == step]
        assert sorted((record.group, record.sample) for record in of_step) == [
            (group, sample) for group in ("0", "1") for sample in range(2)
        ]
        for group in ("0", "1"):
            assert len({record.fields["extra"]["question"] for record in of_step if record.group == group}) == 1
    logged = [step["reward"] for step in trained["log"][:2]]
    for step, reward in enumerate(logged, 1):
        scores = [record.score for record in records if record.step == step]
        assert sum(scores) / len(scores) == pytest.approx(reward, abs=1e-4)  # type: ignore[arg-type]


def test_log_probabilities_match_trl(trained: dict[str, Any], report_figure: Callable[[str], None]) -> None:
    report_figure(f"Ratio of TRL's to the engine's probabilities at T = 0.7: {trained['ratios']}")
    for ratio in trained["ratios"]:
        assert ratio["tokens"] > 50
        assert ratio["mean"] == pytest.approx(1.0, abs=0.05), "bfloat16 causes errors of a few hundredths"
        assert ratio["deviation"] < 0.1


def test_run_can_be_plotted(trained: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    subprocess.run([sys.executable, trl_stage.EXAMPLE / "plot.py", trained["dumps"], picture], check=True, timeout=120)
    assert picture.stat().st_size > 5000


def test_all_connections_are_closed(trained: dict[str, Any]) -> None:
    assert "Unclosed" not in trained["output"]


def test_infra_fault_changes_neither_loss_nor_baseline(tmp_path: Path) -> None:
    trl_stage.run(trl_stage.SIDE / "losses.py", tmp_path / "results.json", directory=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    for name in ("dapo", "bnpo", "cispo", "vespo", "by batch", "two functions"):
        case = results[name]
        assert case["update"] > 0.1
        assert case["ratio"] == pytest.approx(1.0, abs=1e-5), (
            f"{name}: the update is the same with and without the sample"
        )
        assert case["deviation"] < 1e-5 * case["update"]
        assert case["reward"][0] == case["reward"][1]
        assert case["left_out"] == 0.25
    for name in ("grpo", "dr_grpo", "sapo", "luspo"):
        assert results[name]["ratio"] == pytest.approx(0.75, abs=1e-4), (
            "a mean over rows has the same direction and is smaller"
        )
        assert results[name]["deviation"] < 5e-4 * results[name]["update"]
    zero = results["zero in place of None"]
    assert zero["deviation"] > 0.1 * zero["update"], "a reward of 0 changes the update"
