"""verl's own managers and workers, on a real Ray, with our tools and our agent loop.

The newest verl and one older minor, each with both kinds of its trainers. The engine is a server of ours behind verl's
own client and load balancer: scripted, and with the newest verl a real SGLang as well.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from integrations import verl_stage
from toolroll.records import reader

Rows = list[dict[str, Any]]


def check_exact(rows: Rows, server: dict[str, Any]) -> int:
    """Ids, mask and log-probabilities are the engine's own, and nothing else is. How many generations they hold."""
    gave = defaultdict(list)
    for prompt, ids, logprobs in server["gave"]:
        gave[tuple(prompt)].append((ids, logprobs))
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
            fitting = [one for one in gave[tuple(whole[:place])] if whole[place : place + len(one[0])] == one[0]]
            spans = [(ids, logprobs, row["logprobs"][begin : begin + len(ids)]) for ids, logprobs in fitting]
            ids = next(ids for ids, told, had in spans if had == pytest.approx(told, abs=1e-6))
            assert set(mask[begin : begin + len(ids)]) == {1}
            place += len(ids)
            found += 1
    return found


def outcomes(rows: Rows) -> Counter[str]:
    return Counter(row["toolroll"]["finish_reason"] for row in rows)


def lives(scene: dict[str, Any]) -> Counter[str]:
    """Of the tools' instances, over all workers."""
    return sum((Counter(tools) for tools in scene["tools"]), Counter())


# Our tools in verl's registry, and in its own loop


def test_verls_registry_loads_our_tools_with_their_schemas(seen: dict[str, Any]) -> None:
    registry = seen["asides"]["registry"]
    assert registry["names"] == ["code_interpreter", "calc_gsm8k_reward", "shout"]
    assert registry["shown"][:2] == registry["written"][:2]
    shout = registry["shown"][2]["function"]
    assert shout["parameters"]["properties"]["times"] == {"type": "integer", "description": "How often.", "default": 1}


def test_verls_own_loop_runs_our_interpreter_call_by_call(seen: dict[str, Any], text: Any) -> None:
    scene = seen["older"]["by_verls_loop"]
    assert check_exact(scene["rows"], scene["server"]) == 16
    for row in scene["rows"]:
        assert "[No output.]" in text(row["response"]), "the first call ran in the sandbox"
        assert "NameError: name 'numbers' is not defined" in text(row["response"]), "verl releases after each call"
        assert "Current parsed answer=" in text(row["response"])
        assert len(row["tool_rewards"]) == 1
    assert lives(scene) == {"created": 12, "released": 12}, "three calls, each with a life of its own"


def test_tools_that_were_written_for_verl_run_in_our_loop(seen: dict[str, Any]) -> None:
    foreign = seen["asides"]["foreign"]
    assert foreign["said"] == ["Ada; up", "Ada; up; down", "5"]
    assert (foreign["step"], foreign["reward"], foreign["left"]) == (0.25, 3.0, 0)
    assert "entry" in foreign["wrong"], "arguments are checked by the schema as it was written"
    shown = foreign["schema"]["function"]["parameters"]["properties"]["entry"]
    assert shown == {"type": "array", "items": {"type": "string"}, "minItems": 1}
    assert "items" not in foreign["verls"]["function"]["parameters"]["properties"]["entry"], "verl drops it"


# Our loop, where each sample is a row


def test_64_questions_by_verls_manager(seen: dict[str, Any], text: Any) -> None:
    scene = seen["older"]["whole"]
    rows = scene["rows"]
    assert outcomes(rows) == {"stop": 64}
    assert {row["toolroll"]["fidelity"] for row in rows} == {"exact"}
    generations = check_exact(rows, scene["server"])
    assert generations == len(scene["server"]["gave"]) == 64 * 4 + 8, "every eighth had to mend a call"
    assert all(row["beyond"] == 0 for row in rows)
    for number, row in enumerate(rows):
        said = text(row["response"])
        assert "sum " in said.partition("numbers)))")[2], "what the first call kept was there in the second"
        assert "NameError" not in said
        assert ("is not valid JSON" in said) == (number % 8 == 3), "a malformed call is told what was wrong"
        assert row["num_turns"] == (10 if number % 8 == 3 else 8)
        right = number % 2
        assert row["score"] == right, "by verl's own reward loop"
        assert row["toolroll"]["tools"] == {"code_interpreter": 0.0, "calc_gsm8k_reward": right, "shout": 0.0}
        assert row["tool_rewards"] == [0.0 if right else -0.05]
        assert sum(row["turn_scores"]) == row["tool_rewards"][0]
        assert row["min_global_steps"] == row["max_global_steps"] == 4


def test_instances_live_once_and_are_rewarded_once(seen: dict[str, Any]) -> None:
    scene = seen["older"]["whole"]
    assert lives(scene) == {"created": 128, "released": 128, "rewarded_once": 128}
    assert [tools["created"] for tools in scene["tools"]] == [64, 64], "both workers had their share"


