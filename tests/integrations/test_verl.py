"""Tests with verl's managers and workers on a real Ray cluster, with toolroll's tools and agent loop.

They cover the newest verl and one older minor version, each with both kinds of trainers. The engine is a scripted
server behind verl's client and load balancer, and with the newest verl also a real SGLang server.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from integrations import verl_stage
from toolroll.records import reader

pytestmark = pytest.mark.verl

Rows = list[dict[str, Any]]


def check_exact(rows: Rows, server: dict[str, Any]) -> int:
    """Check that ids, mask and log-probabilities are those of the engine, and return the number of generations."""
    outputs = defaultdict(list)
    for prompt, ids, logprobs in server["outputs"]:
        outputs[tuple(prompt)].append((ids, logprobs))
    found = 0
    for row in rows:
        whole, mask, place = row["prompt"] + row["response"], row["mask"], len(row["prompt"])
        assert len(row["response"]) == len(mask) == len(row["logprobs"])
        while place < len(whole):
            begin = place - len(row["prompt"])
            if not mask[begin]:
                place += 1
                assert row["logprobs"][begin] == 0
                continue
            fitting = [one for one in outputs[tuple(whole[:place])] if whole[place : place + len(one[0])] == one[0]]
            spans = [(ids, logprobs, row["logprobs"][begin : begin + len(ids)]) for ids, logprobs in fitting]
            ids = next(ids for ids, expected, actual in spans if actual == pytest.approx(expected, abs=1e-6))
            assert set(mask[begin : begin + len(ids)]) == {1}
            place += len(ids)
            found += 1
    return found


def outcomes(rows: Rows) -> Counter[str]:
    return Counter(row["toolroll"]["finish_reason"] for row in rows)


def instance_counts(scene: dict[str, Any]) -> Counter[str]:
    """Return the counts of tool instances of all workers."""
    return sum((Counter(tools) for tools in scene["tools"]), Counter())


# Tools in verl's registry and in verl's loop


def test_verl_registry_loads_tools_with_schemas(seen: dict[str, Any]) -> None:
    registry = seen["asides"]["registry"]
    assert registry["names"] == ["code_interpreter", "calc_gsm8k_reward", "shout"]
    assert registry["shown"][:2] == registry["written"][:2]
    shout = registry["shown"][2]["function"]
    assert shout["parameters"]["properties"]["times"] == {
        "type": "integer",
        "description": "Number of repetitions.",
        "default": 1,
    }


def test_verl_loop_runs_interpreter_per_call(seen: dict[str, Any], text: Any) -> None:
    scene = seen["older"]["verl_loop"]
    assert check_exact(scene["rows"], scene["server"]) == 16
    for row in scene["rows"]:
        assert "[No output.]" in text(row["response"]), "the first call ran in the sandbox"
        assert "NameError: name 'numbers' is not defined" in text(row["response"]), "verl releases after each call"
        assert "Current parsed answer=" in text(row["response"])
        assert len(row["tool_rewards"]) == 1
    assert instance_counts(scene) == {"created": 12, "released": 12}, "three calls, each with its own instance"


def test_verl_tools_run_in_toolroll(seen: dict[str, Any]) -> None:
    foreign = seen["asides"]["foreign"]
    assert foreign["texts"] == ["Ada; up", "Ada; up; down", "5"]
    assert (foreign["step"], foreign["reward"], foreign["left"]) == (0.25, 3.0, 0)
    assert "entry" in foreign["wrong"], "arguments are validated against the original schema"
    shown = foreign["schema"]["function"]["parameters"]["properties"]["entry"]
    assert shown == {"type": "array", "items": {"type": "string"}, "minItems": 1}
    assert "items" not in foreign["verls"]["function"]["parameters"]["properties"]["entry"], "verl drops it"


# Older trainers


def test_64_questions_with_verl_manager(seen: dict[str, Any], text: Any) -> None:
    scene = seen["older"]["whole"]
    rows = scene["rows"]
    assert outcomes(rows) == {"stop": 64}
    assert {row["toolroll"]["fidelity"] for row in rows} == {"exact"}
    generations = check_exact(rows, scene["server"])
    assert generations == len(scene["server"]["outputs"]) == 64 * 4 + 8, "every eighth sample had to correct a call"
    assert all(row["beyond"] == 0 for row in rows)
    for number, row in enumerate(rows):
        response = text(row["response"])
        assert "sum " in response.partition("numbers)))")[2], "variables of the first call exist in the second"
        assert "NameError" not in response
        assert ("is not valid JSON" in response) == (number % 8 == 3), "a malformed call is answered with the error"
        assert row["num_turns"] == (10 if number % 8 == 3 else 8)
        right = number % 2
        assert row["score"] == right, "computed by verl's reward loop"
        assert row["toolroll"]["tools"] == {"code_interpreter": 0.0, "calc_gsm8k_reward": right, "shout": 0.0}
        assert row["tool_rewards"] == [0.0 if right else -0.05]
        assert sum(row["turn_scores"]) == row["tool_rewards"][0]
        assert row["min_global_steps"] == row["max_global_steps"] == 4


def test_instances_are_created_and_rewarded_once(seen: dict[str, Any]) -> None:
    scene = seen["older"]["whole"]
    assert instance_counts(scene) == {"created": 128, "released": 128, "rewarded_once": 128}
    assert [tools["created"] for tools in scene["tools"]] == [64, 64], "both workers were used"


def test_limit_holds_across_workers_and_rewards(seen: dict[str, Any]) -> None:
    scene = seen["older"]["with_rewards"]
    assert outcomes(scene["rows"]) == {"stop": 32}
    assert scene["scores"] == [float(number % 2 == 0) for number in range(48)], "computed by verl's reward manager"
    assert seen["programs"] > 2 * 64 + 2 * 32 + 48
    assert seen["max_running"] == 4, "maximum number of programs in flight"


def test_agent_loop_computes_score(seen: dict[str, Any]) -> None:
    rows = seen["older"]["scored"]["rows"]
    assert [row["score"] for row in rows] == pytest.approx([1.5 if n % 2 else -0.05 for n in range(8)])


def test_a_real_engine(seen: dict[str, Any], text: Any) -> None:
    if "real" not in seen["older"]:
        return  # tested only with the other version
    scene = seen["older"]["real"]
    assert check_exact(scene["rows"], scene["server"]) == len(scene["server"]["outputs"]) >= 4
    assert set(outcomes(scene["rows"])) <= {"stop", "length", "max_turns"}
    called = [row for row in scene["rows"] if row["toolroll"]["calls"] > row["toolroll"]["policy_faults"]]
    assert len(called) >= 2, "the model calls the tool"
    assert all("<tool_response>" in text(row["response"]) for row in called)


# A sandbox that is killed


def test_samples_with_infra_fault_are_masked(seen: dict[str, Any]) -> None:
    scene = seen["older"]["dying"]
    rows = scene["rows"]
    assert len(rows) == 64, "verl's batch is complete"
    excluded = [row for row in rows if row["toolroll"]["left_out"]]
    kept = [row for row in rows if not row["toolroll"]["left_out"]]
    assert len(excluded) == len(kept) == 32
    for row in excluded:
        assert row["toolroll"]["outcome"] == "infra"
        assert not any(row["mask"])
        assert row["prompt"]
        assert row["response"]
    assert outcomes(kept) == {"stop": 32}
    check_exact(kept, scene["server"])
    assert instance_counts(scene)["created"] == instance_counts(scene)["released"] == 128


def test_excluded_sample_does_not_contribute(seen: dict[str, Any]) -> None:
    compared = seen["older"]["dying"]["compared"]
    assert compared["kept"] == 32
    assert len(compared["advantages"]) == 8
    assert set(compared["advantages"].values()) == {0.0}, "the advantages of the others are exactly those without it"
    assert compared["by_gae"] < 1e-6
    assert compared["of_excluded"] == 0.0
    assert compared["spread"] > 0.5
    for mode, (loss, gradient) in compared["losses"].items():
        assert loss < 1e-4, mode
        assert gradient < 1e-7, mode
    assert compared["of_plain_grpo"] > 0.1, "with verl's grpo it would contribute"


def test_unsuitable_estimator_is_rejected(seen: dict[str, Any]) -> None:
    refused = seen["asides"]["refused"]
    assert "algorithm.adv_estimator=toolroll_grpo" in refused["grpo"]
    assert "toolroll_remax" not in refused["remax"]
    assert "trainer.use_v1=True" in refused["remax"]


def test_invalid_settings_are_rejected(seen: dict[str, Any]) -> None:
    refused = seen["asides"]["refused"]
    assert "unknown key 'limit' (did you mean 'limits'?)" in refused["setting"]
    assert "Expected call_timeout (30) ≤ turn_timeout (10)" in refused["limit"]
    assert "Unknown chat format 'klingon'" in refused["format"]


# Newer trainers


def present(scene: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the samples by prompt."""
    groups = defaultdict(list)
    for sample in scene["samples"]:
        groups[sample["key"].split("in")[0]].append(sample)
    return groups


