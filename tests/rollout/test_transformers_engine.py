"""TransformersEngine with a real model, in TRL's environment, which has torch."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations import trl_stage
from real_engine import environment
from sandbox.serving import serving

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.trl


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(environment("sglang")["model"])


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("transformers")
    program = Path(__file__).parent / "transformers_side/play.py"
    trl_stage.run(program, model, directory / "result.json", directory=directory)
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def test_trajectories_are_exact(seen: dict[str, Any]) -> None:
    rollouts = seen["rollouts"]
    assert set(rollouts["outcomes"]) == {"ok"}
    assert set(rollouts["fidelity"]) == {"exact"}
    assert rollouts["calls"] > 0
    assert rollouts["max_difference"] <= 1e-4, "log-probabilities of a forward pass"


def test_requests_of_a_batch_do_not_affect_each_other(seen: dict[str, Any]) -> None:
    assert seen["batches"]["together"] == seen["batches"]["alone"]
    assert [len(ids) for ids in seen["batches"]["alone"]] == [4, 7, 10, 13]


def test_sampling_parameters(seen: dict[str, Any]) -> None:
    batches = seen["batches"]
    first = batches["alone"][0]
    assert batches["top_k_1"] == first
    assert batches["banned"][0] != first[0]
    assert batches["stopped"] == [first[:2], "stop"]
    assert "Unknown sampling parameters: temperatur." in seen["aborts"]["refused"]


def test_aborted_calls_return_their_tokens(seen: dict[str, Any]) -> None:
    aborts = seen["aborts"]
    assert aborts["finishes"] == ["abort", "abort"]
    assert all(0 < count < 2000 for count in aborts["ids"])
    assert aborts["left"] == 0, "cancelled calls end"


def test_weights_are_replaced_in_place(seen: dict[str, Any]) -> None:
    weights = seen["weights"]
    assert (weights["first"], weights["changes"], weights["after"]) == (None, ["step-1"], "step-1")
    assert weights["same"]
    assert weights["difference"] <= 1e-4


def test_run_of_the_laptop_page(model: Path, tmp_path: Path) -> None:
    """The commands of the page work, with another model and shorter responses."""
    page = (ROOT / "docs/get-started/laptop.md").read_text()
    [copy] = re.findall(r"^toolroll (examples copy .*)$", page, re.MULTILINE)
    [run] = re.findall(r"^toolroll (run .* engine.kind=transformers .*)$", page, re.MULTILINE)
    run = run.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    assert str(model) in run
    link = tmp_path / "path" / "toolroll"
    link.parent.mkdir()
    link.symlink_to(ROOT / "toolroll")
    (link.parent / "examples").symlink_to(ROOT / "examples")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTEST", "PYTHON"))}
    command = [trl_stage.python(), "-P", "-m", "toolroll"]
    with serving() as sandbox:
        added = {"PYTHONPATH": str(link.parent), "HF_HUB_OFFLINE": "1", "SANDBOX_FUSION_URL": sandbox.url}
        for words in (copy.split(), [*run.split(), "n=1", "limits.max_response_len=128", "--json"]):
            done = subprocess.run(
                [*command, *words], cwd=tmp_path, env=kept | added, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-3000:]
    tally = json.loads(done.stdout)["tally"]
    assert tally["outcomes"] == {"ok": 4}
    assert tally["fidelity"] == {"exact": 4}