def test_the_limit_is_kept_over_workers_and_rewards_together(seen: dict[str, Any]) -> None:
    scene = seen["older"]["beside_rewards"]
    assert outcomes(scene["rows"]) == {"stop": 32}
    assert scene["scores"] == [float(number % 2 == 0) for number in range(48)], "by verl's reward manager"
    assert seen["programs"] > 2 * 64 + 2 * 32 + 48
    assert seen["most_running"] == 4, "in flight at the sandbox, at the most"


def test_the_loop_composes_the_score_itself_if_told_to(seen: dict[str, Any]) -> None:
    rows = seen["older"]["scored"]["rows"]
    assert [row["score"] for row in rows] == pytest.approx([1.5 if n % 2 else -0.05 for n in range(8)])


def test_a_real_engine(seen: dict[str, Any], text: Any) -> None:
    if "real" not in seen["older"]:
        return  # it was with the other version: the way to it is the same
    scene = seen["older"]["real"]
    assert check_exact(scene["rows"], scene["server"]) == len(scene["server"]["gave"]) >= 4
    assert set(outcomes(scene["rows"])) <= {"stop", "length", "max_turns"}
    called = [row for row in scene["rows"] if row["toolroll"]["calls"] > row["toolroll"]["policy_faults"]]
    assert len(called) >= 2, "the model calls its tool"
    assert all("<tool_response>" in text(row["response"]) for row in called)


# A sandbox that dies half-way


def test_samples_that_the_infrastructure_damaged_are_masked(seen: dict[str, Any]) -> None:
    scene = seen["older"]["dying"]
    rows = scene["rows"]
    assert len(rows) == 64, "verl's batch is complete"
    damaged = [row for row in rows if row["toolroll"]["left_out"]]
    well = [row for row in rows if not row["toolroll"]["left_out"]]
    assert len(damaged) == len(well) == 32
    for row in damaged:
        assert row["toolroll"]["outcome"] == "infra"
        assert not any(row["mask"])
        assert row["prompt"]
        assert row["response"]
    assert outcomes(well) == {"stop": 32}
    check_exact(well, scene["server"])
    assert lives(scene)["created"] == lives(scene)["released"] == 128


def test_a_damaged_sample_adds_nothing(seen: dict[str, Any]) -> None:
    compared = seen["older"]["dying"]["compared"]
    assert compared["kept"] == 32
    assert len(compared["advantages"]) == 8
    assert set(compared["advantages"].values()) == {0.0}, "the others' are those of verl without it, to the bit"
    assert compared["by_gae"] < 1e-6
    assert compared["of_the_damaged"] == 0.0
    assert compared["spread"] > 0.5
    for mode, (loss, gradient) in compared["losses"].items():
        assert loss < 1e-4, mode
        assert gradient < 1e-7, mode
    assert compared["of_verls_own"] > 0.1, "with verl's own estimator it would have"


def test_an_estimator_by_which_it_would_add_something_is_refused(seen: dict[str, Any]) -> None:
    refused = seen["asides"]["refused"]
    assert "algorithm.adv_estimator=toolroll_grpo" in refused["grpo"]
    assert "toolroll_remax" not in refused["remax"]
    assert "trainer.use_v1=True" in refused["remax"]


def test_settings_that_are_wrong_are_said(seen: dict[str, Any]) -> None:
    refused = seen["asides"]["refused"]
    assert "there is no key 'limit' (did you mean 'limits'?)" in refused["setting"]
    assert "deadlines nest" in refused["limit"]
    assert "There is no format 'klingon'" in refused["format"]


# Our loop, where a batch takes what there is