def check_advantages(scene: dict[str, Any], present: dict[str, list[dict[str, Any]]]) -> None:
    """Check each advantage against the scores of the samples in its group."""
    import statistics

    for group in present.values():
        scores = [sample["score"] for sample in group]
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        for sample in group:
            made = scene["advantages"][sample["key"]]
            assert made == pytest.approx((sample["score"] - mean) / (spread + 1e-6), abs=1e-4)
    padding = [made for key, made in scene["advantages"].items() if key.startswith("pad")]
    assert padding == [0.0] * (scene["padded"] - len(scene["samples"]))


def test_newer_trainers_get_complete_groups(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["whole"]
    groups = present(scene)
    assert {name: len(group) for name, group in groups.items()} == {f"u{n}": 4 for n in range(7)}, (
        "the answers to the eighth question have no score"
    )
    assert check_exact(scene["samples"], scene["server"]) == 28 * 4 + 4
    check_advantages(scene, groups)
    assert instance_counts(scene)["created"] == instance_counts(scene)["released"] == 64


def test_rerendered_turns_are_separate_rows(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["rerendered"]
    sessions = Counter(sample["key"].rpartition("_")[0] for sample in scene["samples"])
    assert Counter(sessions.values()) == {4: 24, 5: 4}, "one row for each assistant turn"
    assert {sample["toolroll"]["fidelity"] for sample in scene["samples"]} == {"rerendered"}
    assert check_exact(scene["samples"], scene["server"]) == 28 * 4 + 4, "each token is trained on once"
    whole = {key.replace("in1", "in2").rpartition("_")[0]: made for key, made in whole_advantages(seen).items()}
    for sample in scene["samples"]:
        assert abs(scene["advantages"][sample["key"]]) == pytest.approx(abs(whole[sample["key"].rpartition("_")[0]]))


def test_part_without_sampled_tokens_costs_no_advantage(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["ended"]
    sessions = defaultdict(list)
    for sample in scene["samples"]:
        sessions[sample["key"].rpartition("_")[0]].append(sample)
    assert {len(rows) for rows in sessions.values()} == {2}, "the re-rendered prompt after the second turn is no row"
    for name, rows in sessions.items():
        advantages = [scene["advantages"][row["key"]] for row in rows]
        assert all(sum(row["mask"]) > 0 for row in rows)
        assert advantages[0] == pytest.approx(advantages[1]), f"{name}: all sampled tokens have the same advantage"
        assert advantages[0] != 0.0


def whole_advantages(seen: dict[str, Any]) -> dict[str, float]:
    """Return the advantages of the same prompts with one row per sample."""
    scene = seen["newer"]["whole"]
    return {sample["key"]: scene["advantages"][sample["key"]] for sample in scene["samples"]}


def test_newer_trainers_do_not_get_excluded_samples(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["dying"]
    groups = present(scene)
    assert {name: len(group) for name, group in groups.items()} == {f"u{n}": 2 for n in range(7)}
    assert outcomes(scene["samples"]) == {"stop": 14}
    assert scene["padded"] == 32, "verl pads its batch"
    check_exact(scene["samples"], scene["server"])
    check_advantages(scene, groups)
    assert instance_counts(scene)["created"] == instance_counts(scene)["released"] == 4 * 64


# Records


def test_records_contain_every_sample(seen: dict[str, Any]) -> None:
    records = list(reader.read_records(Path(seen["spec"]["directory"]) / "dumps" / "toolroll"))
    rows = [row for name, scene in seen["older"].items() if name != "verl_loop" for row in scene["rows"]]
    assert {row["toolroll"]["request_id"] for row in rows} <= {record.request_id for record in records}
    assert Counter(record.step for record in records) == {5: len(rows), 1: 32, 2: 32, 3: 32, 4: 32}
    assert sum(record.outcome == "infra" for record in records) == 32 + 16
    assert all(record.gts is not None for record in records)
    by_id = {record.request_id: record for record in records}
    for row in seen["older"]["whole"]["rows"]:
        record = by_id[row["toolroll"]["request_id"]]
        assert record.tokens is not None
        assert record.tokens.ids == row["prompt"] + row["response"]
        assert record.tokens.mask[len(row["prompt"]) :] == row["mask"]
        assert [call["tool"] for call in record.calls][-3:] == ["code_interpreter"] * 2 + ["calc_gsm8k_reward"]


# Documentation, example, and script for GPUs


def test_overrides_on_page_are_valid(seen: dict[str, Any]) -> None:
    overrides = seen["spec"]["page"]
    assert len(overrides) == 9
    assert len([one for one in overrides if one.startswith("+")]) == 3, "keys that verl leaves to users"
    assert seen["asides"]["page"]["actor_rollout_ref.rollout.agent.default_agent_loop"] == "toolroll"
    named = verl_stage.overrides_on(verl_stage.ROOT / "docs" / "rewards.md")
    assert len(named) >= 2
    assert set(named) <= set(overrides)


def test_keys_on_page_exist(seen: dict[str, Any]) -> None:
    assert len(seen["spec"]["keys"]) > 15
    newer_only = {"trainer.use_v1"} if seen["version"] == "0.8" else set()
    assert set(seen["asides"]["unknown_keys"]) == newer_only


def test_files_on_page_load(seen: dict[str, Any]) -> None:
    assert seen["asides"]["files"] == {
        "tools.yaml": ["code_interpreter", "calc_gsm8k_reward"],
        "agent_loop.yaml": ["ToolrollAgentLoop"],
        "scored_loop.yaml": ["ToolrollAgentLoop"],
    }


def test_config_of_gpu_script_is_valid(seen: dict[str, Any]) -> None:
    """verl composes, validates and converts the config."""
    script = seen["asides"]["script"]
    assert len(script) > 40
    assert not any(one.startswith("+") for one in seen["spec"]["script"]), "all keys exist in verl"
    for key in ("multi_turn.tool_config_path", "agent.agent_loop_config_path"):
        assert Path(script[f"actor_rollout_ref.rollout.{key}"]).exists()
    assert Path(script["data.train_files"]).exists()


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest) -> Any:
    """Return a function that decodes token ids."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(request.getfixturevalue("sglang").model_dir)).decode