def present(scene: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Samples by prompt."""
    groups = defaultdict(list)
    for sample in scene["samples"]:
        groups[sample["key"].split("in")[0]].append(sample)
    return groups


def check_advantages(scene: dict[str, Any], present: dict[str, list[dict[str, Any]]]) -> None:
    """Each is what its score says among those of its group that are there."""
    import statistics

    for group in present.values():
        scores = [sample["score"] for sample in group]
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        for sample in group:
            made = scene["advantages"][sample["key"]]
            assert made == pytest.approx((sample["score"] - mean) / (spread + 1e-6), abs=1e-4)
    padding = [made for key, made in scene["advantages"].items() if key.startswith("pad")]
    assert padding == [0.0] * (scene["padded"] - len(scene["samples"]))


def test_newer_trainers_get_whole_groups(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["whole"]
    groups = present(scene)
    assert {name: len(group) for name, group in groups.items()} == {f"u{n}": 4 for n in range(7)}, (
        "no answer to the eighth question could be scored"
    )
    assert check_exact(scene["samples"], scene["server"]) == 28 * 4 + 4
    check_advantages(scene, groups)
    assert lives(scene)["created"] == lives(scene)["released"] == 64


def test_turns_that_were_written_anew_are_rows_of_their_own_there(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["anew"]
    sessions = Counter(sample["key"].rpartition("_")[0] for sample in scene["samples"])
    assert Counter(sessions.values()) == {4: 24, 5: 4}, "one for each turn of the model's"
    assert {sample["toolroll"]["fidelity"] for sample in scene["samples"]} == {"rerendered"}
    assert check_exact(scene["samples"], scene["server"]) == 28 * 4 + 4, "each is learned from once"
    whole = {key.replace("in1", "in2").rpartition("_")[0]: made for key, made in whole_advantages(seen).items()}
    for sample in scene["samples"]:
        assert abs(scene["advantages"][sample["key"]]) == pytest.approx(abs(whole[sample["key"].rpartition("_")[0]]))


def whole_advantages(seen: dict[str, Any]) -> dict[str, float]:
    """Of the same prompts, each sample as one row."""
    scene = seen["newer"]["whole"]
    return {sample["key"]: scene["advantages"][sample["key"]] for sample in scene["samples"]}


def test_newer_trainers_never_see_a_damaged_sample(seen: dict[str, Any]) -> None:
    scene = seen["newer"]["dying"]
    groups = present(scene)
    assert {name: len(group) for name, group in groups.items()} == {f"u{n}": 2 for n in range(7)}
    assert outcomes(scene["samples"]) == {"stop": 14}
    assert scene["padded"] == 32, "verl fills its batch up, with rows of its own"
    check_exact(scene["samples"], scene["server"])
    check_advantages(scene, groups)
    assert lives(scene)["created"] == lives(scene)["released"] == 3 * 64


# What is left on disk


def test_records_have_every_sample_of_ours(seen: dict[str, Any]) -> None:
    records = list(reader.read(Path(seen["spec"]["folder"]) / "dumps" / "toolroll"))
    rows = [row for name, scene in seen["older"].items() if name != "by_verls_loop" for row in scene["rows"]]
    assert {row["toolroll"]["request_id"] for row in rows} <= {record.request_id for record in records}
    assert Counter(record.step for record in records) == {5: len(rows), 1: 32, 2: 32, 3: 32}
    assert sum(record.outcome == "infra" for record in records) == 32 + 16
    assert all(record.gts is not None for record in records)
    written = {record.request_id: record for record in records}
    for row in seen["older"]["whole"]["rows"]:
        record = written[row["toolroll"]["request_id"]]
        assert record.tokens is not None
        assert record.tokens.ids == row["prompt"] + row["response"]
        assert record.tokens.mask[len(row["prompt"]) :] == row["mask"]
        assert [call["tool"] for call in record.calls][-3:] == ["code_interpreter"] * 2 + ["calc_gsm8k_reward"]


# What stands on the pages, in the example, and in the script for GPUs


def test_the_settings_on_the_page_are_verls(seen: dict[str, Any]) -> None:
    overrides = seen["spec"]["page"]
    assert len(overrides) == 9
    assert len([one for one in overrides if one.startswith("+")]) == 3, "keys that verl leaves to its users"
    assert seen["asides"]["page"]["actor_rollout_ref.rollout.agent.default_agent_loop"] == "toolroll"
    for other in (verl_stage.ROOT / "README.md", verl_stage.ROOT / "docs" / "rewards.md"):
        named = verl_stage.overrides_on(other)
        assert len(named) >= 2
        assert set(named) <= set(overrides)


def test_verl_has_every_key_that_the_page_names(seen: dict[str, Any]) -> None:
    assert len(seen["spec"]["keys"]) > 15
    newer_only = {"trainer.use_v1"} if seen["version"] == "0.8" else set()
    assert set(seen["asides"]["unknown_keys"]) == newer_only


def test_verl_loads_the_files_on_the_page(seen: dict[str, Any]) -> None:
    assert seen["asides"]["files"] == {
        "tools.yaml": ["code_interpreter", "calc_gsm8k_reward"],
        "agent_loop.yaml": ["ToolrollAgentLoop"],
        "scored_loop.yaml": ["ToolrollAgentLoop"],
    }


def test_verl_takes_the_config_of_the_script_for_gpus(seen: dict[str, Any]) -> None:
    """By its own config, its own validation, and the classes that its workers make of it."""
    script = seen["asides"]["script"]
    assert len(script) > 40
    assert not any(one.startswith("+") for one in seen["spec"]["script"]), "all keys are verl's own"
    for key in ("multi_turn.tool_config_path", "agent.agent_loop_config_path"):
        assert Path(script[f"actor_rollout_ref.rollout.{key}"]).exists()
    assert Path(script["data.train_files"]).exists()


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest) -> Any:
    """What the ids spell."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(request.getfixturevalue("sglang").model_dir)).decode
